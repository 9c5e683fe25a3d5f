"""What all clients of Python are asked, and how a program of this folder reports what came.

The programs run in environments without this package. Each has functions for its clients, and calls
`report` with them.
"""

import asyncio
import inspect
import json
import sys
from collections.abc import Callable
from typing import Any

import pydantic

URL = sys.argv[1]
"""Of the server, without /v1."""
MODEL = "scripted"
CHAT = "Say: hello from the model"
CALL = 'Call: {"name": "weather", "arguments": {"city": "Paris"}}'
TOOL = f"{CALL}\nSay: the tool said {{result}}"
CITY = {"name": "Paris", "people": 2}
STRUCTURED = f"Say: {json.dumps(CITY)}"
CITY_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "people": {"type": "integer"}},
    "required": ["name", "people"],
    "additionalProperties": False,
}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "The weather in a city.", "parameters": PARAMETERS}
LONG = "word " * 80_000
"""More tokens than the server takes."""
SIGNS = "context_length_exceeded", "prompt is too long", "maximum context length"
PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhf"
    "DwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
"""A picture of one pixel."""


class City(pydantic.BaseModel):
    """A city."""

    name: str
    people: int


def user(text: str) -> list[Any]:
    """A chat in OpenAI's form and in Anthropic's."""
    return [{"role": "user", "content": text}]


def call_of(name: str, arguments: Any) -> str:
    """A script that calls another function than `weather`."""
    return f"Call: {json.dumps({'name': name, 'arguments': arguments})}"


def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def openai_image(question: str) -> list[Any]:
    """A chat in OpenAI's form in which a picture was shown before."""
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
    return [
        {"role": "user", "content": [{"type": "text", "text": "What is this?"}, picture]},
        {"role": "assistant", "content": "A dot."},
        {"role": "user", "content": question},
    ]


def anthropic_image(question: str) -> list[Any]:
    """The same in Anthropic's form."""
    source = {"type": "base64", "media_type": "image/png", "data": PNG}
    picture = {"type": "image", "source": source}
    return [
        {"role": "user", "content": [picture, {"type": "text", "text": "What is this?"}]},
        {"role": "assistant", "content": "A dot."},
        {"role": "user", "content": question},
    ]


def error_of(call: Callable[[], Any]) -> list[str]:
    """The class of the error that a call raises, and what tells a prompt that does not fit."""
    try:
        return [f"no error but {call()!r}"]
    except Exception as error:
        return name_and_sign(error)


def name_and_sign(error: Exception) -> list[str]:
    """The class of an error, with its code or with the words that clients look for."""
    told = f"{getattr(error, 'code', '')} {error}"
    return [type(error).__name__, *(sign for sign in SIGNS if sign in told)][:2]


def report(clients: dict[str, dict[str, Callable[[], Any]]]) -> None:
    """Run the functions of each client by feature, and print what they return, a line of JSON
    each."""
    with asyncio.Runner() as runner:
        for client, features in clients.items():
            for feature, function in features.items():
                found = {"client": client, "feature": feature}
                try:
                    value = function()
                    found["value"] = runner.run(value) if inspect.iscoroutine(value) else value
                except Exception as error:
                    found["error"] = f"{type(error).__name__}: {error}"[:500]
                print(json.dumps(found), flush=True)
