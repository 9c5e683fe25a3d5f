"""Low-rank terms that adapters add to matrices: of several adapters, a different one for each row.

All adapters of a matrix are two products, and a mask between them leaves of each row what its own
adapter has. The cost does not depend on how many rows share an adapter, and the product of a row
without one is that with the matrix, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

Product = Callable[[str, Any, Any], Any]
"""`jnp.einsum` of two operands."""


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

    def of_row(self, adapter: Any) -> Terms:
        """Terms of the adapter of one row, i32[1, 1], as of S = 1; any terms where it has none. Of
        S = 1 they are the same, whatever the adapter's number."""
        take, place = jax.lax.dynamic_index_in_dim, jnp.maximum(adapter.reshape(()) - 1, 0)
        return Terms(take(self.a, place, 0), take(self.b, place, 1))


@struct.dataclass
class Adapted:
    """A matrix, plain or quantised, and what is added to it for each row: in the matrix's place.

    Its outputs are in equal groups. Each group has an equal part of those of the first terms, then
    of the next, then outputs that no adapter changes.
    """

    matrix: Any
    terms: tuple[Terms, ...]
    adapter: Any
    """i32[B, T], or [B, 1] for all tokens of a row: the adapter's number, 0 for none."""
    groups: int = struct.field(pytree_node=False, default=1)

    @property
    def shape(self) -> tuple[int, ...]:
        return getattr(self.matrix, "values", self.matrix).shape


@struct.dataclass
class LayerAdapters:
    """Terms for the matrices of one layer; None for those that it lacks, or that no adapter may
    change."""

    q: Terms | None = None
    k: Terms | None = None
    """Terms for keys; of an upper layer for those of the group that it begins. So is `v`."""
    v: Terms | None = None
    o: Terms | None = None
    gate: Terms | None = None
    up: Terms | None = None
    down: Terms | None = None
    own_q: Terms | None = None
    """The teacher's queries of a layer that attends to two caches."""


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


def added(
    product: Product, spec: str, x: Float[Array, "B T I"], weight: Adapted
) -> Float[Array, "*out"]:
    """The part of a product with an adapted matrix that each row's adapter adds. `product` runs
    those with plain matrices."""
    outputs, groups = weight.shape[:-1], weight.groups
    group = math.prod(outputs) // groups
    # Parts are joined along an axis of their own: on a mesh the last one is split.
    unit = math.gcd(group, *(terms.b.shape[0] // groups for terms in weight.terms))
    parts = [
        _low_rank(product, x, terms, weight.adapter).reshape(*x.shape[:2], groups, -1, unit)
        for terms in weight.terms
    ]
    every = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=3)
    if rest := group // unit - every.shape[3]:
        every = jnp.pad(every, ((0, 0), (0, 0), (0, 0), (0, rest), (0, 0)))
    inputs, _, out = spec.partition("->")
    of_x, of_weight = inputs.split(",")
    return jnp.einsum(f"{of_x[:-1]}{of_weight[:-1]}->{out}", every.reshape(*x.shape[:2], *outputs))


def _low_rank(
    product: Product, x: Float[Array, "B T I"], terms: Terms, adapter: Int[Array, "B _"]
) -> Float[Array, "B T O"]:
    """The part of a product with `x` that each row's adapter adds."""
    count, rank, _ = terms.a.shape
    if adapter.size == 1:  # of one row those of its adapter are read alone
        terms, count = terms.of_row(adapter), 1
        adapter = jnp.minimum(adapter, 1)
    inside = product("BTI,RI->BTR", x, terms.a.reshape(count * rank, -1))
    number = jnp.repeat(jnp.arange(1, count + 1), rank)
    inside = jnp.where(number == adapter[..., None], inside, 0)
    return product("BTR,OR->BTO", inside, terms.b.reshape(-1, count * rank))
