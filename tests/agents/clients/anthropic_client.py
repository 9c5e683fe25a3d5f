"""anthropic."""

# pyright: reportMissingImports=false

from typing import Any

import anthropic
import harness
from harness import CALL, CHAT, LONG, MODEL, STRUCTURED, TOOL, City, user

client = anthropic.Anthropic(base_url=harness.URL, api_key="none")
FUNCTION = harness.FUNCTION
TOOLS: Any = [
    {
        "name": FUNCTION["name"],
        "description": FUNCTION["description"],
        "input_schema": FUNCTION["parameters"],
    }
]
COMMON: Any = {"model": MODEL, "max_tokens": 500}


def create(messages: Any, **fields: Any) -> Any:
    return client.messages.create(**COMMON, messages=messages, **fields)


def stream() -> list[str]:
    with client.messages.stream(**COMMON, messages=user(CHAT)) as events:
        return list(events.text_stream)


def tool() -> str:
    weather = anthropic.beta_tool(harness.weather)
    runner = client.beta.messages.tool_runner(**COMMON, messages=user(TOOL), tools=[weather])
    return runner.until_done().content[-1].text


def forced() -> list[Any]:
    choices = {"type": "any"}, {"type": "tool", "name": "weather"}
    found = [create(user(CALL), tools=TOOLS, tool_choice=one) for one in choices]
    return [one.content[-1].input for one in found]


def structured() -> Any:
    found = client.messages.parse(**COMMON, messages=user(STRUCTURED), output_format=City)
    return found.parsed_output and found.parsed_output.model_dump()


harness.report(
    {
        "anthropic, Python": {
            "chat": lambda: create(user(CHAT)).content[0].text,
            "stream": stream,
            "tool": tool,
            "forced": forced,
            "structured": structured,
            "context": lambda: harness.error_of(lambda: create(user(LONG))),
            "image": lambda: create(harness.anthropic_image(CHAT)).content[0].text,
        }
    }
)
