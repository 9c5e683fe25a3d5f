"""The sequences that decode, as arrays: one entry for each slot, updated in place from call to
call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int, UInt16

from ...cache import KVCache
from ...params import Leaf
from ..engine.sampler_output import NON_FINITE
from ..sampling.metadata import SamplingMetadata, empty_sampling


@struct.dataclass
class DecodeBatch:
    """State of each slot."""

    token: Leaf  # i32[B]; the last token of each sequence, which is not in the cache yet
    length: Leaf  # i32[B]; cached positions of the sequence, and so the position of `token`
    remaining: (
        Leaf  # i32[B]; tokens the sequence may still emit; 0 if it has ended or there is none
    )
    page_table: Leaf  # i32[B, P]; the pages of the sequence
    sampling: SamplingMetadata
    own_start: Leaf = None  # i32[B]; see `RequestState`; None where no sequence needs it

    def gather(self, slots: Int[Array, " B"]) -> DecodeBatch:
        """The sequences in these slots. A slot past the last is empty."""
        batch = jax.tree.map(lambda leaf: leaf.at[slots].get(mode="clip"), self)
        return dataclasses.replace(
            batch, remaining=jnp.where(slots < self.remaining.shape[0], batch.remaining, 0)
        )

    def scatter(self, slots: Int[Array, " B"], batch: DecodeBatch) -> DecodeBatch:
        """Write back to their slots what decode steps change of the sequences in `batch`."""

        def update(old, new):
            return old.at[slots].set(new, mode="drop")

        return dataclasses.replace(
            self,
            token=update(self.token, batch.token),
            length=update(self.length, batch.length),
            remaining=update(self.remaining, batch.remaining),
        )

    def advance(self, token: Int[Array, " B"]) -> DecodeBatch:
        """The batch after each sequence has emitted `token`; those that had ended are unchanged.
        `NON_FINITE` ends a sequence."""
        active = self.remaining > 0
        stops = jnp.any(token[:, None] == self.sampling.stop_token_ids, axis=-1)
        ended = stops | (token == NON_FINITE)
        return dataclasses.replace(
            self,
            token=jnp.where(active, token, self.token),
            length=self.length + active,
            remaining=jnp.where(active & ~ended, self.remaining - 1, 0),
        )


@struct.dataclass
class DecodeState:
    """All that decoding carries from call to call. Donated: the old state is gone after each."""

    cache: KVCache
    batch: DecodeBatch
    token_counts: Leaf  # u16[B, V]; see `sampling.penalties`


def make_batch(
    tokens: Sequence[int],
    lengths: Sequence[int],
    remaining: Sequence[int],
    page_tables,
    sampling: Sequence[SamplingMetadata],
    own_start: Sequence[int] | None = None,
) -> DecodeBatch:
    """A batch in NumPy."""
    return DecodeBatch(
        token=np.array(tokens, np.int32),
        length=np.array(lengths, np.int32),
        remaining=np.array(remaining, np.int32),
        page_table=np.asarray(page_tables, np.int32),
        sampling=jax.tree.map(lambda *leaves: np.stack(leaves), *sampling),
        own_start=None if own_start is None else np.array(own_start, np.int32),
    )


def empty_batch(batch: int, table_pages: int, *, own_start: bool = False) -> DecodeBatch:
    """A batch in NumPy of slots without sequences, with `own_start` or without it."""
    zeros = np.zeros(batch, np.int32)
    page_table = np.zeros((batch, table_pages), np.int32)
    own = zeros if own_start else None
    return DecodeBatch(zeros, zeros, zeros, page_table, empty_sampling(batch), own)


@functools.partial(jax.jit, donate_argnames="batch")
def insert_sequences(batch: DecodeBatch, slots: Int[Array, " E"], new: DecodeBatch) -> DecodeBatch:
    """`batch` with the sequences of `new` in these slots. A slot past the last is left out."""
    return jax.tree.map(lambda old, new: old.at[slots].set(new, mode="drop"), batch, new)


@functools.partial(jax.jit, donate_argnames="batch")
def update_page_tables(
    batch: DecodeBatch, slots: Int[Array, " E"], page_tables: Int[Array, "E P"]
) -> DecodeBatch:
    """`batch` with these page tables. A slot past the last is left out."""
    page_table = batch.page_table.at[slots].set(page_tables, mode="drop")
    return dataclasses.replace(batch, page_table=page_table)


@functools.partial(jax.jit, donate_argnames="token_counts")
def insert_token_counts(
    token_counts: UInt16[Array, "B V"], slot: Int[Array, ""], counts: UInt16[Array, " V"]
) -> UInt16[Array, "B V"]:
    """`token_counts` with those of a new sequence that asks for penalties."""
    return token_counts.at[slot].set(counts)
