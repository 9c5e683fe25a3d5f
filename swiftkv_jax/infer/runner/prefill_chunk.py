"""A chunk of prefill as arrays: tokens of several requests one after the other, and their offsets
in pages.

Matrix products run over the packed tokens, so short prompts waste nothing. Attention and the cache
work page by page: the tokens of a request that fall into one page are a *tile* of queries, at the
offsets that they have in the page. A chunk of 8 tokens with pages of 4, of request a (positions
6 .. 9) and request b (positions 0 .. 3):

    packed tokens  a6 a7 a8 a9 b0 b1 b2 b3
    tiles          . . a6 a7 | a8 a9 . . | b0 b1 b2 b3
    page_start     4           8           0
    query_start    2           0           0
    query_end      4           2           4
    source         0           2           4
    tile_index     2 3 4 5 8 9 10 11

A tile's row of the page table is that of its request, so all tiles of a request attend to the same
pages, those of this chunk among them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float

from ...model.params import Leaf
from ..engine.page_pool import RELEASED
from ..engine.request_state import RequestState, ScheduledTokens, num_tiles
from ..engine.requests import ScoreRequest

INVALID_PAGE = 2**30
"""A page number outside every pool: writes to it are dropped."""

ScheduledShards = list[list[ScheduledTokens]]
"""Scheduled tokens of each data-parallel shard."""


@struct.dataclass
class QueryTiles:
    """R tiles on each of A data-parallel shards, shard by shard: W = A R. An unused tile has no
    queries and no page."""

    page: Leaf  # i32[W]; where the tile's keys and values are written, or INVALID_PAGE
    page_start: Leaf  # i32[W]; the position at which the page begins
    query_start: Leaf  # i32[W]; the first offset in the page that holds a token of the chunk
    query_end: Leaf  # i32[W]; one past the last
    source: Leaf  # i32[W]; index of the packed token at `query_start`
    # i32[W, P]; pages of the request, or their indices in `gathered_pages`; 0 for `RELEASED`
    page_table: Leaf
    tile_index: Leaf  # i32[A, T]; of each packed token, tile * page_size + offset


@struct.dataclass
class PrefillChunk:
    """A chunk: T tokens on each of A shards."""

    tokens: Leaf  # i32[A, T]
    positions: Leaf  # i32[A, T]; 0 for padding
    tiles: QueryTiles
    gathered_pages: Leaf = None  # i32[A X]; all pages that the chunk reads; None without a gather
    adapter: Leaf = None  # i32[A, T]; see `RequestState`; None without `Shapes.adapts_prefill`


@struct.dataclass
class UpperTokens:
    """The tokens of a chunk that run through all layers, those that are scored among them: M on
    each of A shards, packed once more."""

    index: Leaf  # i32[A, M]; packed token
    target: Leaf  # i32[A, M]; the token that follows it, -1 if it is not scored, and for padding
    num_logprobs: Leaf  # i32[A, M]; how many of the likeliest tokens to report; -1 for padding
    tiles: QueryTiles  # of these tokens; `tile_index` is A M
    own_start: Leaf = None  # i32[W]; see `RequestState`; None if all keep their own keys and values
    # Where upper layers attend to two caches: tiles of the tokens that keep their own keys and
    # values, at offsets in own pages. `page` is W O, `page_table` W P O; positions count from
    # `own_start`, and `tile_index` is -1 for the other tokens.
    own_tiles: QueryTiles | None = None
    adapter: Leaf = None  # i32[A, M]; see `RequestState`; None without adapters


@struct.dataclass
class Joined[Tree]:
    """A tree of int32 arrays, such as a chunk, as one array: one transfer to the device."""

    data: Leaf  # i32[A, N]
    structure: Any = struct.field(pytree_node=False)
    """The tree's `jax.tree.structure`, and the shape of each array."""

    @classmethod
    def of(cls, tree: Tree, shards: int) -> Joined[Tree]:
        """Join arrays in NumPy, the first axis of each split over `shards`."""
        leaves, treedef = jax.tree.flatten(tree)
        data = np.concatenate([leaf.reshape(shards, -1) for leaf in leaves], axis=1)
        return cls(data, (treedef, tuple(leaf.shape for leaf in leaves)))

    def split(self) -> Tree:
        """The tree, on the device."""
        treedef, shapes = self.structure
        shards = self.data.shape[0]
        ends = np.cumsum([math.prod(shape) // shards for shape in shapes])
        parts = jnp.split(self.data, ends[:-1], axis=1)
        leaves = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
        return jax.tree.unflatten(treedef, leaves)


# On the device ----------------------------------------------------------------


def unpack(
    x: Float[Array, "A T N H"], tiles: QueryTiles, page_size: int
) -> Float[Array, "W page N H"]:
    """Packed rows at their offsets in their pages. Other offsets hold arbitrary rows."""
    shards, tokens = x.shape[:2]
    index = tiles.source[:, None] + jnp.arange(page_size) - tiles.query_start[:, None]
    index = jnp.clip(index, 0, tokens - 1).reshape(shards, -1)
    return jax.vmap(lambda x, index: x[index])(x, index).reshape(-1, page_size, *x.shape[2:])


def pack(x: Float[Array, "W page N H"], tiles: QueryTiles) -> Float[Array, "A T N H"]:
    """The inverse of `unpack`."""
    rows = x.reshape(tiles.tile_index.shape[0], -1, *x.shape[2:])
    return jax.vmap(lambda x, index: x[index])(rows, tiles.tile_index)


# On the host ------------------------------------------------------------------


def pack_chunk(
    shards: ScheduledShards,
    *,
    tokens: int,
    tiles: int,
    page_size: int,
    table_pages: int,
    context_pages: int | None,
    adapters: bool = False,
) -> PrefillChunk:
    """The arrays of a chunk in NumPy: `tokens` and `tiles` on each shard, page tables of
    `table_pages`.

    With `context_pages` the page tables hold indices in `gathered_pages`, which lists each page
    once. `adapters` says whether each request's `adapter` is needed.
    """
    packed = np.zeros((3, len(shards), tokens), np.int32)
    layout = _TileBuilder(len(shards), tokens, tiles, page_size, table_pages)
    gathered = []
    for dp_rank, shard in enumerate(shards):
        index_of = None if context_pages is None else _gathered(shard, page_size)
        at = 0
        for scheduled in shard:
            positions = range(scheduled.start, scheduled.stop)
            stop = at + scheduled.num_tokens
            state = scheduled.request_state
            packed[0, dp_rank, at:stop] = state.token_ids_at(scheduled.start, scheduled.stop)
            packed[1, dp_rank, at:stop] = positions
            packed[2, dp_rank, at:stop] = state.adapter
            layout.add(dp_rank, state, state.pages, positions, at, index_of)
            at = stop
        if index_of is not None and context_pages is not None:
            gathered.append([*index_of, *[0] * (context_pages - len(index_of))])
    pages = np.array(gathered, np.int32).reshape(-1) if gathered else None
    of_tokens = packed[2] if adapters else None
    return PrefillChunk(packed[0], packed[1], layout.tiles(), pages, of_tokens)


def pack_upper(
    shards: ScheduledShards,
    *,
    tokens: int,
    tiles: int,
    page_size: int,
    table_pages: int,
    context_pages: int | None,
    own_start: bool = False,
    pages_per_own_page: int = 0,
    adapters: bool = False,
) -> UpperTokens:
    """The tokens of the same chunk that run through all layers, `tokens` and `tiles` on each shard;
    `own_start` says whether each request's `own_start` is needed, and `adapters` whether its
    `adapter` is; `pages_per_own_page` is that of `Shapes`."""
    index = np.zeros((len(shards), tokens), np.int32)
    target = np.full((len(shards), tokens), -1, np.int32)
    num_logprobs = np.full_like(target, -1)
    adapter = np.zeros_like(target)
    layout = _TileBuilder(len(shards), tokens, tiles, page_size, table_pages)
    own = _TileBuilder(len(shards), tokens, tiles, page_size, table_pages, pages_per_own_page)
    for dp_rank, shard in enumerate(shards):
        index_of = None if context_pages is None else _gathered(shard, page_size)
        at = packed_at = 0
        for scheduled in shard:
            state = scheduled.request_state
            positions = scheduled.upper
            if positions:
                stop = at + len(positions)
                first = packed_at + positions.start - scheduled.start
                index[dp_rank, at:stop] = np.arange(first, first + len(positions))
                adapter[dp_rank, at:stop] = state.adapter
                if isinstance(state.request, ScoreRequest) and (scored := scheduled.scored):
                    following = state.prefill_token_ids[scored.start + 1 : scored.stop + 1]
                    target[dp_rank, stop - len(scored) : stop] = following
                    num_logprobs[dp_rank, stop - len(scored) : stop] = state.request.top_logprobs
                layout.add(dp_rank, state, state.pages, positions, at, index_of)
                if pages_per_own_page:
                    start = stop - len(scheduled.own)
                    own.add(dp_rank, state, state.own_pages, scheduled.own, start, index_of)
                at = stop
            packed_at += scheduled.num_tokens
    starts = layout.own_start() if own_start else None
    own_tiles = own.tiles() if pages_per_own_page else None
    return UpperTokens(
        index,
        target,
        num_logprobs,
        layout.tiles(),
        starts,
        own_tiles,
        adapter if adapters else None,
    )


class _TileBuilder:
    """`QueryTiles` being filled; with `pages_per_own_page` those of tokens in
    `RequestState.own_pages`."""

    def __init__(
        self,
        shards: int,
        tokens: int,
        tiles: int,
        page_size: int,
        table_pages: int,
        pages_per_own_page: int = 0,
    ):
        each = (pages_per_own_page,) if pages_per_own_page else ()  # pages of a tile
        self._page_size = page_size
        self._fields = np.zeros((5, shards, tiles), np.int32)
        """page_start, query_start, query_end, source, own_start."""
        self._page = np.full((shards, tiles, *each), INVALID_PAGE, np.int32)
        self._page_table = np.zeros((shards, tiles, table_pages, *each), np.int32)
        self._tile_index = np.full((shards, tokens), -1 if pages_per_own_page else 0, np.int32)
        self._used = [0] * shards

    def add(
        self,
        dp_rank: int,
        state: RequestState,
        pages: Sequence[Any],
        positions: range,
        at: int,
        index_of: dict[int, int] | None,
    ) -> None:
        """Add the tiles of `positions` in `pages`, whose tokens are packed from `at` on. `index_of`
        has the indices of pages in `gathered_pages`."""
        size = self._page_size
        table = np.array(pages[: -(-positions.stop // size)], np.int32)
        if index_of is not None:
            indices = [index_of.get(page, RELEASED) for page in table.ravel().tolist()]
            table = np.array(indices, np.int32).reshape(table.shape)
        for number in range(positions.start // size, -(-positions.stop // size)):
            tile = self._used[dp_rank]
            start = number * size
            first = max(positions.start - start, 0)
            end = min(positions.stop - start, size)
            self._fields[:, dp_rank, tile] = start, first, end, at, state.own_start
            self._page[dp_rank, tile] = pages[number]
            self._page_table[dp_rank, tile, : len(table)] = np.maximum(table, 0)
            index = range(tile * size + first, tile * size + end)
            self._tile_index[dp_rank, at : at + end - first] = index
            self._used[dp_rank] += 1
            at += end - first

    def tiles(self) -> QueryTiles:
        page_start, query_start, query_end, source, _ = self._fields.reshape(5, -1)
        return QueryTiles(
            page=self._page.reshape(-1, *self._page.shape[2:]),
            page_start=page_start,
            query_start=query_start,
            query_end=query_end,
            source=source,
            page_table=self._page_table.reshape(-1, *self._page_table.shape[2:]),
            tile_index=self._tile_index,
        )

    def own_start(self) -> np.ndarray:
        return self._fields[4].reshape(-1)


def _gathered(shard: list[ScheduledTokens], page_size: int) -> dict[int, int]:
    """The pages that a shard's part of a chunk reads -> their indices in `gathered_pages`."""
    pages = dict.fromkeys(page for one in shard for page in one.read_pages(page_size))
    pages.pop(RELEASED, None)
    return {page: index for index, page in enumerate(pages)}


class ChunkNeeds(NamedTuple):
    """Sizes that the fullest shard of a chunk needs."""

    tokens: int
    tiles: int
    upper_tokens: int
    """Tokens that run through all layers."""
    upper_tiles: int
    context_pages: int
    """Pages that the chunk reads."""


def chunk_needs(shards: ScheduledShards, page_size: int) -> ChunkNeeds:
    """Sizes for a chunk of at least one token."""

    def needs(shard: list[ScheduledTokens]) -> ChunkNeeds:
        own_tiles = sum(num_tiles(scheduled.own, page_size) for scheduled in shard)
        return ChunkNeeds(
            tokens=sum(scheduled.num_tokens for scheduled in shard),
            tiles=sum(num_tiles(range(one.start, one.stop), page_size) for one in shard),
            upper_tokens=sum(len(scheduled.upper) for scheduled in shard),
            upper_tiles=max(
                sum(num_tiles(scheduled.upper, page_size) for scheduled in shard), own_tiles
            ),
            context_pages=len(_gathered(shard, page_size)),
        )

    return ChunkNeeds(*map(max, zip(*map(needs, filter(None, shards)), strict=True)))


def pack_copies(
    copies: list[list[tuple[int, int]]], start: int, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """`count` copies of pages from number `start` on, of each data-parallel shard: (sources,
    targets), `INVALID_PAGE` where there is none."""
    pairs = np.full((len(copies), count, 2), INVALID_PAGE, np.int32)
    for row, shard in zip(pairs, copies, strict=True):
        some = shard[start : start + count]
        row[: len(some)] = np.array(some, np.int32).reshape(-1, 2)
    return pairs[..., 0].reshape(-1), pairs[..., 1].reshape(-1)


def scored_index(shards: ScheduledShards) -> tuple[np.ndarray, np.ndarray]:
    """(dp_rank, index within `UpperTokens`) of every scored token, in the order of
    `pack_upper`."""
    entries: list[tuple[int, int]] = []
    for dp_rank, shard in enumerate(shards):
        at = 0
        for scheduled in shard:
            at += len(scheduled.upper)
            # Scored tokens are at the end of those that run through all layers.
            entries += [(dp_rank, index) for index in range(at - len(scheduled.scored), at)]
    dp_rank, index = np.array(entries, np.int32).reshape(-1, 2).T
    return dp_rank, index
