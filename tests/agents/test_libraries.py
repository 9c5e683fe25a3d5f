"""Client libraries, each in a process: programs of `clients/` print what they got, a line of JSON
for each feature."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.agents import table
from tests.agents.conftest import ENVIRONMENTS, Server

PROGRAMS = Path(__file__).parent / "clients"
CITY, ARGUMENTS = {"name": "Paris", "people": 2}, {"city": "Paris"}
OPENAI, ANTHROPIC = "context_length_exceeded", "prompt is too long"
OVERFLOW = {
    "openai,": ["BadRequestError", OPENAI],
    "anthropic,": ["BadRequestError", ANTHROPIC],
    "LiteLLM": ["ContextWindowExceededError"],
    "LangChain OpenAI": ["OpenAIContextOverflowError"],
    "LangChain Anthropic": ["AnthropicContextOverflowError"],
    "LlamaIndex": ["BadRequestError", OPENAI],
    "Instructor": ["InstructorRetryException", OPENAI],
    "Pydantic AI": ["ModelContextWindowExceededError"],
    "openai-agents": ["BadRequestError", OPENAI],
    "AI SDK: openai": ["AI_APICallError", OPENAI],
    "AI SDK: anthropic": ["AI_APICallError", ANTHROPIC],
}
"""Beginning of a client's name -> class of the error, and what tells a prompt that does not fit
where the class does not."""


@pytest.fixture(scope="session")
def results(server: Server, tmp_path_factory) -> Any:
    """Runs a program once; returns {(client, feature): what it printed}."""
    node = ENVIRONMENTS / "clients"  # finds the packages beside it
    shutil.copytree(PROGRAMS, node, dirs_exist_ok=True)
    found: dict[str, dict[tuple[str, str], Any]] = {}

    def run(environment: str, program: str) -> dict[tuple[str, str], Any]:
        if program not in found:
            python = ENVIRONMENTS / environment / "bin" / "python"
            command = ["node"] if environment == "node" else [str(python)]
            folder = tmp_path_factory.mktemp("client")
            done = server.run([*command, str(node / program), server.url], folder, {})
            lines = [line for line in done.output.splitlines() if line.startswith('{"client"')]
            printed = [json.loads(line) for line in lines]
            assert printed, done.output[-2000:]
            found[program] = {(one["client"], one["feature"]): one for one in printed}
        return found[program]

    return run


@pytest.mark.parametrize(("client", "feature"), sorted(table.cells(table.LIBRARIES)))
def test_library(results, client, feature):
    _, environment, program = table.LIBRARIES[client]
    printed = results(environment, program)[client, feature]
    assert "error" not in printed, printed["error"]
    value = printed["value"]
    if client == "Instructor" and feature in ("stream", "image", "structured"):
        value = value[-1] if feature == "stream" else value
        assert value == CITY
    elif feature == "stream":
        assert "".join(value) == "hello from the model" and len(list(filter(None, value))) > 1
    elif feature == "context":
        (expected,) = [one for begin, one in OVERFLOW.items() if client.startswith(begin)]
        assert value[: len(expected)] == expected
    elif feature == "forced":
        assert value == expected_calls(client)
    else:
        texts = {"tool": "the tool said sunny in Paris", "structured": CITY}
        assert value == texts.get(feature, "hello from the model")


def expected_calls(client: str) -> Any:
    """What the programs return of forced calls."""
    if client == "Instructor":
        return [CITY] * 3
    if client.startswith("Pydantic AI"):
        return CITY
    return "the tool said sunny in Paris" if client.startswith("openai-agents") else [ARGUMENTS] * 2
