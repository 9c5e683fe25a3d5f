"""Bodies of Anthropic's Messages API, as types: see `protocol`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from ..protocol import Body, Foreign, Refused, ToolName


class Block(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Text, or what is refused by its type."""

    type: str
    text: str | None = None
    cache_control: Any = None
    citations: Any = None
    content: Any = None
    context: Any = None
    file_id: Any = None
    source: Any = None
    title: Any = None
    tool_name: Any = None

    # Of what a server's tools found.
    encrypted_content: Any = None
    page_age: Any = None
    url: Any = None


class ContentBlock(Block, kw_only=True):
    """A part of a message (`messages._OF_BLOCKS`)."""

    caller: Any = None
    content: str | list[Block] | dict[str, Any] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    data: str | None = None
    id: str | None = None
    input: dict[str, Any] | None = None
    is_error: bool | None = None
    name: str | None = None
    server_name: Any = None
    signature: str | None = None
    thinking: str | None = None
    tool_use_id: str | None = None
    toolset_name: str | None = None


class InputMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class ClientTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A function that the client runs."""

    name: ToolName
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    allowed_callers: Any = None
    cache_control: Any = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: Any = None


class ToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None
    block_binding: Any = None


class OutputFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    task_budget: Any = None


class ContextChange(msgspec.Struct, kw_only=True):
    """A change to long conversations, which leaves something out. Its further fields say when, and
    how much."""

    type: str


class ContextManagement(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    edits: list[ContextChange] | None = None


class Metadata(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    user_id: str | None = None


class CountTokensBody(Body, kw_only=True):
    messages: list[InputMessage]
    system: str | list[Block] | None = None
    tools: list[dict[str, Any]] | None = None
    """Tools of type `ClientTool`, or of one that `messages.offered` leaves out or refuses."""
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None

    # Accepted without effect.
    billing_policy: Any = None
    cache_control: Any = None
    diagnostics: Any = None
    fallback_credit_token: Any = None
    fallbacks: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None

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
