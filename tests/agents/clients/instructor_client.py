"""Instructor over both clients: an answer is always an object, by a form or by a forced call."""

# pyright: reportMissingImports=false

from typing import Any

import anthropic
import harness
import instructor
import openai
from harness import CITY, MODEL, STRUCTURED, City
from instructor import Mode


def openai_client(mode: Mode) -> Any:
    client = openai.OpenAI(base_url=f"{harness.URL}/v1", api_key="none")
    return instructor.from_openai(client, mode=mode)


def ask(client: Any, script: str, **fields: Any) -> Any:
    messages = fields.pop("messages", [{"role": "user", "content": script}])
    found = client.chat.completions.create(
        model=MODEL, response_model=City, messages=messages, max_retries=0, **fields
    )
    return found.model_dump()


def forced() -> list[Any]:
    script = harness.call_of("City", CITY)
    modes = Mode.TOOLS, Mode.TOOLS_STRICT
    return [ask(openai_client(mode), script) for mode in modes]


def anthropic_forced() -> list[Any]:
    client = anthropic.Anthropic(base_url=harness.URL, api_key="none")
    script = harness.call_of("City", CITY)
    return [ask(instructor.from_anthropic(client), script, max_tokens=500)]


def stream() -> list[Any]:
    client = openai_client(Mode.JSON_SCHEMA)
    parts = client.chat.completions.create_partial(
        model=MODEL, response_model=City, messages=[{"role": "user", "content": STRUCTURED}]
    )
    return [one.model_dump() for one in parts]


harness.report(
    {
        "Instructor": {
            "stream": stream,
            "forced": lambda: forced() + anthropic_forced(),
            "structured": lambda: ask(openai_client(Mode.JSON_SCHEMA), STRUCTURED),
            "context": lambda: harness.error_of(
                lambda: ask(openai_client(Mode.JSON_SCHEMA), harness.LONG)
            ),
            "image": lambda: ask(
                openai_client(Mode.JSON_SCHEMA), "", messages=harness.openai_image(STRUCTURED)
            ),
        }
    }
)
