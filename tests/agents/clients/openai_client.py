"""openai: chats and responses."""

# pyright: reportMissingImports=false

import json
from typing import Any

import harness
import openai
from harness import CALL, CHAT, FUNCTION, LONG, MODEL, STRUCTURED, TOOL, City, user

client = openai.OpenAI(base_url=f"{harness.URL}/v1", api_key="none")
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
FLAT: Any = [{"type": "function", "strict": True, **FUNCTION}]
BY_NAME: Any = {"type": "function", "function": {"name": "weather"}}


def create(messages: list[Any], **fields: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=messages, **fields).choices[0]


def chat() -> str:
    return create(user(CHAT)).message.content


def stream() -> list[str]:
    chunks = client.chat.completions.create(model=MODEL, messages=user(CHAT), stream=True)
    return [one.choices[0].delta.content or "" for one in chunks if one.choices]


def tool() -> str:
    messages = user(TOOL)
    message = create(messages, tools=TOOLS).message
    messages.append(message)
    for call in message.tool_calls:
        content = harness.weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return create(messages, tools=TOOLS).message.content


def forced() -> list[Any]:
    choices = [create(user(CALL), tools=TOOLS, tool_choice=one) for one in ("required", BY_NAME)]
    return [json.loads(one.message.tool_calls[0].function.arguments) for one in choices]


def structured() -> Any:
    found = client.chat.completions.parse(
        model=MODEL, messages=user(STRUCTURED), response_format=City
    )
    parsed = found.choices[0].message.parsed
    return parsed and parsed.model_dump()


def image() -> str:
    return create(harness.openai_image(CHAT)).message.content


def respond(content: Any, **fields: Any) -> Any:
    return client.responses.create(model=MODEL, input=content, store=False, **fields)


def respond_stream() -> list[str]:
    events = respond(CHAT, stream=True)
    return [one.delta for one in events if one.type == "response.output_text.delta"]


def respond_tool() -> str:
    items = user(TOOL)
    found = respond(items, tools=FLAT)
    items += found.output
    for call in [one for one in found.output if one.type == "function_call"]:
        output = harness.weather(**json.loads(call.arguments))
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    return respond(items, tools=FLAT).output_text


def respond_forced() -> list[Any]:
    by_name = {"type": "function", "name": "weather"}
    found = [respond(CALL, tools=FLAT, tool_choice=one) for one in ("required", by_name)]
    return [json.loads(one.output[-1].arguments) for one in found]


def respond_structured() -> Any:
    found = client.responses.parse(model=MODEL, input=STRUCTURED, text_format=City, store=False)
    return found.output_parsed and found.output_parsed.model_dump()


def respond_image() -> str:
    picture = {"type": "input_image", "image_url": f"data:image/png;base64,{harness.PNG}"}
    shown = {"role": "user", "content": [{"type": "input_text", "text": "What?"}, picture]}
    return respond([shown, {"role": "assistant", "content": "A dot."}, *user(CHAT)]).output_text


harness.report(
    {
        "openai, Python: chat": {
            "chat": chat,
            "stream": stream,
            "tool": tool,
            "forced": forced,
            "structured": structured,
            "context": lambda: harness.error_of(lambda: create(user(LONG))),
            "image": image,
        },
        "openai, Python: responses": {
            "chat": lambda: respond(CHAT).output_text,
            "stream": respond_stream,
            "tool": respond_tool,
            "forced": respond_forced,
            "structured": respond_structured,
            "context": lambda: harness.error_of(lambda: respond(LONG)),
            "image": respond_image,
        },
    }
)
