"""The compiled programs of an engine, lowered from shapes alone, before any memory is allocated."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ...model.attention import Attention
from ..engine.constrained import HostDrafts
from ..engine.grammar import mask_words
from ..engine.shapes import Shapes
from .adapters import insert_adapter, no_adapter
from .decode_programs import copy_pages, decode
from .decode_state import PageTables, insert_row, insert_sequences, update_page_tables
from .drafts import Drafting
from .first_token import first_token
from .host_pages import MoveProgram, move_programs
from .layout import Layout
from .prefill_chunk import (
    Joined,
    PrefillChunk,
    QueryTiles,
    ScheduledShards,
    UpperTokens,
    chunk_needs,
)
from .prefill_programs import prefill_chunk, prefill_tail, score_chunk
from .serving_form import Weights

INSERT_SEQUENCES = 8
"""Sequences that are added or removed in one call."""
COPY_PAGES = 16
"""Pages copied in one call, on each data-parallel shard."""
COMMAND_BUFFER_TOKENS = 512
"""Largest chunk whose kernels a GPU launches as a command buffer (a CUDA graph)."""


@dataclasses.dataclass(frozen=True)
class PrefillProgram:
    """Runs a chunk through the lower layers."""

    tokens: int
    tiles: int
    """Query tiles."""
    context: int | None
    """Pages that are gathered for the chunk to read; None: it reads the cache in place."""

    def __str__(self) -> str:
        return f"prefill of {self.tokens} tokens"


@dataclasses.dataclass(frozen=True)
class UpperProgram:
    """Runs a chunk through the lower layers, and some of its tokens through the upper ones."""

    tokens: int
    upper_tokens: int
    """Tokens that run through the upper layers."""
    context: int | None
    """Pages that are gathered, as in `PrefillProgram`."""
    scores: bool
    """True if those tokens are scored; else they only fill the cache."""

    def __str__(self) -> str:
        what = "score" if self.scores else "prefill through all layers"
        return f"{what} of {self.upper_tokens} of {self.tokens} tokens"


DecodeKind = Literal["sampling", "greedy", "constrained"]
"""How a decode call selects tokens: `greedy` if all its sequences are plain greedy
(`SamplingParams.is_plain_greedy`), `constrained` if they follow a grammar."""


@dataclasses.dataclass(frozen=True)
class DecodeProgram:
    """Decodes the next tokens of sequences."""

    rows: int
    """Sequences of each data-parallel shard."""
    kind: DecodeKind = "sampling"
    single_step: bool = False
    """True if it emits one token of each sequence; else `Shapes.decode_steps`. A constrained
    program always emits one."""
    width: int = 1
    """Tokens of a sequence in a step, with drafts (`Shapes.wide_call`)."""

    def __str__(self) -> str:
        steps = ", single step" if self.single_step else ""
        if self.width > 1:
            steps = f", {self.width} tokens a step"
        return f"{self.kind} decode of {self.rows} sequences{steps}"


StateUpdate = Literal["insert", "page_tables", "token_counts", "history", "copy", "adapter"]
"""The programs that write sequences, page tables, token counts, text or pages into the decode
state, and adapters into the weights."""

FirstToken = Literal["first_token"]
"""The program that goes on from a chunk to the first token of a prompt."""

Program = PrefillProgram | UpperProgram | DecodeProgram | StateUpdate | FirstToken | MoveProgram
"""Identifies a compiled program of an engine."""


def lower_all(
    layout: Layout, shapes: Shapes, weights: Weights, attention: Attention
) -> dict[Program, Callable[[], jax.stages.Lowered]]:
    """Every program of an engine, each lowered when called. `weights` are arrays or their shapes,
    with shardings."""
    served = layout.config
    weights = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), weights
    )
    state = layout.state(shapes)
    lower: dict[Program, Callable[[], jax.stages.Lowered]] = {}

    def add(program: Program, function, *operands, **static):
        lower[program] = functools.partial(_lower, function, *operands, **static)

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return layout.array(shape, jnp.int32)

    def joined(tree: Any) -> Joined:
        shapes_only = jax.tree.map(lambda leaf: np.empty(leaf.shape, np.int32), tree)
        one = Joined.of(shapes_only, shapes.dp_size)
        return dataclasses.replace(one, data=layout.rows(*one.data.shape))

    for tokens in shapes.chunks:
        for context in shapes.contexts:
            for tiles in shapes.tiles(tokens):
                chunk = _chunk(layout, shapes, tokens, tiles, context)
                operands = served, weights, joined(chunk), state.cache
                program = PrefillProgram(tokens, tiles, context)
                last = shapes.first_tokens
                add(program, prefill_chunk, *operands, attention=attention, last_token=last)
            chunk = _chunk(layout, shapes, tokens, shapes.tiles(tokens)[-1], context)
            for upper in shapes.tails(tokens):
                both = chunk, _upper(layout, shapes, upper)
                operands = served, weights, joined(both), state.cache
                program = UpperProgram(tokens, upper, context, scores=False)
                add(program, prefill_tail, *operands, attention=attention)
            for upper in shapes.scored(tokens):
                both = chunk, _upper(layout, shapes, upper)
                operands = served, weights, joined(both), state.cache
                program = UpperProgram(tokens, upper, context, scores=True)
                add(program, score_chunk, *operands, attention=attention)
    for rows in shapes.decode_rows:
        operands = served, weights, ints(shapes.dp_size * rows), state
        static = {"steps": shapes.decode_steps, "attention": attention}
        one_step = static | {"steps": 1}
        for kind in shapes.decode_kinds:
            is_greedy = kind == "greedy"
            add(DecodeProgram(rows, kind), decode, *operands, **static, greedy=is_greedy)
            if rows in shapes.single_step_sizes:
                program = DecodeProgram(rows, kind, single_step=True)
                add(program, decode, *operands, **one_step, greedy=is_greedy)
        for kind in shapes.wide_kinds:
            steps, width = shapes.wide_call(rows)
            wide = static | {"steps": steps, "drafting": Drafting(width, *shapes.lookup)}
            program = DecodeProgram(rows, kind, width=width)
            add(program, decode, *operands, **wide, greedy=kind == "greedy")
        if shapes.structured_outputs:
            words = mask_words(served.vocab_size)
            masks = layout.array((shapes.dp_size * rows, words), jnp.uint32)
            program = DecodeProgram(rows, "constrained", single_step=True)
            add(program, decode, *operands, **one_step, masks=masks)
        if shapes.structured_outputs and shapes.widths:
            width = shapes.wide_call(rows).width
            tokens = ints(shapes.dp_size * rows, width)
            given = {
                "masks": layout.array((*tokens.shape, mask_words(served.vocab_size)), jnp.uint32),
                "drafts": HostDrafts(tokens, tokens),
                "drafting": Drafting(width, *shapes.lookup),
            }
            program = DecodeProgram(rows, "constrained", single_step=True, width=width)
            add(program, decode, *operands, **one_step, **given)
    if shapes.first_tokens:
        x = layout.array((1, served.embed_dim), weights.embed.dtype)
        add("first_token", first_token, served, weights, x, ints(1), state, attention=attention)
    new = layout.batch(INSERT_SEQUENCES, shapes)
    add("insert", insert_sequences, state.batch, ints(INSERT_SEQUENCES), new)
    tables = PageTables(new.page_table, new.own_page_table)
    add("page_tables", update_page_tables, state.batch, ints(INSERT_SEQUENCES), tables)
    counts = layout.array((served.vocab_size,), jnp.uint16)
    add("token_counts", insert_row, state.token_counts, ints(), counts)
    if state.history is not None:
        row = ints(shapes.history_size)
        add("history", insert_row, state.history, ints(), row)
    if weights.adapters:
        one = jax.tree.map(
            lambda leaf: layout.array(leaf.shape, leaf.dtype), no_adapter(weights.adapters)
        )
        add("adapter", insert_adapter(weights.adapters), weights.adapters, ints(), one)
    pages = ints(shapes.dp_size * COPY_PAGES)
    add("copy", copy_pages, served, pages, pages, state.cache, attention=attention)
    for program, function, operands in move_programs(layout, shapes, weights):
        add(program, function, *operands)
    return lower


def prefill_program(shapes: Shapes, shards: ScheduledShards) -> PrefillProgram | UpperProgram:
    """The smallest compiled program that can run a chunk."""
    needs = chunk_needs(shards, shapes.page_size)
    most_tiles = max(needs.tiles, needs.upper_tiles)  # own pages may divide tokens otherwise
    size, tiles, context = shapes.chunk(needs.tokens, most_tiles, needs.context_pages)
    if not needs.upper_tokens:
        return PrefillProgram(size, tiles, context)
    scores = any(scheduled.scored for shard in shards for scheduled in shard)
    upper = next(
        n
        for n in (shapes.scored if scores else shapes.tails)(size)
        if n >= needs.upper_tokens and shapes.tiles(n)[-1] >= needs.upper_tiles
    )
    return UpperProgram(size, upper, context, scores)


def compiler_defaults(program: Program, platform: str) -> dict[str, str]:
    """XLA's options for a program.

    XLA updates a command buffer at each call whose arrays lie elsewhere, as those of a chunk do.
    That is the likely cause of the 3 ms that a chunk of 2,048 tokens takes on an H100 beyond its
    kernels. Those of a large chunk take longer than the host needs to launch them one by one.
    """
    is_chunk = isinstance(program, PrefillProgram | UpperProgram)
    if platform == "gpu" and is_chunk and program.tokens > COMMAND_BUFFER_TOKENS:
        return {"xla_gpu_enable_command_buffer": ""}
    return {}


def _lower(function, *operands, **static) -> jax.stages.Lowered:
    """One program. Its types are the same whether JAX_ENABLE_X64 is set or not."""
    with jax.enable_x64(False):
        return function.lower(*operands, **static)


def _chunk(
    layout: Layout, shapes: Shapes, tokens: int, tiles: int, context: int | None
) -> PrefillChunk:
    ids = layout.rows(shapes.dp_size, tokens)
    pages = None if context is None else layout.rows(shapes.dp_size * context)
    adapter = ids if shapes.adapts_prefill else None
    return PrefillChunk(ids, ids, _tiles(layout, shapes, tokens, tiles), pages, adapter)


def _upper(layout: Layout, shapes: Shapes, tokens: int) -> UpperTokens:
    ids = layout.rows(shapes.dp_size, tokens)
    tiles = shapes.tiles(tokens)[-1]
    own_start = layout.rows(shapes.dp_size * tiles) if shapes.has_own_start else None
    own_tiles = (
        _tiles(layout, shapes, tokens, tiles, own=True) if shapes.pages_per_own_page else None
    )
    every = _tiles(layout, shapes, tokens, tiles)
    adapter = ids if shapes.num_adapters else None
    return UpperTokens(ids, ids, ids, every, own_start, own_tiles, adapter)


def _tiles(
    layout: Layout, shapes: Shapes, tokens: int, tiles: int, *, own: bool = False
) -> QueryTiles:
    """Query tiles of `tokens` tokens; with `own` those in own pages."""
    count = shapes.dp_size * tiles
    each = layout.rows(count)
    pages = (shapes.pages_per_own_page,) if own else ()
    return QueryTiles(
        page=layout.rows(count, *pages),
        page_start=each,
        query_start=each,
        query_end=each,
        source=each,
        page_table=layout.rows(count, shapes.table_pages, *pages),
        tile_index=layout.rows(shapes.dp_size, tokens),
    )
