"""A few tokens allowed, or words forbidden, as a `Matcher`: `allowed_token_ids` and `bad_words` of
vLLM. Imports no JAX."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from ..engine.grammar import Matcher, fill_rows, mask_of


class TokenFilter:
    """One sequence whose tokens are filtered, within a grammar or without."""

    def __init__(
        self,
        vocab_size: int,
        *,
        allowed_token_ids: Sequence[int] | None = None,
        bad_words: Sequence[Sequence[int]] = (),
        grammar: Matcher | None = None,
    ):
        """Allow only `allowed_token_ids` (None: all of them), and an end token only if it is one of
        them. The last token of one of `bad_words`, each of them token ids, may not come after the
        others. Ids are below `vocab_size`. With `grammar` only what it allows may come."""
        self.allowed_token_ids = None if allowed_token_ids is None else tuple(allowed_token_ids)
        self._allowed = mask_of(self.allowed_token_ids, vocab_size)
        self.bad_words = tuple(tuple(word) for word in bad_words if word)
        self._longest = max(map(len, self.bad_words), default=1) - 1
        self.grammar = grammar
        self._last = ()
        self._nothing = False

    @staticmethod
    def fill_masks(matchers: Sequence[Any], masks: np.ndarray) -> None:
        """Fill masks, as `Matcher.fill_masks` does."""
        masks[:] = np.uint32(2**32 - 1)
        inner = {row: one.grammar for row, one in enumerate(matchers) if one.grammar is not None}
        fill_rows(inner, masks)
        for one, mask in zip(matchers, masks, strict=True):
            one._filter(mask)

    def _filter(self, mask: np.ndarray) -> None:
        mask &= self._allowed
        for *before, last in self.bad_words:
            if self._last[len(self._last) - len(before) :] == tuple(before):
                mask[last // 32] &= ~(np.uint32(1) << np.uint32(last % 32))
        self._nothing = not mask.any()

    def accept(self, token_id: int, /) -> None:
        """Accept a token, as `Matcher.accept` does."""
        self._last = (*self._last, token_id)[-self._longest :] if self._longest else ()
        if self.grammar is not None:
            self.grammar.accept(token_id)

    def copy(self) -> Self:
        """A copy in the same state."""
        made = copy.copy(self)
        if self.grammar is not None:
            made.grammar = self.grammar.copy()
        return made

    def forced(self) -> list[int]:
        """Tokens that must follow, as in `Matcher.forced`."""
        return [] if self.grammar is None else self.grammar.forced()

    @property
    def is_ended(self) -> bool:
        """Return whether no further token is possible, as in `Matcher.is_ended`."""
        return self.grammar is not None and self.grammar.is_ended

    @property
    def error(self) -> str:
        """Reason why the sequence cannot continue, as in `Matcher.error`."""
        if self.grammar is not None and self.grammar.error:
            return self.grammar.error
        return "the answer cannot go on: no token is allowed to come next" if self._nothing else ""
