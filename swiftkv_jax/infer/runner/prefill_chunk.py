"""A chunk of prefill as arrays: tokens of several requests one after the other, and their places in
pages.

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

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float

from ...params import Leaf
from ..engine.request_state import ScheduledTokens
from ..engine.requests import ScoreRequest

INVALID_PAGE = 2**30
"""A page number that is in no pool: nothing is written there."""

Spans = list[list[ScheduledTokens]]
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
    page_table: Leaf  # i32[W, P]; pages of the request, or their places in `gathered_pages`
    tile_index: Leaf  # i32[A, T]; of each packed token, tile * page_size + offset


@struct.dataclass
class PrefillChunk:
    """A chunk: T tokens on each of A shards."""

    tokens: Leaf  # i32[A, T]
    positions: Leaf  # i32[A, T]; 0 for padding
    tiles: QueryTiles
    gathered_pages: Leaf = None  # i32[A X]; all pages that the chunk reads, for a cache in 8 bits


@struct.dataclass
class ScoredTokens:
    """The tokens of a chunk that are scored: M on each of A shards, packed once more."""

    index: Leaf  # i32[A, M]; packed token
    target: Leaf  # i32[A, M]; the token that follows it, -1 for padding
    num_logprobs: Leaf  # i32[A, M]; how many of the likeliest tokens to report; -1 for padding
    tiles: QueryTiles  # of the scored tokens; `tile_index` is A M


# On the device ----------------------------------------------------------------


def unpack(
    x: Float[Array, "A T N H"], tiles: QueryTiles, page_size: int
) -> Float[Array, "W page N H"]:
    """Packed rows at their offsets in their pages. Other offsets hold any row."""
    shards, tokens = x.shape[:2]
    index = tiles.source[:, None] + jnp.arange(page_size) - tiles.query_start[:, None]
    index = jnp.clip(index, 0, tokens - 1).reshape(shards, -1)
    return jax.vmap(lambda x, index: x[index])(x, index).reshape(-1, page_size, *x.shape[2:])


def pack(x: Float[Array, "W page N H"], tiles: QueryTiles) -> Float[Array, "A T N H"]:
    """The inverse of `unpack`."""
    rows = x.reshape(tiles.tile_index.shape[0], -1, *x.shape[2:])
    return jax.vmap(lambda x, index: x[index])(rows, tiles.tile_index)


# On the host ------------------------------------------------------------------


def pack_spans(
    spans: Spans,
    *,
    tokens: int,
    tiles: int,
    page_size: int,
    table_pages: int,
    context_pages: int | None,
) -> PrefillChunk:
    """The arrays of a chunk in NumPy: `tokens` and `tiles` on each shard, page tables of
    `table_pages`.

    With `context_pages` the page tables hold places in `gathered_pages`, which lists each page
    once.
    """
    packed = np.zeros((2, len(spans), tokens), np.int32)
    layout, gathered = _TileBuilder(len(spans), tokens, tiles, page_size, table_pages), []
    for dp_rank, shard in enumerate(spans):
        places = None if context_pages is None else {}
        at = 0
        for span in shard:
            positions, stop = range(span.start, span.stop), at + span.num_tokens
            token_ids = span.request_state.prompt_token_ids[span.start : span.stop]
            packed[0, dp_rank, at:stop] = token_ids
            packed[1, dp_rank, at:stop] = positions
            layout.add(dp_rank, span, positions, at, places)
            at = stop
        if places is not None and context_pages is not None:
            gathered.append([*places, *[0] * (context_pages - len(places))])
    pages = np.array(gathered, np.int32).reshape(-1) if gathered else None
    return PrefillChunk(packed[0], packed[1], layout.tiles(), pages)


def pack_scored(
    spans: Spans,
    *,
    scored: int,
    tiles: int,
    page_size: int,
    table_pages: int,
    context_pages: int | None,
) -> ScoredTokens:
    """The scored tokens of the same chunk, `scored` and `tiles` on each shard."""
    index = np.zeros((len(spans), scored), np.int32)
    target = np.full((len(spans), scored), -1, np.int32)
    num_logprobs = np.full_like(target, -1)
    layout = _TileBuilder(len(spans), scored, tiles, page_size, table_pages)
    for dp_rank, shard in enumerate(spans):
        places = None if context_pages is None else {}
        at = packed_at = 0
        for span in shard:
            if places is not None:  # in the same order as in `pack_spans`
                _gather(places, span, page_size)
            state, positions = span.request_state, span.scored
            if isinstance(state.request, ScoreRequest) and positions:
                stop = at + len(positions)
                first = packed_at + positions.start - span.start
                following = state.prompt_token_ids[positions.start + 1 : positions.stop + 1]
                index[dp_rank, at:stop] = np.arange(first, first + len(positions))
                target[dp_rank, at:stop] = following
                num_logprobs[dp_rank, at:stop] = state.request.top_logprobs
                layout.add(dp_rank, span, positions, at, places)
                at = stop
            packed_at += span.num_tokens
    return ScoredTokens(index, target, num_logprobs, layout.tiles())


class _TileBuilder:
    """`QueryTiles` being filled."""

    def __init__(self, shards: int, tokens: int, tiles: int, page_size: int, table_pages: int):
        self._page_size = page_size
        # page, page_start, query_start, query_end, source
        self._fields = np.zeros((5, shards, tiles), np.int32)
        self._fields[0] = INVALID_PAGE
        self._page_table = np.zeros((shards, tiles, table_pages), np.int32)
        self._tile_index = np.zeros((shards, tokens), np.int32)
        self._used = [0] * shards

    def add(
        self,
        dp_rank: int,
        span: ScheduledTokens,
        positions: range,
        at: int,
        places: dict[int, int] | None,
    ) -> None:
        """Add the tiles of `positions`, whose tokens are packed from `at` on."""
        size, pages = self._page_size, span.request_state.pages
        table = pages[: -(-span.stop // size)] if places is None else _gather(places, span, size)
        for number in range(positions.start // size, -(-positions.stop // size)):
            tile, start = self._used[dp_rank], number * size
            first, end = max(positions.start - start, 0), min(positions.stop - start, size)
            self._fields[:, dp_rank, tile] = pages[number], start, first, end, at
            self._page_table[dp_rank, tile, : len(table)] = table
            index = range(tile * size + first, tile * size + end)
            self._tile_index[dp_rank, at : at + end - first] = index
            self._used[dp_rank] += 1
            at += end - first

    def tiles(self) -> QueryTiles:
        page, page_start, query_start, query_end, source = self._fields.reshape(5, -1)
        return QueryTiles(
            page=page,
            page_start=page_start,
            query_start=query_start,
            query_end=query_end,
            source=source,
            page_table=self._page_table.reshape(-1, self._page_table.shape[2]),
            tile_index=self._tile_index,
        )


def _gather(places: dict[int, int], span: ScheduledTokens, page_size: int) -> list[int]:
    """Places in `gathered_pages` of the pages that a span reads; new pages are appended to
    `places`."""
    pages = span.request_state.pages[: -(-span.stop // page_size)]
    return [places.setdefault(page, len(places)) for page in pages]


class ChunkNeeds(NamedTuple):
    """Sizes that the fullest shard of a chunk needs."""

    tokens: int
    tiles: int
    scored_tokens: int
    scored_tiles: int
    context_pages: int
    """Pages that the chunk reads."""


def chunk_needs(spans: Spans, page_size: int) -> ChunkNeeds:
    """Sizes for a chunk of at least one token."""

    def num_tiles(positions: range) -> int:
        return -(-positions.stop // page_size) - positions.start // page_size if positions else 0

    def needs(shard: list[ScheduledTokens]) -> ChunkNeeds:
        pages = {
            page
            for span in shard
            for page in span.request_state.pages[: -(-span.stop // page_size)]
        }
        return ChunkNeeds(
            tokens=sum(span.num_tokens for span in shard),
            tiles=sum(num_tiles(range(span.start, span.stop)) for span in shard),
            scored_tokens=sum(len(span.scored) for span in shard),
            scored_tiles=sum(num_tiles(span.scored) for span in shard),
            context_pages=len(pages),
        )

    return ChunkNeeds(*map(max, zip(*map(needs, filter(None, spans)), strict=True)))


def scored_index(spans: Spans) -> tuple[np.ndarray, np.ndarray]:
    """(dp_rank, index within `ScoredTokens`) of every scored token, span by span."""
    places = [
        (dp_rank, place)
        for dp_rank, shard in enumerate(spans)
        for place in range(sum(len(span.scored) for span in shard))
    ]
    dp_rank, place = np.array(places, np.int32).reshape(-1, 2).T
    return dp_rank, place
