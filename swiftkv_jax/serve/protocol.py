"""Bodies of requests, as types: what is not one of these fields, or not of its type, is refused.

A null is as if the field were not there. Fields that this server cannot honour are listed too, so
that they are refused by name and not as unknown ones; see `params`.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec

from ..infer.engine.sampling_params import FOREIGN_PARAMS
from ..text.chat_messages import MessageError, normalize_message
from .errors import invalid
from .options import MAX_PROMPTS

MAX_MESSAGES = 4096


def is_whole(value: float) -> bool:
    """Return whether a number is an integer, as in JSON Schema, whatever its form in JSON. From
    2**53 on a float may be another number than the one that was written."""
    return isinstance(value, int) or (value.is_integer() and abs(value) < 2**53)


class Object(msgspec.Struct, forbid_unknown_fields=True):
    """An object in a body."""


def unread[S: msgspec.Struct](names: str, like: Any = Any) -> Callable[[type[S]], type[S]]:
    """Decorator of a struct that adds fields which nothing reads: they may have any value, or are
    of the type `like`."""
    fields = [(name, like, None) for name in names.split()]

    def add(kind: type[S]) -> type[S]:
        found = msgspec.defstruct(
            kind.__name__, fields, bases=(kind,), namespace={"__doc__": kind.__doc__}, kw_only=True
        )
        return found  # type: ignore[return-value]

    return add


class Body(Object, kw_only=True):
    """A body that names a model."""

    model: str | None = None


@dataclasses.dataclass(frozen=True, eq=False)  # `Annotated` keeps one of equal ones: 0 == False
class Refused:
    """Annotation of a field that this server cannot honour: its values are refused, except for null
    and those that change nothing."""

    neutral: tuple[Any, ...] = ()
    """Values that change nothing, besides those of `FOREIGN_PARAMS`."""
    reason: str = ""
    """Message of the error."""


Foreign = Annotated[Any, Refused()]


@functools.cache
def refused_fields(kind: type[Body]) -> dict[str, Refused]:
    """The fields of a body that are refused, all with their neutral values."""
    found = {}
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        for mark in getattr(hint, "__metadata__", ()):
            if isinstance(mark, Refused):
                neutral = (*mark.neutral, *FOREIGN_PARAMS.get(name, ()))
                found[name] = dataclasses.replace(mark, neutral=neutral)
    return found


class StreamOptions(Object):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JSONSchema(Object):
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(Object):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None


class Prediction(Object):
    """A text that the answer may repeat, in part or with changes."""

    type: Literal["content"]
    content: str | list[ContentPart]


class StructuredOutputsField(Object):
    """Fields of `StructuredOutputs`."""

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


def _now(kind: str) -> Refused:
    """Mark of a field that vLLM had once, and now has in `structured_outputs`."""
    return Refused(reason=f"`guided_{kind}` is now `structured_outputs.{kind}`")


@unread("prompt_cache_options prompt_cache_retention")
@unread(
    "audio early_stopping kv_transfer_params length_penalty logits_processors moderation "
    "prompt_embeds repetition_detection spaces_between_special_tokens stream_interval "
    "use_beam_search verbosity vllm_xargs web_search_options",
    Foreign,
)
class Sampling(Body, kw_only=True):
    """Fields of completions and chats. Ranges are those of `SamplingParams`."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: Any = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsField | None = None
    prediction: Prediction | None = None
    speculative: bool | None = None
    """False: every step emits one token. The tokens are the same."""

    # Accepted without effect.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None

    guided_choice: Annotated[Any, _now("choice")] = None
    guided_grammar: Annotated[Any, _now("grammar")] = None
    guided_json: Annotated[Any, _now("json")] = None
    guided_regex: Annotated[Any, _now("regex")] = None
    modalities: Annotated[Any, Refused((["text"],))] = None
    service_tier: Annotated[Any, Refused(("auto", "default"))] = None
    store: Annotated[Any, Refused((False,))] = None
    watermarking: Annotated[Any, Refused((False,))] = None


def _integers(ids: Any) -> Any:
    """Token ids of which some are written like 16.0; what holds anything else stays as it is."""
    kinds = set(map(type, ids)) if isinstance(ids, list) else set()
    if float not in kinds or not kinds <= {int, float}:
        return ids
    return [int(one) for one in ids] if all(is_whole(one) for one in ids) else ids


class CompletionBody(Sampling, kw_only=True):
    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: Foreign = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts, texts or token ids. Raises `APIError`."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        prompt = _integers(prompt)
        kinds = set(map(type, prompt))
        if kinds == {int}:
            return [prompt]
        if len(prompt) > MAX_PROMPTS:
            raise invalid("prompt", f"{len(prompt)} prompts are above the limit of {MAX_PROMPTS}")
        if kinds == {str}:
            return prompt
        if kinds == {list}:
            prompt = [_integers(ids) for ids in prompt]
            if all(set(map(type, ids)) == {int} for ids in prompt):
                return prompt
        raise invalid(
            "prompt",
            "`prompt` must be a text, a list of texts, a list of token ids, or a list of such "
            "lists, none of them empty",
        )


ToolName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,64}(?!\n)$")]
"""Name of a function or a namespace."""


class Function(Object, omit_defaults=True):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Object):
    type: Literal["function"]
    function: Function


class FunctionName(Object):
    name: str


class NamedToolChoice(Object, tag_field="type", tag="function"):
    function: FunctionName


class AllowedTools(Object):
    mode: Literal["auto", "required"]
    tools: list[NamedToolChoice]


class AllowedToolsChoice(Object, tag_field="type", tag="allowed_tools"):
    """Some of the tools: the prompt has all of them, so that its prefix stays cached."""

    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice


class FunctionCall(Object):
    name: str
    arguments: str | dict[str, Any]


class ToolCall(Object):
    """A call in a message of the assistant's."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


@unread(
    "annotations logprobs image_url input_audio file detail file_id file_data file_url filename "
    "audio_url video_url"
)
class ContentPart(Object):
    """A part of a message. Fields of other types are known so that these are refused by type."""

    type: str
    text: str | None = None
    refusal: Any = None


class Message(Object, omit_defaults=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None

    def rendered(self, number: int) -> dict[str, Any]:
        """The message as chat templates take it. Raises `APIError`."""
        try:
            return normalize_message(msgspec.to_builtins(self), number)
        except MessageError as error:
            code = "unsupported_parameter" if error.unsupported else "invalid_value"
            raise invalid(f"messages[{number}].{error.field}", str(error), code) from None


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatBody(Sampling, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None

    chat_template: Annotated[
        Any, Refused(reason="templates come from the checkpoint or the server's command line alone")
    ] = None
    documents: Annotated[Any, Refused(([],))] = None
    echo: Foreign = None
    function_call: Annotated[
        Any, Refused(reason="`function_call` is deprecated: the field is `tool_choice`")
    ] = None
    functions: Annotated[Any, Refused(reason="`functions` is deprecated: the field is `tools`")] = (
        None
    )
    thinking: Annotated[
        Any,
        Refused(
            reason="`thinking` is not supported: `reasoning_effort` 'none' switches reasoning off"
        ),
    ] = None
    thinking_token_budget: Foreign = None


class TokenizeBody(Body, kw_only=True):
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    tools: list[Tool] | None = None


class DetokenizeBody(Body, kw_only=True):
    tokens: list[int]


class LoadAdapterBody(Body, kw_only=True):
    lora_name: str
    lora_path: str


class UnloadAdapterBody(Body, kw_only=True):
    lora_name: str


class Pair(Object):
    context: str
    continuation: str


class ScoreBody(Body, kw_only=True):
    pairs: list[Pair]
    top_logprobs: int | None = None
    user: str | None = None
