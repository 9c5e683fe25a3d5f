"""Grammars, as the engine sees them: which tokens may come next. What makes them of JSON schemas or
regular expressions is `infer.structured_outputs`. Imports no JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self

import numpy as np


class Matcher(Protocol):
    """One sequence within a grammar."""

    @staticmethod
    def fill_masks(matchers: Sequence[Any], masks: np.ndarray) -> None:
        """Write the tokens that may come next in each of them to u32[B, ceil(V/32)]: bit t % 32 of
        word t // 32 is token t. End tokens are among them where the text may end."""
        ...

    def accept(self, token_id: int, /) -> None:
        """Add a token."""
        ...

    def copy(self) -> Self:
        """Another one in the same state."""
        ...

    @property
    def is_ended(self) -> bool:
        """Whether no further token is possible."""
        ...

    @property
    def error(self) -> str:
        """Why it cannot go on, for example a limit of time that it has reached; "" if it can."""
        ...


def fill_masks(matchers: Sequence[Matcher], masks: np.ndarray) -> None:
    """`Matcher.fill_masks` of each kind among `matchers`."""
    for kind in dict.fromkeys(map(type, matchers)):
        rows = [row for row, one in enumerate(matchers) if type(one) is kind]
        found = masks[rows]
        kind.fill_masks([matchers[row] for row in rows], found)
        masks[rows] = found


def mask_words(vocab_size: int) -> int:
    """32-bit words of a mask over the vocabulary."""
    return -(-vocab_size // 32)
