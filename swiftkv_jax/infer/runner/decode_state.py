"""The sequences that decode, as arrays: one entry for each slot, updated in place from call to
call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int, Shaped

from ...model.cache import KVCache
from ...model.params import Leaf
from ..engine.request_state import SequenceState
from ..engine.sampler_output import NON_FINITE
from ..engine.shapes import Shapes
from ..sampling.metadata import SamplingMetadata, empty_sampling, sampling_row


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
    own_page_table: Leaf = None  # i32[B, P, O]; `RequestState.own_pages`; None without them
    # i32[B]; see `drafts.history_of`, -1 for a row without drafts; None without speculation
    history_offset: Leaf = None
    # f32[B, D]; the normed hidden state that `token` was chosen from, zeros before the first decode
    # step; None without a speculator
    hidden: Leaf = None
    adapter: Leaf = None  # i32[B, 1]; see `RequestState`; None without adapters

    @functools.partial(jax.jit, inline=True)
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
            hidden=None if self.hidden is None else update(self.hidden, batch.hidden),
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
    history: Leaf = None  # i32[B, N]; see `drafts.history_of`; None without speculation


class PageTables(NamedTuple):
    """Fields of a `DecodeBatch`."""

    page_table: Leaf  # i32[B, P]
    own_page_table: Leaf = None  # i32[B, P, O]


def page_tables(sequences: Sequence[SequenceState], shapes: Shapes) -> PageTables:
    """The pages of some sequences in NumPy; 0 past them, and for `RELEASED`. There is
    no table of own pages if `pages_per_own_page` is 0."""
    tables = np.zeros((len(sequences), shapes.table_pages), np.int32)
    own_tables = np.zeros((*tables.shape, shapes.pages_per_own_page), np.int32)
    for table, own_table, sequence in zip(tables, own_tables, sequences, strict=True):
        table[: len(sequence.pages)] = sequence.pages
        if sequence.own_pages:
            own_table[: len(sequence.own_pages)] = sequence.own_pages
    return PageTables(np.maximum(tables, 0), own_tables if shapes.pages_per_own_page else None)


def sampling_of(sequence: SequenceState, eos_token_ids: Sequence[int]) -> SamplingMetadata:
    """The sampling parameters of a sequence in NumPy."""
    request = sequence.request
    return sampling_row(
        request.params,
        rng_stream=(request.rng_stream, sequence.index),
        eos_token_ids=eos_token_ids,
        prompt_length=len(request.prompt),
    )


def batch_of(
    sequences: Sequence[SequenceState],
    shapes: Shapes,
    eos_token_ids: Sequence[int],
    history_offset: Sequence[int],
) -> DecodeBatch:
    """The batch of sequences whose prompts are cached, in NumPy. `history_offset` is read where
    there is speculation."""
    states = [sequence.request_state for sequence in sequences]
    rows = {
        "token": [state.prefill_token_ids[-1] for state in states],
        "length": [state.prefill_target for state in states],
        "remaining": [sequence.num_remaining_tokens for sequence in sequences],
        "own_start": [state.own_start for state in states],
        "history_offset": history_offset,
        "adapter": [[state.adapter] for state in states],
    }
    empty = empty_batch(len(sequences), shapes)
    rows = {
        name: np.array(values, np.int32)
        for name, values in rows.items()
        if getattr(empty, name) is not None
    }
    sampling = [sampling_of(sequence, eos_token_ids) for sequence in sequences]
    rows["sampling"] = jax.tree.map(lambda *leaves: np.stack(leaves), *sampling)
    return dataclasses.replace(empty, **rows, **page_tables(sequences, shapes)._asdict())


def decode_rows(
    sequences: Sequence[SequenceState], shapes: Shapes
) -> tuple[list[list[int]], int, np.ndarray]:
    """(slots of each shard, rows of the smallest call for them, row of each sequence)."""
    slots: list[list[int]] = [[] for _ in range(shapes.dp_size)]
    rows = []
    for sequence in sequences:
        dp_rank = sequence.request_state.dp_rank
        rows.append((dp_rank, len(slots[dp_rank])))
        slots[dp_rank].append(sequence.slot)
    size = shapes.size_of(max(map(len, slots)))
    return slots, size, np.array([dp_rank * size + row for dp_rank, row in rows])


def empty_batch(count: int, shapes: Shapes) -> DecodeBatch:
    """A batch in NumPy of `count` slots without sequences."""
    zeros = np.zeros(count, np.int32)
    page_table = np.zeros((count, shapes.table_pages), np.int32)
    batch = DecodeBatch(zeros, zeros, zeros, page_table, empty_sampling(count))
    if shapes.has_own_start:
        batch = dataclasses.replace(batch, own_start=zeros)
    if own := shapes.pages_per_own_page:
        own_table = np.zeros((*page_table.shape, own), np.int32)
        batch = dataclasses.replace(batch, own_page_table=own_table)
    if shapes.widths:
        batch = dataclasses.replace(batch, history_offset=zeros)
    if dim := shapes.hidden_dim:
        batch = dataclasses.replace(batch, hidden=np.zeros((count, dim), np.float32))
    if shapes.num_adapters:
        batch = dataclasses.replace(batch, adapter=zeros[:, None])
    return batch


@functools.partial(jax.jit, donate_argnames="batch")
def insert_sequences(batch: DecodeBatch, slots: Int[Array, " E"], new: DecodeBatch) -> DecodeBatch:
    """`batch` with the sequences of `new` in these slots. A slot past the last is left out."""
    return jax.tree.map(lambda old, new: old.at[slots].set(new, mode="drop"), batch, new)


@functools.partial(jax.jit, donate_argnames="batch")
def update_page_tables(
    batch: DecodeBatch, slots: Int[Array, " E"], tables: PageTables
) -> DecodeBatch:
    """`batch` with these page tables. A slot past the last is left out."""
    old = PageTables(batch.page_table, batch.own_page_table)
    new = jax.tree.map(lambda old, new: old.at[slots].set(new, mode="drop"), old, tables)
    return dataclasses.replace(batch, **new._asdict())


@functools.partial(jax.jit, donate_argnames="rows")
def insert_row(
    rows: Shaped[Array, "B N"], slot: Int[Array, ""], row: Shaped[Array, " N"]
) -> Shaped[Array, "B N"]:
    """Token counts or texts with the whole row of a new sequence: nothing of the one before it in
    the slot stays."""
    return rows.at[slot].set(row)
