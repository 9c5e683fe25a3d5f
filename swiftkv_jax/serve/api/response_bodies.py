"""Bodies of OpenAI's Responses API, as types: see `protocol`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from ..protocol import (
    Body,
    ContentPart,
    Effort,
    Foreign,
    Function,
    Object,
    Refused,
    ToolName,
    unread,
)

OF_OTHER_ITEMS = (
    *("action", "code", "container_id", "input", "operation", "outputs", "queries", "result"),
    *("results", "server_label"),
)
"""Fields of items that are refused by their type."""


@unread(" ".join(("summary caller", *OF_OTHER_ITEMS)))
class InputItem(Object):
    """A message, a call of a function, what it returned, or reasoning (`responses._OF_ITEMS`)."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ContentPart] | None = None
    namespace: str | None = None
    name: str | None = None
    arguments: str | None = None
    call_id: str | None = None
    output: str | list[ContentPart] | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    encrypted_content: str | None = None


class TextFormat(Object):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(Object):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


@unread("allowed_callers output_schema")
class FunctionTool(Function, kw_only=True):
    """A function that the client runs."""

    type: Literal["function"]
    defer_loading: bool | None = None


class NamespaceTool(Object, kw_only=True):
    """A group of functions. A call says of which group its function is."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: list[dict[str, Any]]


class FunctionChoice(Object, tag_field="type", tag="function"):
    name: str
    namespace: str | None = None


class AllowedChoice(Object, tag_field="type", tag="allowed_tools"):
    """Some of the tools: functions, and those that are not offered."""

    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


Summary = Literal["auto", "concise", "detailed"]


class ReasoningOptions(Object):
    effort: Effort | None = None

    # Advice, without effect.
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    generate_summary: Summary | None = None
    mode: Literal["standard"] | None = None
    summary: Summary | None = None


class EventOptions(Object):
    include_obfuscation: bool | None = None


@unread("client_metadata prompt_cache_options prompt_cache_retention")
@unread("moderation prompt", Foreign)
class ResponsesBody(Body, kw_only=True):
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: EventOptions | None = None
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = None
    """Tools of any type: `tools`."""
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None

    # Accepted without effect.
    max_tool_calls: int | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None

    background: Annotated[Any, Refused((False,), "answers are not kept: ask with `stream`")] = None
    context_management: Annotated[Any, Refused(([],))] = None
    conversation: Annotated[
        Any, Refused(reason="conversations are not kept: send all items in `input`")
    ] = None
    previous_response_id: Annotated[
        Any, Refused(reason="answers are not kept: send all items in `input`")
    ] = None
    service_tier: Annotated[Any, Refused(("auto", "default"))] = None
    store: Annotated[
        Any, Refused((False,), "answers are not kept: leave `store` out, or set it to false")
    ] = None
    top_logprobs: Annotated[Any, Refused((0,))] = None
    truncation: Annotated[Any, Refused(("disabled",))] = None
