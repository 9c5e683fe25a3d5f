"""The engine's view of a grammar: which tokens may come next. `infer.structured_outputs` makes
grammars from JSON schemas or regular expressions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np


class Matcher(Protocol):
    """The state of one sequence in a grammar."""

    @staticmethod
    def fill_masks(matchers: Sequence[Any], masks: np.ndarray) -> None:
        """Write the tokens that may come next in each of them to u32[B, ceil(V/32)]: bit t % 32 of
        word t // 32 is token t. End tokens are among them where the text may end."""
        ...

    def accept(self, token_id: int, /) -> None:
        """Add a token."""
        ...

    def copy(self) -> Self:
        """A copy in the same state."""
        ...

    def forced(self) -> list[int]:
        """Tokens of the text that must follow, as a tokenizer would write it; empty if several may.
        They are a guess: another spelling of the text may be allowed."""
        ...

    @property
    def is_ended(self) -> bool:
        """Return whether no further token is possible."""
        ...

    @property
    def error(self) -> str:
        """Why the sequence cannot continue, for example a time limit; "" if it can."""
        ...


def fill_rows(matchers: Mapping[int, Matcher], masks: np.ndarray) -> None:
    """Fill the masks of the rows with these numbers; the others are unchanged."""
    for kind in dict.fromkeys(map(type, matchers.values())):
        rows = [row for row, one in matchers.items() if type(one) is kind]
        found = np.zeros_like(masks[rows])
        kind.fill_masks([matchers[row] for row in rows], found)
        masks[rows] = found


def mask_words(vocab_size: int) -> int:
    """32-bit words of a mask over the vocabulary."""
    return -(-vocab_size // 32)


def mask_of(token_ids: Sequence[int] | None, vocab_size: int) -> np.ndarray:
    """u32[ceil(V/32)] with the bits of `token_ids`, which are below `vocab_size`; None: all
    tokens."""
    if token_ids is None:
        mask = np.full(mask_words(vocab_size), 2**32 - 1, np.uint32)
        if rest := vocab_size % 32:
            mask[-1] = 2**rest - 1
        return mask
    mask = np.zeros(mask_words(vocab_size), np.uint32)
    ids = np.asarray(token_ids, np.int64)
    np.bitwise_or.at(mask, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return mask
