"""Bodies of Anthropic's Messages API, as types: see `protocol`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from ..protocol import Body, Foreign, Object, Refused, ToolName, unread


@unread(
    "cache_control citations context file_id source title"
    " encrypted_content page_age url"  # of what a server's tools found
)
class Block(Object):
    """Text, or what is refused by its type."""

    type: str
    text: str | None = None
    content: Any = None
    tool_name: Any = None


@unread("caller server_name")
class ContentBlock(Block):
    """A part of a message (`messages._OF_BLOCKS`)."""

    content: str | list[Block] | dict[str, Any] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    data: str | None = None
    id: str | None = None
    input: dict[str, Any] | None = None
    is_error: bool | None = None
    name: str | None = None
    signature: str | None = None
    thinking: str | None = None
    tool_use_id: str | None = None
    toolset_name: str | None = None


class InputMessage(Object):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


@unread("allowed_callers cache_control input_examples")
class ClientTool(Object):
    """A function that the client runs."""

    name: ToolName
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None


class ToolChoice(Object):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Object):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None
    block_binding: Any = None


class OutputFormat(Object):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Object):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    task_budget: Any = None


class ContextChange(msgspec.Struct):
    """A change to long conversations, which leaves something out. Its further fields say when, and
    how much."""

    type: str


class ContextManagement(Object):
    edits: list[ContextChange] | None = None


class Metadata(Object):
    user_id: str | None = None


@unread(
    "billing_policy cache_control diagnostics fallback_credit_token fallbacks user_profile_id "
    "workspace_id"
)
class CountTokensBody(Body, kw_only=True):
    messages: list[InputMessage]
    system: str | list[Block] | None = None
    tools: list[dict[str, Any]] | None = None
    """Tools of type `ClientTool`, or of one that `tools.client_tools` leaves out or refuses."""
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None

    compaction: Foreign = None
    speed: Annotated[Any, Refused(("standard",))] = None
    thread: Any = None
    """Refused in `messages`."""


class MessagesBody(CountTokensBody, kw_only=True):
    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    """Accepted without effect."""

    container: Foreign = None
    inference_geo: Foreign = None
    mcp_servers: Annotated[Any, Refused(([],))] = None
    service_tier: Annotated[Any, Refused(("auto", "standard_only"))] = None
