"""Free reasoning up to the tag that ends it, then a grammar, as one `Matcher`. Imports no JAX."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from ..engine.grammar import Matcher, fill_rows, mask_of


class ReasoningGrammar:
    """One sequence that reasons before it follows a grammar."""

    def __init__(
        self,
        grammar: Matcher,
        vocab_size: int,
        *,
        end_tag: bytes,
        spelling_of: Callable[[int], bytes],
        begin_token: int | None,
        end_token_ids: Sequence[int],
    ):
        """The reasoning ends with the token that completes `end_tag`, and may contain any tokens
        but `end_token_ids`. Without `begin_token` it has begun already. With it, reasoning begins
        only if that is the first token; any other first token belongs to the grammar. Ids are below
        `vocab_size`."""
        self.grammar = grammar
        self.end_tag = end_tag
        self._spelling_of = spelling_of
        self.begin_token = begin_token
        """None once the first token has come."""
        self.end_token_ids = tuple(end_token_ids)
        self._inside = begin_token is None
        self._last = b""
        """The last bytes of the reasoning."""
        self._error = ""
        self._free = mask_of(None, vocab_size) & ~mask_of(self.end_token_ids, vocab_size)

    @staticmethod
    def fill_masks(matchers: Sequence[Any], masks: np.ndarray) -> None:
        """Fill masks, as `Matcher.fill_masks` does."""
        fill_rows({row: one.grammar for row, one in enumerate(matchers) if not one._inside}, masks)
        for one, mask in zip(matchers, masks, strict=True):
            if one._inside:
                mask[:] = one._free
            elif (token := one.begin_token) is not None:
                mask[token // 32] |= np.uint32(1) << np.uint32(token % 32)

    def accept(self, token_id: int, /) -> None:
        """Accept a token, as `Matcher.accept` does."""
        if self._inside:
            self._reason(token_id)
        elif token_id == self.begin_token:
            self._inside = True
        else:
            self.grammar.accept(token_id)
        self.begin_token = None

    def _reason(self, token_id: int) -> None:
        text = self._last + self._spelling_of(token_id)
        _, tag, rest = text.partition(self.end_tag)
        self._last = text[1 - len(self.end_tag) :]
        self._inside = not tag
        if rest.strip(b"\n"):
            self._error = "the answer cannot go on: its reasoning ends within a token"

    def copy(self) -> Self:
        """A copy in the same state."""
        made = copy.copy(self)
        made.grammar = self.grammar.copy()
        return made

    def forced(self) -> list[int]:
        """Tokens that must follow, as in `Matcher.forced`; none while it may reason."""
        reasons = self._inside or self.begin_token is not None
        return [] if reasons else self.grammar.forced()

    @property
    def is_ended(self) -> bool:
        """Return whether no further token is possible, as in `Matcher.is_ended`."""
        return not self._inside and self.begin_token is None and self.grammar.is_ended

    @property
    def error(self) -> str:
        """Reason why the sequence cannot continue, as in `Matcher.error`."""
        return self._error or self.grammar.error
