"""The rows that decode, as arrays: one entry a slot, changed in place from call to call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int, UInt16

from ...params import Leaf
from ..sampling.sampler import NON_FINITE, SamplingMetadata, idle_rows


@struct.dataclass
class DecodeBatch:
    """What each slot is doing."""

    token: Leaf  # i32[B]; the last token of each row: known, but not in the cache yet
    length: Leaf  # i32[B]; positions of the row that are cached, and so the position of `token`
    budget: Leaf  # i32[B]; tokens the row may still emit; 0 for one that is finished, or idle
    table: Leaf  # i32[B, P]; the row's pages
    sampling: SamplingMetadata

    def take(self, slots: Int[Array, " B"]) -> DecodeBatch:
        """The rows of these slots. A slot past the last is idle."""
        rows = jax.tree.map(lambda leaf: leaf.at[slots].get(mode="clip"), self)
        return dataclasses.replace(
            rows, budget=jnp.where(slots < self.budget.shape[0], rows.budget, 0)
        )

    def put(self, slots: Int[Array, " B"], rows: DecodeBatch) -> DecodeBatch:
        """Back to their slots, as far as steps change them."""

        def put(old, new):
            return old.at[slots].set(new, mode="drop")

        return dataclasses.replace(
            self,
            token=put(self.token, rows.token),
            length=put(self.length, rows.length),
            budget=put(self.budget, rows.budget),
        )

    def after(self, token: Int[Array, " B"]) -> DecodeBatch:
        """The rows once each has emitted `token`, unless it was finished: then it stays as it is.
        `sampler.NON_FINITE` finishes one."""
        active = self.budget > 0
        ended = jnp.any(token[:, None] == self.sampling.end_ids, axis=-1) | (token == NON_FINITE)
        return dataclasses.replace(
            self,
            token=jnp.where(active, token, self.token),
            length=self.length + active,
            budget=jnp.where(active & ~ended, self.budget - 1, 0),
        )


def make_rows(
    tokens: Sequence[int],
    lengths: Sequence[int],
    budgets: Sequence[int],
    tables,
    samplings: Sequence[SamplingMetadata],
) -> DecodeBatch:
    """Rows in NumPy."""
    token, length, budget = (np.array(values, np.int32) for values in (tokens, lengths, budgets))
    return DecodeBatch(
        token,
        length,
        budget,
        np.asarray(tables, np.int32),
        jax.tree.map(lambda *leaves: np.stack(leaves), *samplings),
    )


def idle(batch: int, table_pages: int) -> DecodeBatch:
    """Rows in NumPy that do nothing."""
    nothing = np.zeros(batch, np.int32)
    return DecodeBatch(
        nothing, nothing, nothing, np.zeros((batch, table_pages), np.int32), idle_rows(batch)
    )


@functools.partial(jax.jit, donate_argnames="rows")
def enter(rows: DecodeBatch, slots: Int[Array, " E"], new: DecodeBatch) -> DecodeBatch:
    """`new` rows put into their slots. A slot past the last takes nothing."""
    return jax.tree.map(lambda old, new: old.at[slots].set(new, mode="drop"), rows, new)


# Tokens seen ------------------------------------------------------------------


@functools.partial(jax.jit, donate_argnames="seen")
def enter_seen(
    seen: UInt16[Array, "B V"], slot: Int[Array, ""], prompt: UInt16[Array, " V"]
) -> UInt16[Array, "B V"]:
    """A row that asks for penalties begins, having seen its prompt (`sampler.seen_in_prompt`)."""
    return seen.at[slot].set(prompt)
