"""Every shape that serving compiles, decided once; and the programs lowered from shapes alone,
before any memory is taken."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from ...attention import Attention
from ...cache import KVCache, cache_shapes, cache_sharding, row_sharding
from ...config import Config
from ...mesh import dp_size
from ...pallas_kernels import Implementation
from ...quantization import Scheme
from .decode_state import DecodeBatch, enter, enter_seen, idle
from .prefill_chunk import PrefillChunk, QueryTiles, Scored
from .programs import DecodeState, copy_pages, decode, prefill_chunk, score_chunk
from .weights import Weights, served_config, weight_shapes, weight_shardings

ENTER_ROWS = 8
"""Rows that enter or leave in one call."""
COPY_PAGES = 16
"""Pages copied in one call, on each lane."""


@dataclasses.dataclass(frozen=True)
class Shapes:
    """What the programs are compiled for. Counts are those of one lane (see `scheduler`)."""

    lanes: int
    page_size: int
    num_pages: int
    table_pages: int
    """Pages of the longest row."""
    slots: int
    decode_rows: tuple[int, ...]
    """Rows of a decode call: the smallest that is enough. Ascending, the last is `slots`."""
    decode_steps: int
    chunks: tuple[int, ...]
    """Tokens of a prefill chunk: the smallest that is enough. Ascending."""
    spare_pieces: int
    """Pieces of a chunk beyond those of one long prompt: how many short ones can share it."""
    contexts: tuple[int | None, ...]
    """Pages that a chunk can read, ascending, for a cache in 8 bits; else (None,)."""
    scoring: bool
    """Whether tokens of a chunk can be scored."""

    def pieces(self, tokens: int) -> int:
        """Pieces of a chunk of so many tokens."""
        return -(-tokens // self.page_size) + self.spare_pieces

    def scored(self, tokens: int) -> tuple[int, ...]:
        """How many tokens can be scored in a chunk of so many: the smallest that is enough.
        Ascending; the last is all."""
        sizes = (
            max(16, tokens // part) for part in (64, 8, 4, 2, 1)
        )  # upper layers run for all of a size
        return tuple(sorted({min(size, tokens) for size in sizes})) if self.scoring else ()


def buckets(largest: int, *, smallest: int, count: int) -> tuple[int, ...]:
    """`largest` and eighths of it, down to `smallest`: at most `count`, ascending.

    A program for fewer tokens or rows reads the same weights, so on an accelerator what it saves is
    small until here.
    """
    sizes = [largest]
    while len(sizes) < count and sizes[-1] > smallest:
        sizes.append(max(sizes[-1] // 8, smallest))
    return tuple(reversed(sizes))


Key = tuple[Any, ...]
"""Names a program: ("prefill", tokens, context), ("score", tokens, scored, context), ("decode",
rows), ("enter",), ..."""


def lower_all(
    served: Config,
    shapes: Shapes,
    weights: Weights,
    dtype,
    attention: Attention,
    place: Sharding | None,
) -> dict[Key, Callable[[], jax.stages.Lowered]]:
    """Every program of an engine, each lowered when called. `weights` are arrays or their shapes,
    with shardings; `dtype` is the cache's; `place` is where small arrays live without a mesh."""
    operand = _Operands(served, shapes, dtype, attention.mesh, place)
    weights = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), weights
    )
    cache, state = operand.cache(), operand.state()
    lower: dict[Key, Callable[[], jax.stages.Lowered]] = {}

    def add(key: Key, program, *operands, **static):
        lower[key] = functools.partial(program.lower, *operands, **static)

    for tokens in shapes.chunks:
        for context in shapes.contexts:
            chunk = operand.chunk(tokens, context)
            add(
                ("prefill", tokens, context),
                prefill_chunk,
                served,
                weights,
                chunk,
                cache,
                attention=attention,
            )
            for scored in shapes.scored(tokens):
                operands = served, weights, chunk, operand.scored(scored), cache
                add(("score", tokens, scored, context), score_chunk, *operands, attention=attention)
    for rows in shapes.decode_rows:
        slots = operand.ints(shapes.lanes * rows)
        add(
            ("decode", rows),
            decode,
            served,
            weights,
            slots,
            state,
            steps=shapes.decode_steps,
            attention=attention,
        )
    add(("enter",), enter, state.rows, operand.ints(ENTER_ROWS), operand.rows(ENTER_ROWS))
    add(
        ("enter_seen",),
        enter_seen,
        state.seen,
        operand.ints(),
        operand.placed((served.vocab_size,), jnp.uint16),
    )
    copies = operand.ints(shapes.lanes * COPY_PAGES)
    add(("copy",), copy_pages, served, copies, copies, cache, attention=attention)
    return lower


class _Operands:
    """The abstract arguments of the programs."""

    def __init__(
        self, served: Config, shapes: Shapes, dtype, mesh: Mesh | None, place: Sharding | None
    ):
        self._served, self._shapes, self._dtype = served, shapes, dtype
        self._cache_place = place if mesh is None else cache_sharding(served, mesh)
        self._place = place if mesh is None else NamedSharding(mesh, P())
        self._row_place = place if mesh is None else row_sharding(mesh)

    def placed(self, shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._place)

    def ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self.placed(shape, jnp.int32)

    def _split(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._row_place)

    def cache(self) -> KVCache:
        shapes = cache_shapes(
            self._served,
            self._shapes.lanes * self._shapes.num_pages,
            self._shapes.page_size,
            self._dtype,
        )
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._cache_place),
            shapes,
        )

    def state(self) -> DecodeState:
        slots = self._shapes.lanes * self._shapes.slots
        return DecodeState(
            self.cache(),
            self.rows(slots),
            self.placed((slots, self._served.vocab_size), jnp.uint16),
        )

    def rows(self, count: int) -> DecodeBatch:
        return jax.tree.map(
            lambda leaf: self.placed(leaf.shape, leaf.dtype), idle(count, self._shapes.table_pages)
        )

    def chunk(self, tokens: int, context: int | None) -> PrefillChunk:
        lanes = self._shapes.lanes
        ids = self._split(lanes, tokens)
        return PrefillChunk(
            ids,
            ids,
            self._pieces(tokens),
            None if context is None else self._split(lanes * context),
        )

    def scored(self, scored: int) -> Scored:
        ids = self._split(self._shapes.lanes, scored)
        return Scored(ids, ids, ids, self._pieces(scored))

    def _pieces(self, tokens: int) -> QueryTiles:
        lanes, pieces = self._shapes.lanes, self._shapes.pieces(tokens)
        each = self._split(lanes * pieces)
        return QueryTiles(
            each,
            each,
            each,
            each,
            each,
            self._split(lanes * pieces, self._shapes.table_pages),
            self._split(lanes, tokens),
        )


# Without an engine ------------------------------------------------------------


def lower_program(
    config: Config,
    key: Key,
    *,
    batch: int,
    max_model_len: int,
    page_size: int = 128,
    steps: int = 1,
    swiftkv: bool = True,
    dtype=jnp.bfloat16,
    cache_dtype=None,
    quantization: Scheme | None = None,
    mesh: Mesh | None = None,
    implementation: Implementation | None = None,
) -> jax.stages.Lowered:
    """One program for `batch` rows of `max_model_len` in all, not yet compiled, without a
    checkpoint.

    `key` as in `lower_all`. The devices of `mesh` need not exist (`topology.topology_mesh`).
    """
    lanes = dp_size(mesh)
    table_pages = -(-max_model_len // page_size)
    chunked = key[0] in ("prefill", "score")
    shapes = Shapes(
        lanes=lanes,
        page_size=page_size,
        num_pages=batch * table_pages // lanes,
        table_pages=table_pages,
        slots=batch // lanes,
        decode_rows=key[1:] if key[0] == "decode" else (batch // lanes,),
        decode_steps=steps,
        chunks=key[1:2] if chunked else (page_size,),
        spare_pieces=0,
        contexts=key[-1:] if chunked else (None,),
        scoring=key[0] == "score",
    )
    served = served_config(config, swiftkv)
    weights = weight_shapes(config, swiftkv, dtype, quantization)
    where = None if mesh is None else weight_shardings(config, swiftkv, mesh, quantization)
    if where is None:
        weights = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), weights)
    else:
        weights = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            weights,
            where,
        )
    attention = Attention(mesh, implementation)
    return lower_all(served, shapes, weights, cache_dtype or dtype, attention, None)[key]()
