"""LiteLLM, which most agents of Python go through, with three of its providers."""

# pyright: reportMissingImports=false

import functools
import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # the package's own, not one from the network

import harness
import litellm
from harness import CALL, CHAT, FUNCTION, LONG, MODEL, STRUCTURED, TOOL, City, user

litellm.telemetry = False
PROVIDERS = {"openai": "/v1", "hosted_vllm": "/v1", "anthropic": ""}
"""Provider -> what it expects after the address."""
TOOLS: Any = [{"type": "function", "function": FUNCTION}]


def create(provider: str, messages: list[Any], **fields: Any) -> Any:
    return litellm.completion(
        model=f"{provider}/{MODEL}",
        api_base=harness.URL + PROVIDERS[provider],
        api_key="none",
        messages=messages,
        **fields,
    )


def message(provider: str, messages: list[Any], **fields: Any) -> Any:
    return create(provider, messages, **fields).choices[0].message


def stream(provider: str) -> list[str]:
    chunks = create(provider, user(CHAT), stream=True)
    return [one.choices[0].delta.content or "" for one in chunks]


def tool(provider: str) -> str:
    messages = user(TOOL)
    found = message(provider, messages, tools=TOOLS)
    messages.append(found)
    for call in found.tool_calls:
        content = harness.weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return message(provider, messages, tools=TOOLS).content


def forced(provider: str) -> list[Any]:
    by_name = {"type": "function", "function": {"name": "weather"}}
    found = [
        message(provider, user(CALL), tools=TOOLS, tool_choice=one) for one in ("required", by_name)
    ]
    return [json.loads(one.tool_calls[0].function.arguments) for one in found]


def structured(provider: str) -> Any:
    script = STRUCTURED
    if provider == "anthropic":  # by a function of its own, as for older models
        script += "\n" + harness.call_of("json_tool_call", harness.CITY)
    return json.loads(message(provider, user(script), response_format=City).content)


def features(provider: str) -> dict[str, Any]:
    return {
        "chat": lambda: message(provider, user(CHAT)).content,
        "stream": functools.partial(stream, provider),
        "tool": functools.partial(tool, provider),
        "forced": functools.partial(forced, provider),
        "structured": functools.partial(structured, provider),
        "context": lambda: harness.error_of(lambda: create(provider, user(LONG))),
        "image": lambda: message(provider, harness.openai_image(CHAT)).content,
    }


harness.report({f"LiteLLM: {provider}/": features(provider) for provider in PROVIDERS})
