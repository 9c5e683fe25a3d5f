"""llguidance's matchers, within limits of work. Imports nothing else, so that a process which only
compiles grammars starts quickly and stays small."""

from __future__ import annotations

import dataclasses
import json
from typing import IO, TYPE_CHECKING

from ...errors import UsageError
from .grammar_tokenizer import grammar_tokenizer, hide_token_names, show_token_names

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


_REMEDIES = {
    "Unimplemented keys": "; leave these keywords out of the schema, and check the answer for them",
    "coerce_one_of": "; use `anyOf`, here the same where no value fits two of the options",
    "look-around": "; write the pattern without it, or leave it out and check the answer",
    "backreferences": "; write the pattern without them, or leave it out and check the answer",
    "min/maxProperties only": "; require all of them, or leave the keyword out",
}
"""Messages of llguidance about a grammar -> what to do."""


@dataclasses.dataclass(frozen=True)
class TokenizerDescription:
    """Properties of a tokenizer that llguidance needs."""

    text: str
    """The JSON of the package tokenizers."""
    vocab_size: int
    """The model's."""
    eos_token_ids: list[int] | None
    """None are the tokenizer's."""

    def make(self) -> LLTokenizer:
        """Takes about a second for a vocabulary of 128k. Raises `ValueError`."""
        from llguidance import LLTokenizer

        text = grammar_tokenizer(self.text)
        return LLTokenizer(text, n_vocab=self.vocab_size, eos_token=self.eos_token_ids)

    def write(self, file: IO[str]) -> None:
        json.dump(dataclasses.asdict(self), file)

    @classmethod
    def read(cls, file: IO[str]) -> TokenizerDescription:
        return cls(**json.load(file))


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the beginning of a grammar in llguidance's own form. Other threads run
    meanwhile. Raises `UsageError`."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=50_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )
    found = LLMatcher(tokenizer, _with_hidden_names(grammar), limits=limits, log_level=0)
    if found.is_error():
        message = found.get_error()
        remedies = (remedy for cause, remedy in _REMEDIES.items() if cause in message)
        remedy = next(remedies, "")
        raise UsageError(f"the grammar is refused: {one_line(message)}{remedy}")
    return found


def _with_hidden_names(grammar: str) -> str:
    """A grammar with the names that tokens have in `grammar_tokenizer`."""
    if "<" not in grammar:
        return grammar
    try:
        found = json.loads(grammar)
        parts = [part for part in found["grammars"] if "lark_grammar" in part]
    except (ValueError, TypeError, KeyError, RecursionError):
        return hide_token_names(grammar)  # Lark, by itself
    for part in parts:
        part["lark_grammar"] = hide_token_names(part["lark_grammar"])
    return json.dumps(found) if parts else grammar


def one_line(error: object) -> str:
    """A message in one line."""
    return show_token_names(" ".join(str(error).split()))[:300]
