"""Outputs of a given form: JSON of a schema, a regular expression, a choice or a grammar, compiled
by llguidance for a tokenizer.

A grammar is code that clients send: its size, the work to compile it and the work of each step are
limited, and what goes over a limit is refused or ends the sequence that follows it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ..errors import UsageError

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from .engine.grammar import Matcher

MAX_GRAMMAR_LENGTH = 64 * 1024
"""Characters of a schema or a grammar."""
MAX_REGEX_LENGTH = 4096
MAX_CHOICES = 512
MAX_DEPTH = 64
"""Depth to which a schema may be nested."""
_WHITESPACE = r"[\x20\x0A]{0,16}"
"""Between the tokens of JSON: a model may not write spaces for ever."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """The form of an output: exactly one of these, with vLLM's names and meanings.

    Raises `UsageError` unless there is one, of its type and within its limit.
    """

    json: str | bool | Mapping[str, Any] | None = None
    """A JSON schema; True is any object."""
    regex: str | None = None
    """A regular expression that the whole output matches, in the syntax of Rust's regex crate,
    without anchors."""
    choice: Sequence[str] | None = None
    """Texts, of which the output is one."""
    grammar: str | None = None
    """A context-free grammar in the syntax of Lark, as llguidance extends it."""

    def __post_init__(self) -> None:
        given = [field.name for field in dataclasses.fields(self) if self._given(field.name)]
        if len(given) != 1:
            found = ", ".join(given) or "none"
            raise UsageError(
                f"exactly one of `json`, `regex`, `choice` and `grammar` is needed, got {found}"
            )
        if self.choice is not None:
            texts = self.choice if isinstance(self.choice, Sequence) else ()
            if not 1 <= len(texts) <= MAX_CHOICES or not all(
                isinstance(text, str) and text for text in texts
            ):
                raise UsageError(f"`choice` must have 1 to {MAX_CHOICES} texts, none of them empty")
        for name, limit in (("regex", MAX_REGEX_LENGTH), ("grammar", MAX_GRAMMAR_LENGTH)):
            text = getattr(self, name)
            if text is not None and not (isinstance(text, str) and 1 <= len(text) <= limit):
                raise UsageError(f"`{name}` must be a text of 1 to {limit} characters")

    def _given(self, name: str) -> bool:
        return getattr(self, name) is not None

    def to_grammar(self) -> str:
        """llguidance's form of it. Raises `UsageError`."""
        from llguidance import LLMatcher

        if self.regex is not None:
            return LLMatcher.grammar_from_regex(self.regex)
        if self.choice is not None:
            return LLMatcher.grammar_from_regex("|".join(map(re.escape, self.choice)))
        if self.grammar is not None:
            return LLMatcher.grammar_from_lark(self.grammar)
        return json_grammar(self.json)


def json_grammar(schema: str | bool | Mapping[str, Any] | None) -> str:
    """llguidance's form of a JSON schema; True is any object. Raises `UsageError`."""
    from llguidance import LLMatcher

    try:
        return LLMatcher.grammar_from_json_schema(
            checked_schema(schema), overrides={"whitespace_pattern": _WHITESPACE}
        )
    except ValueError as error:
        raise UsageError(f"`json` is no JSON schema: {_line(error)}") from None


def checked_schema(schema: str | bool | Mapping[str, Any] | None) -> dict[str, Any]:
    """A JSON schema as an object. Raises `UsageError` for one that is none, or too large."""
    if schema is True:
        return {"type": "object"}
    try:
        found = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(found)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"`json` is no JSON schema: {_line(error)}") from None
    if not isinstance(found, Mapping):
        raise UsageError("`json` must be a JSON schema, that is an object, or True")
    if len(text) > MAX_GRAMMAR_LENGTH:
        raise UsageError(f"`json` has more than {MAX_GRAMMAR_LENGTH} characters")
    if _depth(found) > MAX_DEPTH:
        raise UsageError(f"`json` is nested more than {MAX_DEPTH} deep")
    return dict(found)


def _depth(value: Any) -> int:
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        depth += 1
        inner = [list(one.values()) if isinstance(one, Mapping) else one for one in level]
        level = [
            each
            for one in inner
            if isinstance(one, list)
            for each in one
            if isinstance(each, Mapping | list)
        ]
    return depth


class GrammarCompiler:
    """Compiles grammars for one tokenizer. May be used by several threads."""

    def __init__(self, tokenizer: Any, *, vocab_size: int, eos_token_ids: Sequence[int]):
        """Takes about a second for a vocabulary of 128k. `vocab_size` is the model's. Raises
        `UsageError` for a tokenizer that is no fast one, or without the extra `serve`."""
        try:
            from llguidance import LLExecutor, LLParserLimits
            from llguidance.hf import from_tokenizer
        except ImportError:
            raise UsageError(
                "structured outputs need the package llguidance: pip install 'swiftkv-jax[serve]'"
            ) from None
        try:
            self._tokenizer = from_tokenizer(
                tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids)
            )
        except ValueError as error:
            raise UsageError(f"this tokenizer cannot follow grammars: {_line(error)}") from None
        self._executor = LLExecutor()
        self._limits = LLParserLimits(
            initial_lexer_fuel=500_000,
            step_max_items=20_000,
            max_lexer_states=50_000,
            max_grammar_size=100_000,
            verbose_errors=False,
        )

    def compile(self, outputs: StructuredOutputs) -> Matcher:
        """A matcher at the beginning of the grammar, for `Request.grammar`. Raises `UsageError` for
        what is no grammar, or too complex."""
        return self.compile_grammar(outputs.to_grammar())

    def compile_grammar(self, grammar: str) -> Matcher:
        """The same of a grammar in llguidance's own form."""
        from llguidance import LLMatcher

        # The interpreter runs other threads meanwhile.
        found = LLMatcher(self._tokenizer, grammar, limits=self._limits, log_level=0)
        if found.is_error():
            raise UsageError(f"the grammar is refused: {_line(found.get_error())}")
        return _Matcher(found, self._executor)


class _Matcher:
    """`Matcher` of llguidance."""

    def __init__(self, matcher: LLMatcher, executor: Any):
        self._matcher, self._executor = matcher, executor

    @staticmethod
    def fill_masks(matchers: Sequence[Any], masks: np.ndarray) -> None:
        from llguidance.numpy import fill_next_token_bitmask_par

        rows = [(one._matcher, row) for row, one in enumerate(matchers)]
        fill_next_token_bitmask_par(matchers[0]._executor, rows, masks.view(np.int32))

    def accept(self, token_id: int, /) -> None:
        self._matcher.consume_token(token_id)

    def copy(self) -> Self:
        return type(self)(self._matcher.deep_copy(), self._executor)

    @property
    def is_ended(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str:
        return (
            f"the grammar: {_line(self._matcher.get_error())}" if self._matcher.is_error() else ""
        )


def _line(error: object) -> str:
    """A message in one line."""
    return " ".join(str(error).split())[:300]
