"""The table of clients by feature: what is tried, what a client does not have, and the page."""

import json
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "clients.md"
MARK = "<!-- Written by make test-agents, up to the next empty line. -->\n\n"
RECORD = Path(__file__).parent / "recorded.json"
FEATURES = {
    "chat": "chat",
    "stream": "stream",
    "tool": "tool",
    "forced": "forced tool",
    "structured": "structured output",
    "context": "long context",
    "image": "image in history",
}
NO_CHOICE = "n/a"
NO_FORM = "has no option"
AGENTS = {
    "Claude Code": "@anthropic-ai/claude-code",
    "Codex CLI": "@openai/codex",
    "opencode": "opencode-ai",
    "qwen-code": "@qwen-code/qwen-code",
    "Continue CLI": "@continuedev/cli",
    "aider": "aider-chat",
    "llm": "llm",
}
"""Client -> its package."""
LIBRARIES = {
    "openai, Python: chat": ("openai", "newest", "openai_client.py"),
    "openai, Python: responses": ("openai", "newest", "openai_client.py"),
    "openai, Node": ("openai (npm)", "node", "openai_client.mjs"),
    "anthropic, Python": ("anthropic", "newest", "anthropic_client.py"),
    "anthropic, Node": ("@anthropic-ai/sdk", "node", "anthropic_client.mjs"),
    "LiteLLM: openai/": ("litellm", "openai-2", "litellm_client.py"),
    "LiteLLM: hosted_vllm/": ("litellm", "openai-2", "litellm_client.py"),
    "LiteLLM: anthropic/": ("litellm", "openai-2", "litellm_client.py"),
    "LangChain OpenAI": ("langchain-openai", "newest", "langchain_client.py"),
    "LangChain Anthropic": ("langchain-anthropic", "newest", "langchain_client.py"),
    "LlamaIndex openai-like": (
        "llama-index-llms-openai-like",
        "openai-2",
        "llama_index_client.py",
    ),
    "Instructor": ("instructor", "openai-2", "instructor_client.py"),
    "Pydantic AI: chat": ("pydantic-ai-slim", "newest", "pydantic_ai_client.py"),
    "Pydantic AI: responses": ("pydantic-ai-slim", "newest", "pydantic_ai_client.py"),
    "Pydantic AI: anthropic": ("pydantic-ai-slim", "newest", "pydantic_ai_client.py"),
    "openai-agents: chat": ("openai-agents", "newest", "openai_agents_client.py"),
    "openai-agents: responses": ("openai-agents", "newest", "openai_agents_client.py"),
    "AI SDK: openai-compatible": ("@ai-sdk/openai-compatible", "node", "ai_sdk_client.mjs"),
    "AI SDK: openai": ("@ai-sdk/openai", "node", "ai_sdk_client.mjs"),
    "AI SDK: anthropic": ("@ai-sdk/anthropic", "node", "ai_sdk_client.mjs"),
}
"""Client -> (package, environment, program of `clients/`)."""
PACKAGES = AGENTS | {client: package for client, (package, _, _) in LIBRARIES.items()}
REASONS = {
    **{(agent, "forced"): NO_CHOICE for agent in AGENTS},
    **{(agent, "structured"): NO_FORM for agent in ("opencode", "Continue CLI", "aider")},
    ("aider", "image"): "sends none to models that it does not know",
    ("llm", "image"): "sends them with the question: refused by name",
    ("Instructor", "chat"): "answers are objects",
    ("Instructor", "tool"): "answers are objects",
    ("Pydantic AI: anthropic", "structured"): "refused by the client for models it does not know",
}
"""(client, feature) -> why it is not tried."""


def cells(clients: Any = PACKAGES) -> set[tuple[str, str]]:
    """What is tried."""
    found = {(client, feature) for client in clients for feature in FEATURES}
    return found - REASONS.keys()


def versions(environments: Path) -> dict[str, str]:
    """Package -> version, of those that are installed."""
    found = {}
    listed = environments / "node_modules"
    for path in [*listed.glob("*/package.json"), *listed.glob("@*/*/package.json")]:
        package = json.loads(path.read_text(encoding="utf-8"))
        found[path.parent.relative_to(listed).as_posix()] = package["version"]
    found["openai (npm)"] = found.pop("openai")
    for name in ("openai-2", "aider", "newest"):
        command = [environments / name / "bin" / "python", "-m", "pip", "list", "--format", "json"]
        listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        newer = {package["name"]: package["version"] for package in json.loads(listing)}
        found |= newer if name == "newest" else {k: v for k, v in newer.items() if k not in found}
    return found


def record(outcomes: dict[tuple[str, str], str], versions: dict[str, str]) -> list[dict[str, Any]]:
    """A row for each client."""
    return [
        {
            "client": client,
            "package": package.removesuffix(" (npm)"),
            "version": versions[package],
            "cells": {
                feature: REASONS.get((client, feature)) or outcomes[client, feature]
                for feature in FEATURES
            },
        }
        for client, package in PACKAGES.items()
    ]


def markdown(record: list[dict[str, Any]]) -> str:
    head = ["client", "version", *FEATURES.values()]
    rows = [
        [row["client"], f"{row['package']} {row['version']}", *row["cells"].values()]
        for row in record
    ]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page(record: list[dict[str, Any]]) -> str:
    """The page, with the table of a record."""
    before, mark, rest = PAGE.read_text(encoding="utf-8").partition(MARK)
    assert mark, f"{PAGE} has no line {MARK!r}"
    return f"{before}{mark}{markdown(record)}\n\n{rest.partition('\n\n')[2]}"
