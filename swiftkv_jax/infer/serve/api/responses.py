"""POST /v1/responses: OpenAI's Responses API, without anything that a server would have to keep. A
body becomes that of a chat; `response_events` writes the answer.

https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec

from ..app import App
from ..bodies.params import refuse_fields, refuse_unsupported
from ..errors import invalid, renaming, unsupported
from ..http.exchange import HTTPExchange
from ..protocol import (
    MAX_MESSAGES,
    Body,
    ChatBody,
    ContentPart,
    Effort,
    Function,
    FunctionCall,
    FunctionName,
    JSONSchema,
    Message,
    NamedToolChoice,
    ResponseFormat,
    Tool,
    ToolCall,
)
from ..service.admission import Reservation
from ..service.generation import Generation
from .event_stream import answer_in_events
from .generate import chat_generation
from .response_events import ResponseWriter
from .run import run

_OF_ITEMS = {
    "message": ("role", "content"),
    "function_call": ("name", "arguments", "call_id"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
"""Type of an item -> its fields, all of them needed. Reasoning may have `content`."""


class InputItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A message, a call of a function, what it returned, or reasoning (`_OF_ITEMS`)."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ContentPart] | None = None
    name: str | None = None
    arguments: str | None = None
    call_id: str | None = None
    output: str | list[ContentPart] | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    summary: Any = None
    encrypted_content: str | None = None


class TextFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class FunctionTool(Function, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]


class FunctionChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    name: str


class ReasoningOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    effort: Effort | None = None
    summary: Any = None
    generate_summary: Any = None


class EventOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


class ResponsesBody(Body, kw_only=True):
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: EventOptions | None = None
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None

    # Accepted without effect.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Any = None
    metadata: dict[str, str] | None = None

    # Refused unless they ask for nothing.
    background: Any = None
    conversation: Any = None
    include: Any = None
    max_tool_calls: Any = None
    previous_response_id: Any = None
    prompt: Any = None
    service_tier: Any = None
    store: Any = None
    top_logprobs: Any = None
    truncation: Any = None


_ASK_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Fields that are refused, with the values besides null at which they change nothing."""
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of a chat -> those of this body."""
_STATELESS = {
    "background": "answers are not kept: ask with `stream`",
    "conversation": "conversations are not kept: send all items in `input`",
    "previous_response_id": "answers are not kept: send all items in `input`",
    "store": "answers are not kept: leave `store` out, or set it to false",
}


async def responses(app: App, exchange: HTTPExchange) -> None:
    """POST /v1/responses"""
    await run(app, exchange, ResponsesBody, _prepare, answer_in_events)


async def _prepare(
    app: App, exchange: HTTPExchange, body: ResponsesBody, reservation: Reservation
) -> tuple[Generation, ResponseWriter]:
    refuse_fields(body, _ASK_FOR_NOTHING, _STATELESS)
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation")
    for name in ("summary", "generate_summary"):
        if body.reasoning is not None and getattr(body.reasoning, name) is not None:
            raise unsupported(f"reasoning.{name}", "reasoning is not summarized: it is all there")
    chat, items = chat_body(body)
    with renaming(_NAMES, items):
        refuse_unsupported(chat)
        generation, params = await chat_generation(app, exchange, chat, reservation)
    facts = {
        "id": f"resp_{exchange.request_id}",
        "created_at": int(time.time()),
        "model": body.model or app.model_names[0],
        "temperature": params.temperature,
        "top_p": params.top_p,
    }
    return generation, ResponseWriter(_echo(body) | facts)


def _echo(body: ResponsesBody) -> dict[str, Any]:
    """What an answer repeats of its request."""
    choice = "auto" if body.tool_choice is None else msgspec.to_builtins(body.tool_choice)
    tools = [{"type": "function", **msgspec.to_builtins(tool)} for tool in body.tools or ()]
    wanted = body.text.format if body.text else None
    format = {"type": "text"} if wanted is None else msgspec.to_builtins(wanted)
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "text": {"format": {name: each for name, each in format.items() if each is not None}},
        "tool_choice": choice,
        "tools": tools,
        "user": body.user,
    }


# The chat ------------------------------------------------------------------------------


def chat_body(body: ResponsesBody) -> tuple[ChatBody, list[str]]:
    """(the chat that a body asks for, where each of its messages comes from). Raises
    `APIError`."""
    items = body.input
    if isinstance(items, str):
        items = [InputItem(role="user", content=items)]
    if not 1 <= len(items) <= MAX_MESSAGES:
        raise invalid("input", f"`input` must have 1 to {MAX_MESSAGES} items")
    messages, places = _messages(items)
    if body.instructions is not None:
        messages.insert(0, Message(role="system", content=body.instructions))
        places.insert(0, "instructions")
    choice = body.tool_choice
    if isinstance(choice, FunctionChoice):
        choice = NamedToolChoice(type="function", function=FunctionName(name=choice.name))
    chat = ChatBody(
        model=body.model,
        messages=messages,
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        response_format=_format(body.text),
        tools=None if body.tools is None else [_tool(tool) for tool in body.tools],
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
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
        at, fields = f"input[{number}]", _OF_ITEMS[item.type]
        for name in ("role", "content", "name", "arguments", "call_id", "output"):
            if item.type == "reasoning" and name == "content":
                continue
            if (getattr(item, name) is None) == (name in fields):
                needs = "needs" if name in fields else "has no"
                raise invalid(f"{at}.{name}", f"an item of type {item.type!r} {needs} `{name}`")
        reasoned, reasons = reasons, False
        if item.type == "function_call":
            function = FunctionCall(name=item.name or "", arguments=item.arguments or "")
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
            if not (text := _reasoning_text(item, at)):
                continue
            message, reasons = Message(role="assistant", reasoning=text), True
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


def _reasoning_text(item: InputItem, at: str) -> str:
    """The text of an item of reasoning; a summary is none. Raises `APIError`."""
    if item.encrypted_content is not None:
        raise unsupported(f"{at}.encrypted_content", "reasoning is not encrypted here")
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


def _tool(tool: FunctionTool) -> Tool:
    function = Function(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        strict=tool.strict,
    )
    return Tool(type="function", function=function)
