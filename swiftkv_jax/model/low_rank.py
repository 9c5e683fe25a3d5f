"""Low-rank terms that adapters add to matrices: of several adapters, a different one for each row.

All adapters of a matrix are two products, and a mask between them leaves of each row what its own
adapter has. The cost does not depend on how many rows share an adapter, and the product of a row
without one is that with the matrix, to the bit.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import struct


@struct.dataclass
class Terms:
    """Terms of S adapters for one matrix [O, I]: number i, from 1 on, adds b[:, i-1] @ a[i-1], of
    rank R or less: the rest is zeros, as is all of an adapter that leaves the matrix as it is."""

    a: Any  # S R I
    b: Any  # O S R; with the scaling

    def insert(self, place: Any, one: Terms) -> Terms:
        """The terms with those of one adapter (R I and O R) in a place from 0 on, whole: nothing of
        the adapter before stays."""
        return Terms(self.a.at[place].set(one.a), self.b.at[:, place].set(one.b))

    def only(self, place: Any) -> Terms:
        """Terms of the adapter in one place, as of S = 1."""
        take = jax.lax.dynamic_index_in_dim
        return Terms(take(self.a, place, 0), take(self.b, place, 1))


@struct.dataclass
class Adapted:
    """A matrix, plain or quantised, and what is added to it for each row: in the matrix's place."""

    matrix: Any
    terms: tuple[Terms, ...]
    """Terms of equal parts of its outputs, in their order."""
    adapter: Any
    """i32[B, T], or [B, 1] for all tokens of a row: the adapter's number, 0 for none."""

    @property
    def shape(self) -> tuple[int, ...]:
        return getattr(self.matrix, "values", self.matrix).shape


@struct.dataclass
class LayerAdapters:
    """Terms for the matrices of one upper layer; None for those that it lacks."""

    q: Terms
    o: Terms
    gate: Terms | None = None
    up: Terms | None = None
    down: Terms | None = None


def insert(
    layers: tuple[LayerAdapters, ...], place: jax.Array, one: tuple[LayerAdapters, ...]
) -> tuple[LayerAdapters, ...]:
    """`Terms.insert` for all matrices."""
    return jax.tree.map(
        lambda terms, new: terms.insert(place, new),
        layers,
        one,
        is_leaf=lambda leaf: isinstance(leaf, Terms),
    )
