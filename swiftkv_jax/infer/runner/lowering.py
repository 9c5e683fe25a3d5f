"""The compiled programs of an engine, lowered from shapes alone, before any memory is allocated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ...attention import Attention
from ...config import Config
from ...mesh import dp_size
from ...pallas_kernels import Implementation
from ...quantization import Scheme
from ..engine.grammar import mask_words
from .decode_programs import copy_pages, decode
from .decode_state import PageTables, insert_sequences, insert_token_counts, update_page_tables
from .layout import Layout
from .prefill_chunk import PrefillChunk, QueryTiles, UpperTokens
from .prefill_programs import prefill_chunk, prefill_tail, score_chunk
from .shapes import Shapes, kv_programs
from .weights import Weights, served_config, weight_shapes, weight_shardings

INSERT_SEQUENCES = 8
"""Sequences that are added or removed in one call."""
COPY_PAGES = 16
"""Pages copied in one call, on each data-parallel shard."""

GREEDY = "decode greedy"
SINGLE_STEP = {"decode": "decode single", GREEDY: "decode greedy single"}
"""Program -> the same of one step."""
CONSTRAINED = "decode constrained"
DECODE = "decode", GREEDY, *SINGLE_STEP.values(), CONSTRAINED
"""Names of the programs that decode; the first for all sequences without a grammar, the second for
those whose `SamplingParams.is_plain_greedy`, the last for those with a grammar, one step."""

CHUNKED = "prefill", "tail", "score"
"""Names of the programs that run a chunk."""

Key = tuple[Any, ...]
"""Name of a program: ("prefill", tokens, query tiles, context pages), ("tail", tokens,
tokens that run through all layers, context pages), ("score", tokens, the same with those that are
scored, context pages), ("decode", rows), ("decode greedy", rows), these with
" single", ("decode constrained", rows), ("insert",), ("page_tables",),
("token_counts",) or ("copy",)."""


def lower_all(
    layout: Layout, shapes: Shapes, weights: Weights, attention: Attention
) -> dict[Key, Callable[[], jax.stages.Lowered]]:
    """Every program of an engine, each lowered when called. `weights` are arrays or their shapes,
    with shardings."""
    served = layout.config
    weights = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), weights
    )
    state = layout.state(shapes)
    lower: dict[Key, Callable[[], jax.stages.Lowered]] = {}

    def add(key: Key, program, *operands, **static):
        lower[key] = functools.partial(_lower, program, *operands, **static)

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return layout.array(shape, jnp.int32)

    for tokens in shapes.chunks:
        for context in shapes.contexts:
            for tiles in shapes.tiles(tokens):
                operands = served, weights, _chunk(layout, shapes, tokens, tiles, context)
                key = "prefill", tokens, tiles, context
                add(key, prefill_chunk, *operands, state.cache, attention=attention)
            chunk = _chunk(layout, shapes, tokens, shapes.tiles(tokens)[-1], context)
            for upper in shapes.tails(tokens):
                operands = served, weights, chunk, _upper(layout, shapes, upper), state.cache
                add(("tail", tokens, upper, context), prefill_tail, *operands, attention=attention)
            for upper in shapes.scored(tokens):
                operands = served, weights, chunk, _upper(layout, shapes, upper), state.cache
                static = {"attention": attention, "kv": shapes.kv}
                add(("score", tokens, upper, context), score_chunk, *operands, **static)
    for rows in shapes.decode_rows:
        operands = served, weights, ints(shapes.dp_size * rows), state
        static = {"steps": shapes.decode_steps, "attention": attention, "kv": shapes.kv}
        add(("decode", rows), decode, *operands, **static)
        one_step = static | {"steps": 1}
        if single := rows in shapes.single_step_sizes:
            add((SINGLE_STEP["decode"], rows), decode, *operands, **one_step)
        if shapes.greedy_programs:
            add((GREEDY, rows), decode, *operands, **static, greedy=True)
            if single:
                add((SINGLE_STEP[GREEDY], rows), decode, *operands, **one_step, greedy=True)
        if shapes.structured_outputs:
            words = mask_words(served.vocab_size)
            masks = layout.array((shapes.dp_size * rows, words), jnp.uint32)
            add((CONSTRAINED, rows), decode, *operands, **one_step, masks=masks)
    new = layout.batch(INSERT_SEQUENCES, shapes)
    add(("insert",), insert_sequences, state.batch, ints(INSERT_SEQUENCES), new)
    tables = PageTables(new.page_table, new.own_page_table)
    add(("page_tables",), update_page_tables, state.batch, ints(INSERT_SEQUENCES), tables)
    counts = layout.array((served.vocab_size,), jnp.uint16)
    add(("token_counts",), insert_token_counts, state.token_counts, ints(), counts)
    pages = ints(shapes.dp_size * COPY_PAGES)
    add(("copy",), copy_pages, served, pages, pages, state.cache, attention=attention)
    return lower


def _lower(program, *operands, **static) -> jax.stages.Lowered:
    """One program. Its types are the same whether JAX_ENABLE_X64 is set or not."""
    with jax.enable_x64(False):
        return program.lower(*operands, **static)


def _chunk(
    layout: Layout, shapes: Shapes, tokens: int, tiles: int, context: int | None
) -> PrefillChunk:
    ids = layout.rows(shapes.dp_size, tokens)
    pages = None if context is None else layout.rows(shapes.dp_size * context)
    return PrefillChunk(ids, ids, _tiles(layout, shapes, tokens, tiles), pages)


def _upper(layout: Layout, shapes: Shapes, tokens: int) -> UpperTokens:
    ids, tiles = layout.rows(shapes.dp_size, tokens), shapes.tiles(tokens)[-1]
    own_start = layout.rows(shapes.dp_size * tiles) if shapes.has_own_start else None
    own_tiles = (
        _tiles(layout, shapes, tokens, tiles, own=True) if shapes.pages_per_own_page else None
    )
    every = _tiles(layout, shapes, tokens, tiles)
    return UpperTokens(ids, ids, ids, every, own_start, own_tiles)


def _tiles(
    layout: Layout, shapes: Shapes, tokens: int, tiles: int, *, own: bool = False
) -> QueryTiles:
    """Of tokens in their pages, or in those of `own` keys and values."""
    count = shapes.dp_size * tiles
    each, pages = layout.rows(count), (shapes.pages_per_own_page,) if own else ()
    return QueryTiles(
        page=layout.rows(count, *pages),
        page_start=each,
        query_start=each,
        query_end=each,
        source=each,
        page_table=layout.rows(count, shapes.table_pages, *pages),
        tile_index=layout.rows(shapes.dp_size, tokens),
    )


# Without an engine ------------------------------------------------------------


def lower_program(
    config: Config,
    key: Key,
    *,
    batch: int,
    max_model_len: int,
    page_size: int = 128,
    num_pages: int | None = None,
    steps: int = 1,
    swiftkv: bool = True,
    dtype=jnp.bfloat16,
    cache_dtype=None,
    quantization: Scheme | None = None,
    mesh: Mesh | None = None,
    implementation: Implementation | None = None,
) -> jax.stages.Lowered:
    """One program for `batch` sequences of at most `max_model_len` tokens, lowered without a
    checkpoint.

    `key` is one of `Key`; `num_pages` are those of the KV cache, None as many as prompts of all
    sequences can fill. The devices of `mesh` need not exist (`topology.topology_mesh`).
    """
    shards, served = dp_size(mesh), served_config(config, swiftkv).at_length(max_model_len)
    table_pages = -(-max_model_len // page_size)
    chunked = key[0] in CHUNKED
    shapes = Shapes(
        dp_size=shards,
        page_size=page_size,
        num_pages=(num_pages or batch * table_pages) // shards,
        table_pages=table_pages,
        slots=batch // shards,
        decode_rows=key[1:] if key[0] in DECODE else (batch // shards,),
        decode_steps=steps,
        greedy_programs=key[0] == GREEDY,
        chunks=key[1:2] if chunked else (page_size,),
        spare_tiles=(key[2] - -(-key[1] // page_size) if key[0] == "prefill" else 0,),
        contexts=key[-1:] if chunked else (None,),
        scoring=key[0] == "score",
        kv=kv_programs(served),
        pages_per_own_page=served.pages_per_own_page if served.two_queries else 0,
        tail=key[2] if key[0] == "tail" else 0,
    )
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
    layout = Layout(served, cache_dtype or dtype, mesh)
    return lower_all(layout, shapes, weights, attention)[key]()
