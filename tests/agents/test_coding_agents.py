"""Command-line agents, as their users start them: a prompt goes in, files and text come out."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.agents import table
from tests.agents.conftest import ENVIRONMENTS, PROMPT, Run, Server

CHAT = "Say: hello from the model"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
COMMAND = "echo one two | tee made.txt"
LONG = "word " * 80_000
"""More tokens than the server takes."""
ALMOST_LONG = "word " * 48_000
"""Fits, but not with the new tokens that an agent asks for."""
PICTURE = Path(__file__).parents[2] / "docs" / "img" / "page.png"


@dataclasses.dataclass(frozen=True)
class Agent:
    """How an agent is told of the server, and what its tools are called."""

    command: tuple[str, ...]
    """The program, which reads the prompt from its standard input, or from `PROMPT`."""
    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    """Environment; `ADDRESS` in it, and in `file`, is the server's address."""
    file: tuple[str, str] = ("", "")
    """Path in the home folder, and content, of its configuration."""
    quiet: dict[str, str] = dataclasses.field(default_factory=dict)
    """Environment that keeps it from calling home."""
    shell: tuple[str, dict[str, Any]] = ("", {})
    """Its tool that runs `COMMAND`."""
    view: tuple[str, str] = ("", "")
    """Its tool that reads a picture, and the argument with the path."""
    structured: Callable[[Path], tuple[list[str], str]] | None = None
    """Flags for an answer by `SCHEMA`, with the script."""

    def run(self, server: Server, folder: Path, prompt: str, *flags: str) -> Run:
        url = server.url
        if self.file[0]:
            path = folder / self.file[0]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.file[1].replace("ADDRESS", url), encoding="utf-8")
        variables = {
            name: value.replace("ADDRESS", url)
            for name, value in (self.variables | self.quiet).items()
        }
        return server.run([*self.command, *flags], folder, variables, prompt)


def claude_schema(folder: Path) -> tuple[list[str], str]:
    call = {"name": "StructuredOutput", "arguments": {"city": "Paris"}}
    flags = ["--output-format", "json", "--json-schema", json.dumps(SCHEMA)]
    return flags, f"Call: {json.dumps(call)}\nSay: done"


def codex_schema(folder: Path) -> tuple[list[str], str]:
    (folder / "schema.json").write_text(json.dumps(SCHEMA), encoding="utf-8")
    return ["--output-schema", "schema.json"], 'Say: {"city": "Paris"}'


def qwen_schema(folder: Path) -> tuple[list[str], str]:
    call = {"name": "structured_output", "arguments": {"city": "Paris"}}
    return ["--json-schema", json.dumps(SCHEMA)], f"Call: {json.dumps(call)}\nSay: done"


def llm_schema(folder: Path) -> tuple[list[str], str]:
    return ["--schema", json.dumps(SCHEMA)], 'Say: {"city": "Paris"}'


LLM_FUNCTION = f"""
def shell(command: str) -> str:
    import subprocess
    assert command == {COMMAND!r}
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout
"""
AGENTS = {
    "Claude Code": Agent(
        command=("claude", "-p", "--allowedTools", "Bash,Read"),
        variables={
            "ANTHROPIC_BASE_URL": "ADDRESS",
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": "scripted",
        },
        quiet={"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
        shell=("Bash", {"command": COMMAND, "description": "writes a file"}),
        view=("Read", "file_path"),
        structured=claude_schema,
    ),
    "Codex CLI": Agent(
        command=("codex", "exec", "--dangerously-bypass-approvals-and-sandbox")
        + ("--skip-git-repo-check",),
        file=(
            ".codex/config.toml",
            'model = "scripted"\nmodel_provider = "local"\nanalytics.enabled = false\n'
            '[model_providers.local]\nname = "local"\nbase_url = "ADDRESS/v1"\n',
        ),
        shell=("exec_command", {"cmd": COMMAND}),
        view=("view_image", "path"),
        structured=codex_schema,
    ),
    "opencode": Agent(
        command=("opencode", "run"),
        file=(
            "opencode.json",
            '{"model": "local/scripted", "provider": {"local": {"npm": '
            '"@ai-sdk/openai-compatible", "options": {"baseURL": "ADDRESS/v1"}, '
            '"models": {"scripted": {}}}}}',
        ),
        quiet={"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        shell=("bash", {"command": COMMAND, "description": "writes a file"}),
        view=("read", "filePath"),
    ),
    "qwen-code": Agent(
        command=("qwen", "--auth-type", "openai", "--yolo"),
        variables={
            "OPENAI_BASE_URL": "ADDRESS/v1",
            "OPENAI_API_KEY": "none",
            "OPENAI_MODEL": "scripted",
        },
        quiet={"QWEN_TELEMETRY_ENABLED": "0"},
        shell=("run_shell_command", {"command": COMMAND, "is_background": False}),
        view=("read_file", "file_path"),
        structured=qwen_schema,
    ),
    "Continue CLI": Agent(
        command=("cn", "--config", "config.yaml", "--auto", "-p"),
        file=(
            "config.yaml",
            "name: local\nversion: 0.0.1\nschema: v1\nmodels:\n"
            "  - {name: scripted, provider: openai, model: scripted, apiBase: ADDRESS/v1, "
            "apiKey: none}",
        ),
        quiet={"CONTINUE_TELEMETRY_ENABLED": "0"},
        shell=("Bash", {"command": COMMAND}),
        view=("Read", "filepath"),
    ),
    "aider": Agent(
        command=(str(ENVIRONMENTS / "aider/bin/aider"), "--model", "openai/scripted", "--no-git")
        + ("--yes-always", "--no-pretty", "--message-file", PROMPT),
        variables={"OPENAI_API_BASE": "ADDRESS/v1", "OPENAI_API_KEY": "none"},
        quiet={
            "AIDER_ANALYTICS_DISABLE": "1",
            "AIDER_CHECK_UPDATE": "0",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
    ),
    "llm": Agent(
        command=(str(ENVIRONMENTS / "newest/bin/llm"), "-m", "scripted"),
        file=(
            ".config/io.datasette.llm/extra-openai-models.yaml",
            "- {model_id: scripted, model_name: scripted, api_base: ADDRESS/v1, "
            "supports_tools: true, supports_schema: true}",
        ),
        shell=("shell", {"command": COMMAND}),
        structured=llm_schema,
    ),
}


@pytest.fixture(scope="session")
def chats(server: Server, tmp_path_factory) -> Callable[[str], Run]:
    """One chat of each agent, for all that it shows."""
    found: dict[str, Run] = {}

    def chat(client: str) -> Run:
        if client not in found:
            found[client] = AGENTS[client].run(server, tmp_path_factory.mktemp("chat"), CHAT)
        return found[client]

    return chat


def cells(*features: str) -> pytest.MarkDecorator:
    found = sorted(cell for cell in table.cells(table.AGENTS) if cell[1] in features)
    return pytest.mark.parametrize(("client", "feature"), found)


@cells("chat", "stream")
def test_chat(chats, client, feature):
    run = chats(client)
    assert "hello from the model" in run.output.splitlines(), run.output
    assert {one["status"] for one in run.requests} == {200}
    if feature == "stream":
        assert all(one["body"]["stream"] for one in run.requests)


@cells("tool")
def test_tool(server, tmp_path, client, feature):
    """A command is run, and the answer has what it printed. aider, which has no tools, writes a
    file that the answer holds."""
    if client == "aider":
        run = AGENTS["aider"].run(server, tmp_path, "Say: made.txt\\n```\\none two\\n```")
        assert (tmp_path / "made.txt").read_text() == "one two\n", run.output
        return
    name, arguments = AGENTS[client].shell
    script = json.dumps({"name": name, "arguments": arguments})
    flags = ["--functions", LLM_FUNCTION] if client == "llm" else []
    run = AGENTS[client].run(
        server, tmp_path, f"Call: {script}\nSay: the tool said {{result}}", *flags
    )
    assert (tmp_path / "made.txt").read_text() == "one two\n", run.output
    said = run.output.rpartition("the tool said ")[2]
    assert "one two" in said and {one["status"] for one in run.requests} == {200}, run.output


@cells("structured")
def test_structured_output(server, tmp_path, client, feature):
    structured = AGENTS[client].structured
    assert structured is not None
    flags, script = structured(tmp_path)
    run = AGENTS[client].run(server, tmp_path, script, *flags)
    objects = [line for line in run.output.splitlines() if line.startswith("{")]
    assert objects, run.output
    found = json.loads(objects[-1])
    assert found.get("structured_output", found) == {"city": "Paris"}


OVERFLOW = {
    "Claude Code": "Prompt is too long",
    "Codex CLI": "ran out of room in the model's context window",
    "opencode": "ContextOverflowError",
    "qwen-code": "maximum context length",
    "Continue CLI": "Context length exceeded",
    "aider": "has hit a token limit!",
    "llm": "maximum context length",
}
"""What an agent writes about a prompt that does not fit: its own words, or where it has none, the
server's."""


@cells("context")
def test_long_context(server, tmp_path, client, feature):
    flags = ["--format", "json"] if client == "opencode" else []
    run = AGENTS[client].run(server, tmp_path, f"{CHAT}\n{LONG}", *flags)
    assert OVERFLOW[client] in run.output, run.output[-2000:]
    if client == "Claude Code":
        run = AGENTS[client].run(server, tmp_path, f"{ALMOST_LONG}\n{CHAT}")
        assert "hello from the model" in run.output.splitlines(), run.output
        statuses = [one["status"] for one in run.requests]
        assert statuses == [400, 200], "it asks again for fewer tokens"


@cells("image")
def test_image_in_history(server, tmp_path, client, feature):
    """A picture is read, and the chat goes on."""
    picture = tmp_path / "page.png"
    picture.write_bytes(PICTURE.read_bytes())
    agent = AGENTS[client]
    name, argument = agent.view
    call = json.dumps({"name": name, "arguments": {argument: str(picture)}})
    run = agent.run(server, tmp_path, f"Call: {call}\n{CHAT}")
    assert "hello from the model" in run.output, run.output
    assert {one["status"] for one in run.requests} == {200}
