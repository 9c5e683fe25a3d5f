"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API. A body becomes that of
a chat; `message_events` writes the answer.

https://platform.claude.com/docs/en/api/messages
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from ...text.chat_template import THINKING_SWITCHES
from ..app import App
from ..bodies.forms import check_takes_tools
from ..bodies.media import first_said_now, text_in_place_of
from ..bodies.params import refuse_fields
from ..errors import invalid, renaming, unsupported
from ..http.exchange import HTTPExchange
from ..protocol import (
    MAX_MESSAGES,
    ChatBody,
    Effort,
    FunctionCall,
    FunctionName,
    JSONSchema,
    Message,
    NamedToolChoice,
    ResponseFormat,
    ToolCall,
)
from ..service.admission import Reservation
from ..service.generation import Generation
from .generate import chat_generation
from .message_bodies import (
    Block,
    CountTokensBody,
    InputMessage,
    MessagesBody,
    OutputConfig,
    OutputFormat,
    Thinking,
    ToolChoice,
)
from .message_events import NO_THREADS, MessageWriter
from .run import counted_body, note_ignored
from .tools import OfferedTools, client_tools

_OF_SERVERS = (
    "server_tool_use",
    "mcp_tool_use",
    "mcp_tool_result",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
)
"""Blocks of tools that another server ran. They are left out: no such tool is offered here."""
_OF_BLOCKS = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
    **dict.fromkeys(_OF_SERVERS, ()),
}
"""Type of a block -> the fields that it needs."""
_OF_ROLES = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use", *_OF_SERVERS),
}
"""Role of a message -> the blocks that it may have."""
_CLEARING = ("clear_thinking_", "clear_tool_uses_")
"""Beginnings of the types that `context_management.edits` may have. They save tokens: none has an
effect, and the answer says so."""
_BILLING = "x-anthropic-billing-header:"
"""Text that Claude Code writes before its system prompt, with a new number in each request."""

_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "thinking",
    "chat_template_kwargs": "thinking",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "parameters": "input_schema",
}
"""Fields of a chat -> those of this body."""


# Handlers ------------------------------------------------------------------------------


async def count_tokens(app: App, exchange: HTTPExchange) -> None:
    """POST /v1/messages/count_tokens"""
    async with counted_body(app, exchange, CountTokensBody) as body:
        chat, places, tools = _chat(app, exchange, body)
        check_takes_tools(chat.tools, app.tool_format)
        with renaming(_NAMES, places, tools.places):
            prompt = await app.encode_chat(chat, "", exchange.num_bytes_in, counting=True)
    found: dict[str, Any] = {"input_tokens": len(prompt.token_ids)}
    if body.context_management is not None:
        found["context_management"] = {"original_input_tokens": found["input_tokens"]}
    await exchange.send_json(200, found)


async def message(
    app: App, exchange: HTTPExchange, body: MessagesBody, reservation: Reservation
) -> tuple[Generation, MessageWriter]:
    """Return what the engine runs for a body, and the writer of the answer. Raises `APIError`."""
    chat, places, tools = _chat(app, exchange, body)
    with renaming(_NAMES, places, tools.places):
        generation, _ = await chat_generation(app, exchange, chat, reservation)
    model = body.model or app.model_names[0]
    manages = body.context_management is not None
    return generation, MessageWriter(exchange.request_id, model, manages_context=manages)


def _chat(
    app: App, exchange: HTTPExchange, body: CountTokensBody
) -> tuple[ChatBody, list[str], OfferedTools]:
    """(the chat that a body asks for, where each of its messages comes from, its tools). Raises
    `APIError`."""
    _refuse(body)
    tools = client_tools(body.tools, ignore_unknown=app.options.unknown_fields == "ignore")
    note_ignored(exchange, tools.ignored)
    chat, places = chat_body(body, app.template_variables, tools)
    return chat, places, tools


def _refuse(body: CountTokensBody) -> None:
    """Raise `APIError` for a field that this server cannot honour and that asks for something."""
    if body.thread is not None:
        raise invalid("thread", "conversations are not kept: send all messages", NO_THREADS)
    refuse_fields(body)
    wanted = body.context_management
    for number, change in enumerate((wanted and wanted.edits) or ()):
        if not change.type.startswith(_CLEARING):
            message = f"{change.type!r}: a context is only cleared, by {' and '.join(_CLEARING)}"
            raise unsupported(f"context_management.edits[{number}].type", message)


# The chat ------------------------------------------------------------------------------


def chat_body(
    body: CountTokensBody, variables: Collection[str], tools: OfferedTools | None = None
) -> tuple[ChatBody, list[str]]:
    """(the chat that a body asks for, where each of its messages comes from). `variables` are those
    that the chat template reads; `tools` are those of the body. Raises `APIError`."""
    if not 1 <= len(body.messages) <= MAX_MESSAGES:
        raise invalid("messages", f"`messages` must have 1 to {MAX_MESSAGES} messages")
    found: list[Message] = []
    places: list[str] = []
    if body.system is not None:
        found.append(Message(role="system", content=_system_text(body.system)))
        places.append("system")
    now = first_said_now((one.role == "assistant", _calls(one)) for one in body.messages)
    for number, message in enumerate(body.messages):
        at = f"messages[{number}]"
        for one in _messages_of(message, at, is_new=number >= now):
            found.append(one)
            places.append(at)
    last = found[-1]
    if last.tool_calls:
        raise invalid(places[-1], "the results of the calls in the last message must follow it")
    config = body.output_config or OutputConfig()
    choice = body.tool_choice or ToolChoice(type="auto")
    thinks, switches, effort = _thinking(body.thinking, config, variables)
    chat = ChatBody(
        model=body.model,
        messages=found,
        tools=(tools and tools.tools) or None,
        tool_choice=_choice(choice),
        parallel_tool_calls=False if choice.disable_parallel_tool_use else None,
        response_format=_format(config.format),
        reasoning_effort=effort,
        chat_template_kwargs=switches,
        include_reasoning=thinks,
        continue_final_message=bool(last.role == "assistant" and last.content),
    )
    if isinstance(body, MessagesBody):
        chat.max_tokens = body.max_tokens
        chat.stop = body.stop_sequences or None
        chat.temperature = body.temperature
        chat.top_p = body.top_p
        chat.top_k = body.top_k
    return chat, places


def _calls(message: InputMessage) -> bool:
    """Return whether a message calls tools."""
    content = message.content
    return not isinstance(content, str) and any(block.type == "tool_use" for block in content)


def _messages_of(message: InputMessage, at: str, *, is_new: bool) -> list[Message]:
    """The messages of a chat that stand for one of this API: each result of a tool is one of its
    own. `is_new` is whether the user says it now (`media`). Raises `APIError`."""
    role = message.role
    content = message.content
    if isinstance(content, str):
        return [Message(role=role, content=content)]
    found: list[Message] = []
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    for number, block in enumerate(content):
        here = f"{at}.content[{number}]"
        stand_in = _stand_in(block, is_new)
        if stand_in is not None:
            texts.append(stand_in)
            continue
        _check_block(block, here, _OF_ROLES[role], f"a message of role {role!r}")
        if block.type == "text":
            texts.append(block.text or "")
        elif block.type == "thinking":
            reasoning.append(block.thinking or "")
        elif block.type == "redacted_thinking" or block.type in _OF_SERVERS:
            continue  # only the server that wrote it can read it, or ran its tool
        elif block.type == "tool_use":
            function = FunctionCall(name=block.name or "", arguments=block.input or {})
            calls.append(ToolCall(function=function, id=block.id))
        else:
            if texts:
                found.append(Message(role=role, content="".join(texts)))
                texts = []
            if isinstance(block.content, dict):
                raise invalid(f"{here}.content", "`content` must be a text or a list of blocks")
            result = _text(block.content or "", f"{here}.content", is_new=False)
            found.append(Message(role="tool", content=result, tool_call_id=block.tool_use_id))
    if role == "assistant":
        found.append(
            Message(
                role=role,
                content="".join(texts) if texts or not (calls or reasoning) else None,
                reasoning="".join(reasoning) or None,
                tool_calls=calls or None,
            )
        )
    elif texts or not found:
        found.append(Message(role=role, content="".join(texts)))
    return found


def _system_text(system: str | list[Block]) -> str:
    """The system prompt, without what would make each request's prefix a new one. Raises
    `APIError`."""
    if isinstance(system, list):
        empty = Block(type="text", text="")
        system = [empty if (one.text or "").startswith(_BILLING) else one for one in system]
    return _text(system, "system", is_new=True)


def _text(content: str | list[Block], at: str, *, is_new: bool) -> str:
    """Text of blocks that are nothing else; where they are not new, with texts in place of images
    and the like. Raises `APIError`."""
    if isinstance(content, str):
        return content
    texts = []
    for number, block in enumerate(content):
        stand_in = _stand_in(block, is_new)
        if stand_in is None:
            _check_block(block, f"{at}[{number}]", ("text",), "this field")
            stand_in = block.text or ""
        texts.append(stand_in)
    return "".join(texts)


def _stand_in(block: Block, is_new: bool) -> str | None:
    """The text in place of a block (`media`); None for one that is read, or refused, as are all
    that are new."""
    if is_new:
        return None
    if block.type == "tool_reference":  # all tools are offered: there is nothing to load
        return f"[tool reference: {block.tool_name or ''}]"
    return text_in_place_of(block.type)


def _check_block(block: Block, at: str, kinds: Collection[str], where: str) -> None:
    """Raise `APIError` for a block that is not of one of these kinds, or lacks a field."""
    if block.type not in _OF_BLOCKS:
        message = f"a block of type {block.type!r}: the model reads text alone"
        raise unsupported(f"{at}.type", message)
    if block.type not in kinds:
        raise invalid(f"{at}.type", f"{where} has no block of type {block.type!r}")
    for name in _OF_BLOCKS[block.type]:
        if getattr(block, name) is None:
            raise invalid(f"{at}.{name}", f"`{name}` is missing")


def _thinking(
    thinking: Thinking | None, config: OutputConfig, variables: Collection[str]
) -> tuple[bool | None, dict[str, Any] | None, Effort | None]:
    """(whether the answer shows its reasoning, switches of the chat template, effort). The effort
    is advice: a template that reads none goes without."""
    effort: Effort | None = config.effort if "reasoning_effort" in variables else None
    if thinking is None:
        return None, None, effort
    if thinking.type == "disabled":
        return None, None, "none"
    switches = {name: True for name in THINKING_SWITCHES if name in variables}
    return thinking.display != "omitted", switches or None, effort


def _choice(choice: ToolChoice) -> Literal["none", "required"] | NamedToolChoice | None:
    if choice.type == "tool":
        if choice.name is None:
            raise invalid("tool_choice.name", "`name` is missing")
        return NamedToolChoice(function=FunctionName(name=choice.name))
    names: Mapping[str, Literal["none", "required"]] = {"none": "none", "any": "required"}
    return names.get(choice.type)


def _format(format: OutputFormat | None) -> ResponseFormat | None:
    if format is None:
        return None
    return ResponseFormat(type="json_schema", json_schema=JSONSchema(schema=format.schema))
