"""Outputs of a given form: JSON of a schema, a regular expression, a choice or a grammar, compiled
by llguidance for a tokenizer.

A grammar is code that clients send: its size, the work to compile it and the work of each step are
limited, and what goes over a limit is refused or ends the sequence that follows it.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ...errors import UsageError
from ..engine.grammar import mask_words
from .compile_grammar import TokenizerDescription, compile_grammar, one_line
from .json_schema import MAX_GRAMMAR_LENGTH, MAX_REGEX_LENGTH, checked_schema

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from ..engine.grammar import Matcher

MAX_CHOICES = 512
MAX_COMPILED_LENGTH = 4 * MAX_GRAMMAR_LENGTH
"""Characters of all grammars of one request."""
_LARK_REGEX = re.compile(r'"(?:\\.|[^"\\\n])*+"?|//[^\n]*|/((?:\\[\s\S]|[^/\\])++)/?')
"""Texts, comments, and regular expressions (the group) of a grammar in Lark's syntax, also those
that do not end: each character is looked at once."""
_JSON: Mapping[str, Any] = {
    "whitespace_pattern": r"[\x20\x0A]{0,16}",
    "json_allowed_escapes": '"\\bfnrt',
}
"""How JSON is written: no spaces for ever, and no escapes of letters (`\\u0061`), so that a key has
one spelling."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """The form of an output: exactly one of these, with vLLM's names and meanings.

    Raises `UsageError` unless there is one, of its type and within its limit.
    """

    json: str | bool | Mapping[str, Any] | None = None
    """A JSON schema; True is any object."""
    regex: str | None = None
    """A regular expression that the whole output matches, in the syntax of Rust's regex crate."""
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
            if sum(map(len, texts)) > MAX_GRAMMAR_LENGTH:
                raise UsageError(f"`choice` has more than {MAX_GRAMMAR_LENGTH} characters in all")
        for name, limit in (("regex", MAX_REGEX_LENGTH), ("grammar", MAX_GRAMMAR_LENGTH)):
            text = getattr(self, name)
            if text is not None and not (isinstance(text, str) and 1 <= len(text) <= limit):
                raise UsageError(f"`{name}` must be a text of 1 to {limit} characters")
        for found in _LARK_REGEX.finditer(self.grammar or ""):
            if len(found[1] or "") > MAX_REGEX_LENGTH:
                raise UsageError(
                    f"a regular expression in `grammar` has more than {MAX_REGEX_LENGTH} characters"
                )
        if "%json" in (self.grammar or "") and re.search(r"multipleOf|\\u", self.grammar or ""):
            raise UsageError("`multipleOf` and `\\u` in the %json of a `grammar` are not supported")

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

    return LLMatcher.grammar_from_json_schema(json_options(checked_schema(schema)))


def json_options(schema: Mapping[str, Any]) -> str:
    """A checked schema as JSON, with the options under which llguidance compiles it."""
    return json.dumps({**schema, "x-guidance": _JSON})


class GrammarCompiler:
    """Compiles grammars for one tokenizer. May be used by several threads."""

    def __init__(self, tokenizer: Any, *, vocab_size: int, eos_token_ids: Sequence[int]):
        """Takes about a second for a vocabulary of 128k. `vocab_size` and `eos_token_ids` are the
        model's; without any of these an output ends where nothing can follow.

        Raises `UsageError` for a tokenizer that is no fast one, or without the extra `serve`.
        """
        try:
            from llguidance import LLExecutor
        except ImportError:
            raise UsageError(
                "structured outputs need the package llguidance: pip install 'swiftkv-jax[serve]'"
            ) from None
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        try:
            self._tokenizer = self.describe_tokenizer().make()
        except ValueError as error:
            raise UsageError(f"this tokenizer cannot follow grammars: {one_line(error)}") from None
        self._executor = LLExecutor()

    def __repr__(self) -> str:
        return f"GrammarCompiler(vocabulary of {self._vocab_size} tokens)"

    def compile(self, outputs: StructuredOutputs) -> Matcher:
        """A matcher at the beginning of the grammar, for `Request.grammar`. Raises `UsageError` for
        what is no grammar, or too complex."""
        return self.compile_grammar(outputs.to_grammar())

    def compile_grammar(self, grammar: str) -> Matcher:
        """The same of a grammar in llguidance's own form."""
        if len(grammar) > MAX_COMPILED_LENGTH:
            raise UsageError(f"the grammar has more than {MAX_COMPILED_LENGTH} characters")
        found = compile_grammar(self._tokenizer, grammar)
        made = GrammarMatcher(found, self._executor, grammar)
        mask = np.zeros((1, mask_words(self._vocab_size)), np.uint32)
        first = made.copy()
        first.fill_masks([first], mask)
        if first.error or not mask.any():
            raise UsageError("the grammar is refused: it allows no first token, or is too complex")
        return made

    def describe_tokenizer(self) -> TokenizerDescription:
        """For another process that compiles grammars. Raises `ValueError` for a tokenizer that is
        no fast one."""
        from tokenizers import Tokenizer

        backend = copy.copy(getattr(self._source, "backend_tokenizer", None))
        if not isinstance(backend, Tokenizer):
            raise ValueError("it is not a fast tokenizer")
        backend.no_padding()
        backend.no_truncation()
        ends = self._eos_token_ids
        if not ends and self._source.eos_token_id is not None:
            ends = [self._source.eos_token_id]
        return TokenizerDescription(backend.to_str(), self._vocab_size, ends or None)


class GrammarMatcher:
    """`Matcher` of llguidance. Made by `GrammarCompiler`."""

    def __init__(self, matcher: LLMatcher, executor: Any, grammar: str):
        self._matcher = matcher
        self._executor = executor
        self.grammar = grammar
        """`grammar` is in llguidance's own form."""

    @staticmethod
    def fill_masks(matchers: Sequence[Any], masks: np.ndarray) -> None:
        from llguidance.numpy import fill_next_token_bitmask_par

        rows = [(one._matcher, row) for row, one in enumerate(matchers)]
        fill_next_token_bitmask_par(matchers[0]._executor, rows, masks.view(np.int32))

    def accept(self, token_id: int, /) -> None:
        self._matcher.consume_token(token_id)

    def copy(self) -> Self:
        return type(self)(self._matcher.deep_copy(), self._executor, self.grammar)

    def forced(self) -> list[int]:
        return self._matcher.compute_ff_tokens()

    @property
    def is_ended(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str:
        if not self._matcher.is_error():
            return ""
        return (
            "the answer cannot go on: its grammar is too complex, or allows nothing that this "
            f"tokenizer can write ({one_line(self._matcher.get_error())})"
        )
