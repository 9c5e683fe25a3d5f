"""A chunk of prefill as the device sees it: tokens of several requests in a row, and how they lie
in pages.

Matrix products run over the packed tokens, so short prompts waste nothing. Attention and the cache
work page by page: the part of a request's tokens that falls into one page is a *piece*, and a
piece's queries stand at the places they have in their page. A chunk of 8 tokens with pages of 4, of
request a (positions 6 .. 9) and request b (positions 0 .. 3):

    packed        a6 a7 a8 a9 b0 b1 b2 b3
    pieces        . . a6 a7 | a8 a9 . . | b0 b1 b2 b3        start 4, 8, 0; source 0, 2, 4; first 2, 0, 0; end 4, 2, 4
    line          2 3 4 5 8 9 10 11

A piece's row of the table is its request's, so all pieces of a request attend to the same pages,
those of this chunk too.
"""

from __future__ import annotations

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


@struct.dataclass
class QueryTiles:
    """R pieces on each of A lanes, lane by lane: W = A R. One that is not used has no queries and
    no page."""

    page: Leaf  # i32[W]; where the piece's keys and values are written, or NOWHERE
    start: Leaf  # i32[W]; the position at which the page begins
    first: Leaf  # i32[W]; the first place of the page that holds a token of the chunk
    end: Leaf  # i32[W]; one past the last
    source: Leaf  # i32[W]; the packed token at place `first`
    table: Leaf  # i32[W, P]; the pages of its request, or their places in `context`
    line: Leaf  # i32[A, T]; of each packed token, piece * page + place


@struct.dataclass
class PrefillChunk:
    """A chunk: T tokens on each of A lanes."""

    tokens: Leaf  # i32[A, T]
    positions: Leaf  # i32[A, T]; 0 for padding
    pieces: QueryTiles
    context: Leaf = None  # i32[A X]; all pages that the chunk reads, for a cache in 8 bits


@struct.dataclass
class Scored:
    """Which tokens of a chunk are scored: M on each of A lanes, packed in their turn."""

    index: Leaf  # i32[A, M]; packed token
    target: Leaf  # i32[A, M]; the token that follows it, -1 for padding
    asked: Leaf  # i32[A, M]; how many of the likeliest tokens are wanted; -1 for padding
    pieces: QueryTiles  # of the scored tokens; `line` is A M


# On the device ----------------------------------------------------------------


def unpack(
    x: Float[Array, "A T N H"], pieces: QueryTiles, page_size: int
) -> Float[Array, "W page N H"]:
    """Packed rows at their places in their pages. Other places hold any row."""
    lanes, tokens = x.shape[:2]
    index = pieces.source[:, None] + jnp.arange(page_size) - pieces.first[:, None]
    index = jnp.clip(index, 0, tokens - 1).reshape(lanes, -1)
    return jax.vmap(lambda x, index: x[index])(x, index).reshape(-1, page_size, *x.shape[2:])


def pack(x: Float[Array, "W page N H"], pieces: QueryTiles) -> Float[Array, "A T N H"]:
    """The inverse of `unpack`."""
    lines = x.reshape(pieces.line.shape[0], -1, *x.shape[2:])
    return jax.vmap(lambda x, line: x[line])(lines, pieces.line)


# On the host ------------------------------------------------------------------


def pack_spans(
    lanes: list[list[ScheduledTokens]],
    *,
    tokens: int,
    pieces: int,
    page_size: int,
    table_pages: int,
    context_pages: int | None,
) -> PrefillChunk:
    """The arrays of a chunk, as numpy: `tokens` and `pieces` on each lane, tables of `table_pages`.

    With `context_pages` the tables hold places in `context`, which lists each page once.
    """
    packed = np.zeros((2, len(lanes), tokens), np.int32)
    layout, contexts = _Layout(len(lanes), tokens, pieces, page_size, table_pages), []
    for lane, spans in enumerate(lanes):
        context = None if context_pages is None else {}
        at = 0
        for span in spans:
            stop = at + span.stop - span.start
            packed[0, lane, at:stop] = span.task.tokens[span.start : span.stop]
            packed[1, lane, at:stop] = range(span.start, span.stop)
            layout.add(lane, span, range(span.start, span.stop), at, context)
            at = stop
        if context is not None and context_pages is not None:
            contexts.append([*context, *[0] * (context_pages - len(context))])
    context = np.array(contexts, np.int32).reshape(-1) if contexts else None
    return PrefillChunk(packed[0], packed[1], layout.pieces(), context)


def pack_scored(
    lanes: list[list[ScheduledTokens]],
    *,
    scored: int,
    pieces: int,
    page_size: int,
    table_pages: int,
    context_pages: int | None,
) -> Scored:
    """The scored tokens of the same chunk, `scored` and `pieces` on each lane."""
    index = np.zeros((len(lanes), scored), np.int32)
    target = np.full((len(lanes), scored), -1, np.int32)
    asked = np.full_like(target, -1)
    layout = _Layout(len(lanes), scored, pieces, page_size, table_pages)
    for lane, spans in enumerate(lanes):
        context = None if context_pages is None else {}
        at = packed_at = 0
        for span in spans:
            if context is not None:  # the same places as in `pack_spans`
                _places(context, span, page_size)
            request = span.task.request
            if isinstance(request, ScoreRequest) and (wanted := span.scored):
                stop = at + len(wanted)
                index[lane, at:stop] = (
                    np.arange(len(wanted)) + packed_at + wanted.start - span.start
                )
                target[lane, at:stop] = span.task.tokens[wanted.start + 1 : wanted.stop + 1]
                asked[lane, at:stop] = request.top_logprobs
                layout.add(lane, span, wanted, at, context)
                at = stop
            packed_at += span.stop - span.start
    return Scored(index, target, asked, layout.pieces())


class _Layout:
    """`QueryTiles` being filled."""

    def __init__(self, lanes: int, tokens: int, pieces: int, page_size: int, table_pages: int):
        self._page_size = page_size
        self._fields = np.zeros((5, lanes, pieces), np.int32)  # page, start, first, end, source
        self._fields[0] = INVALID_PAGE
        self._table = np.zeros((lanes, pieces, table_pages), np.int32)
        self._line = np.zeros((lanes, tokens), np.int32)
        self._used = [0] * lanes

    def add(
        self,
        lane: int,
        span: ScheduledTokens,
        positions: range,
        at: int,
        context: dict[int, int] | None,
    ) -> None:
        """The pieces of `positions`, which are packed from `at` on."""
        size, pages = self._page_size, span.task.pages
        table = pages[: -(-span.stop // size)] if context is None else _places(context, span, size)
        for number in range(positions.start // size, -(-positions.stop // size)):
            piece = self._used[lane]
            first, end = (
                max(positions.start - number * size, 0),
                min(positions.stop - number * size, size),
            )
            self._fields[:, lane, piece] = pages[number], number * size, first, end, at
            self._table[lane, piece, : len(table)] = table
            self._line[lane, at : at + end - first] = range(
                piece * size + first, piece * size + end
            )
            self._used[lane] += 1
            at += end - first

    def pieces(self) -> QueryTiles:
        page, start, first, end, source = self._fields.reshape(5, -1)
        return QueryTiles(
            page,
            start,
            first,
            end,
            source,
            self._table.reshape(-1, self._table.shape[2]),
            self._line,
        )


def _places(context: dict[int, int], span: ScheduledTokens, page_size: int) -> list[int]:
    """Where in the context the pages stand that a span reads; those that are new to it are
    added."""
    return [
        context.setdefault(page, len(context))
        for page in span.task.pages[: -(-span.stop // page_size)]
    ]


def chunk_needs(
    lanes: list[list[ScheduledTokens]], page_size: int
) -> tuple[int, int, int, int, int]:
    """What the fullest lane of a chunk needs: (tokens, pieces, scored tokens, pieces of these,
    pages read)."""

    def pieces(positions: range) -> int:
        return -(-positions.stop // page_size) - positions.start // page_size if positions else 0

    def needs(spans: list[ScheduledTokens]) -> tuple[int, ...]:
        context = {page for span in spans for page in span.task.pages[: -(-span.stop // page_size)]}
        each = [
            (
                span.stop - span.start,
                pieces(range(span.start, span.stop)),
                len(span.scored),
                pieces(span.scored),
            )
            for span in spans
        ]
        return *(sum(column) for column in zip(*each, strict=True)), len(context)

    tokens, count, scored, scored_pieces, context = (
        max(column) for column in zip(*map(needs, filter(None, lanes)), strict=True)
    )
    return tokens, count, scored, scored_pieces, context


def scored_places(lanes: list[list[ScheduledTokens]]) -> tuple[np.ndarray, np.ndarray]:
    """(lane, place) of every scored token, span by span: where `pack_scored` has put it."""
    places = [
        (lane, place)
        for lane, spans in enumerate(lanes)
        for place in range(sum(len(span.scored) for span in spans))
    ]
    lane, place = np.array(places, np.int32).reshape(-1, 2).T
    return lane, place
