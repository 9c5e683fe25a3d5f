"""POST /v1/responses: OpenAI's Responses API, without anything that a server would have to keep. A
body becomes that of a chat; `response_events` writes the answer.

https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from ..app import App
from ..bodies.params import refuse_fields
from ..errors import PromptTooLong, invalid, renaming, unsupported
from ..http.exchange import HTTPExchange
from ..protocol import (
    MAX_MESSAGES,
    ChatBody,
    FunctionCall,
    JSONSchema,
    Message,
    ResponseFormat,
    ToolCall,
)
from ..service.admission import Reservation
from ..service.generation import Generation
from .generate import chat_generation
from .response_bodies import OF_OTHER_ITEMS, InputItem, ReasoningOptions, ResponsesBody, TextOptions
from .response_events import ResponseWriter
from .run import note_ignored
from .tools import OfferedTools, chat_choice, offered, shown_name

_OF_ITEMS = {
    "message": ("role", "content"),
    "function_call": ("name", "arguments", "call_id"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
"""Type of an item -> its fields, all of them needed. Reasoning may have `content`, a call a
`namespace`."""
_FIELDS = (
    *("role", "content", "name", "arguments", "call_id", "output"),
    *OF_OTHER_ITEMS,
)
"""Fields that an item has by its type alone."""

_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of a chat -> those of this body."""
_INCLUDABLE = (
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""Values that `include` may have. Reasoning is in an answer as text, which a client sends back in
place of `encrypted_content`; no answer has anything of the others."""


async def response(
    app: App, exchange: HTTPExchange, body: ResponsesBody, reservation: Reservation
) -> tuple[Generation, ResponseWriter]:
    """Return what the engine runs for a body, and the writer of the answer. Raises `APIError`."""
    refuse_fields(body)
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation")
    for number, wanted in enumerate(body.include or ()):
        if wanted not in _INCLUDABLE:
            raise unsupported(f"include[{number}]", f"`include`: there is no {wanted!r} here")
    tools = offered(body.tools, ignore_unknown=app.options.unknown_fields == "ignore")
    note_ignored(exchange, tools.ignored)
    chat, items = chat_body(body, tools)
    facts = {
        "id": f"resp_{exchange.request_id}",
        "created_at": int(time.time()),
        "model": body.model or app.model_names[0],
    }
    writer = ResponseWriter(_echo(body) | facts, tools.namespaced)
    try:
        with renaming(_NAMES, items, tools.places):
            generation, params = await chat_generation(app, exchange, chat, reservation)
    except PromptTooLong:
        if body.stream:  # as at OpenAI: Codex looks for this error in the stream alone
            exchange.error_events = writer.fail
            await exchange.send_events(writer.begin())
        raise
    writer.answer |= {"temperature": params.temperature, "top_p": params.top_p}
    return generation, writer


def _echo(body: ResponsesBody) -> dict[str, Any]:
    """Return the fields of a request that its answer repeats."""
    choice = msgspec.to_builtins(body.tool_choice or "auto")
    reasoning = body.reasoning or ReasoningOptions()
    text = body.text or TextOptions()
    format = msgspec.to_builtins(text.format or {"type": "text"})
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "text": {"format": {name: each for name, each in format.items() if each is not None}},
        "tool_choice": choice,
        "tools": body.tools or [],
        "user": body.user,
    }


# The chat ------------------------------------------------------------------------------


def chat_body(body: ResponsesBody, tools: OfferedTools | None = None) -> tuple[ChatBody, list[str]]:
    """(the chat that a body asks for, where each of its messages comes from). `tools` are those of
    the body. Raises `APIError`."""
    items = body.input
    tools = tools or OfferedTools()
    if isinstance(items, str):
        items = [InputItem(role="user", content=items)]
    if not 1 <= len(items) <= MAX_MESSAGES:
        raise invalid("input", f"`input` must have 1 to {MAX_MESSAGES} items")
    messages, places = _messages(items)
    if body.instructions is not None:
        messages.insert(0, Message(role="system", content=body.instructions))
        places.insert(0, "instructions")
    chat = ChatBody(
        model=body.model,
        messages=messages,
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        response_format=_format(body.text),
        tools=tools.tools or None,
        tool_choice=chat_choice(body.tool_choice, tools),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=(body.reasoning or ReasoningOptions()).effort,
        metadata=body.metadata,
        user=body.user,
    )
    return chat, places


def _messages(items: list[InputItem]) -> tuple[list[Message], list[str]]:
    """(messages, where each comes from). The reasoning, text and calls of one answer are one
    message. Raises `APIError`."""
    messages: list[Message] = []
    places: list[str] = []
    calls: list[ToolCall] | None = None
    reasons = False  # the item before is reasoning
    for number, item in enumerate(items):
        at = f"input[{number}]"
        fields = _fields(item, at)
        for name in _FIELDS:
            if item.type == "reasoning" and name == "content":
                continue
            if (getattr(item, name) is None) == (name in fields):
                needs = "needs" if name in fields else "has no"
                raise invalid(f"{at}.{name}", f"an item of type {item.type!r} {needs} `{name}`")
        if item.type == "reasoning" and not _reasoning_text(item):
            continue  # the calls around it are those of one answer
        reasoned = reasons
        reasons = False
        if item.type == "function_call":
            name = shown_name(item.namespace, item.name or "")
            function = FunctionCall(name=name, arguments=item.arguments or "")
            call = ToolCall(function=function, id=item.call_id)
            if calls is not None:
                calls.append(call)
                continue
            calls = [call]
            if messages and messages[-1].role == "assistant":
                messages[-1].tool_calls = calls
                continue
            message = Message(role="assistant", tool_calls=calls)
        elif item.type == "function_call_output":
            calls = None
            message = Message(role="tool", content=item.output, tool_call_id=item.call_id)
        elif item.type == "reasoning":
            calls = None
            message = Message(role="assistant", reasoning=_reasoning_text(item))
            reasons = True
        elif reasoned and item.role == "assistant":
            messages[-1].content, places[-1] = item.content, at
            continue
        else:
            calls = None
            assert item.role is not None
            message = Message(role=item.role, content=item.content)
        messages.append(message)
        places.append(at)
    return messages, places


def _fields(item: InputItem, at: str) -> tuple[str, ...]:
    """The fields that an item needs. Raises `APIError` for a type that is not supported."""
    if item.type == "item_reference":
        message = "items are not kept: set `store` to false, so that the client sends them whole"
        raise unsupported(f"{at}.type", message)
    if item.type not in _OF_ITEMS:
        raise unsupported(f"{at}.type", f"an item of type {item.type!r} is not supported")
    if item.namespace is not None and item.type != "function_call":
        message = f"an item of type {item.type!r} has no `namespace`"
        raise invalid(f"{at}.namespace", message)
    return _OF_ITEMS[item.type]


def _reasoning_text(item: InputItem) -> str:
    """The text of an item of reasoning; a summary is none, nor is what another server has
    encrypted."""
    if not isinstance(item.content, list):
        return item.content or ""
    return "".join(part.text or "" for part in item.content)


def _format(text: TextOptions | None) -> ResponseFormat | None:
    if text is None or text.format is None:
        return None
    found = text.format
    schema = None
    if found.type != "json_schema" and (found.schema is not None or found.name is not None):
        raise invalid("text.format", f"`text.format` of type {found.type!r} has no schema")
    if found.type == "json_schema":
        if found.schema is None:
            raise invalid("text.format.schema", "`schema` is missing")
        schema = JSONSchema(name=found.name, schema=found.schema, strict=found.strict)
    return ResponseFormat(type=found.type, json_schema=schema)
