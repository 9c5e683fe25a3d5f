"""The shapes that serving compiles."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

from ...model.config import Config
from .shadow_drafts import MAX_LOOKUP, lookup_places

KVPrograms = Literal["boundary", "own", "both"]

SHORT_PROMPT = 32
"""Tokens of a prompt on average for which the smaller chunks have spare query tiles."""
UnconstrainedKind = Literal["sampling", "greedy"]
"""The kind of a decode call whose sequences follow no grammar."""


class DecodeCall(NamedTuple):
    """The size of a decode call."""

    steps: int
    width: int = 1
    """Most tokens of a sequence in a step."""

    @property
    def most(self) -> int:
        """Most tokens that a sequence can emit."""
        return self.steps * self.width


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The shapes that the programs are compiled for, on each data-parallel shard. A call uses the
    smallest size that is large enough."""

    dp_size: int
    """Data-parallel shards."""
    page_size: int
    num_pages: int
    table_pages: int
    """Pages of the longest sequence."""
    slots: int
    """Sequences that decode together."""
    decode_rows: tuple[int, ...]
    """Sizes of a decode call, ascending; the last is `slots`."""
    decode_steps: int
    decode_kinds: tuple[UnconstrainedKind, ...]
    """Kinds of decode programs: `sampling` for any sequences, `greedy` for calls in which all are
    plain greedy."""
    chunks: tuple[int, ...]
    """Sizes of a prefill chunk in tokens, ascending."""
    spare_tiles: tuple[int, ...]
    """Query tiles of a chunk of the largest size beyond those of one long prompt, ascending: how
    many short ones can share it. An unused tile costs attention a block of padding. Smaller chunks
    have one number of tiles (`tiles`)."""
    contexts: tuple[int | None, ...]
    """Numbers of pages that a chunk can read, ascending, where they are gathered first
    (`with_contexts`); else (None,)."""
    scoring: bool
    """True if tokens of a chunk can be scored."""
    single_step_rows: int = 0
    """Largest number of sequences for which a decode call emits one token of each; 0 if there is no
    such call."""
    structured_outputs: bool = False
    """True if there are decode programs for sequences that follow a grammar."""
    has_own_start: bool = False
    """True if programs take the position from which on tokens keep their own keys and values."""
    tail: int = 0
    """Fewest prompt tokens that a prefill program can run through all layers; 0 if there is no such
    program."""
    first_tokens: bool = False
    """True if a program goes on from the last chunk of a prompt that is alone to its first
    token."""
    pages_per_own_page: int = 0
    """`Config.pages_per_own_page`."""
    host_pages: int = 0
    """Pages of the prefix cache in host memory."""

    widths: tuple[int, ...] = ()
    """Tokens of a sequence in a step of a wide decode call, for each of `decode_rows`; none without
    speculation."""
    lookup: tuple[int, int] = (2, MAX_LOOKUP)
    """Fewest and most tokens of a match that drafts follow."""
    hidden_dim: int = 0
    """Entries of the hidden state that a speculator drafts from; 0 without one."""
    num_adapters: int = 0
    """Places for adapters; 0 for programs without any."""
    adapts_prefill: bool = False
    """True if adapters may change keys and values of prompts."""

    @property
    def most_drafts(self) -> int:
        """Most drafts of a sequence in a step; 0 without speculation."""
        return max(self.widths, default=1) - 1

    @property
    def history_size(self) -> int:
        """Places of a row of text in which drafts are looked up; 0 without speculation."""
        return lookup_places(self.table_pages * self.page_size) if self.widths else 0

    def size_of(self, rows: int) -> int:
        """The smallest of `decode_rows` for so many sequences."""
        return next(size for size in self.decode_rows if size >= rows)

    def wide_call(self, rows: int) -> DecodeCall:
        """The wide call for so many sequences: with drafts that are all accepted it emits about as
        many tokens as one of width 1."""
        size = self.size_of(rows)
        width = self.widths[self.decode_rows.index(size)]
        single = size in self.single_step_sizes
        return DecodeCall(1 if single else max(1, self.decode_steps // width), width)

    @property
    def most_new_tokens(self) -> int:
        """Most tokens that a sequence can emit in a decode call."""
        wide = (self.wide_call(rows).most for rows in self.decode_rows if self.widths)
        return max(self.decode_steps, *wide, 0)

    @property
    def wide_kinds(self) -> tuple[UnconstrainedKind, ...]:
        """Kinds of wide decode programs. The sampler's cost grows with the width: on a CPU that of
        16 tokens takes a quarter of a small model's step, so plain greedy calls go without it."""
        return tuple(dict.fromkeys((*self.decode_kinds, "greedy"))) if self.widths else ()

    def decode_kind(self, call: DecodeCall, *, plain_greedy: bool) -> UnconstrainedKind:
        """The kind of a call, given whether all of its sequences are plain greedy."""
        kinds = self.decode_kinds if call.width == 1 else self.wide_kinds
        return "greedy" if plain_greedy and "greedy" in kinds else "sampling"

    @property
    def single_step_sizes(self) -> tuple[int, ...]:
        """Values of `decode_rows` that have a single-step program."""
        rows = self.single_step_rows
        largest = next((size for size in self.decode_rows if size >= rows), self.slots)
        return tuple(size for size in self.decode_rows if rows and size <= largest)

    def tiles(self, tokens: int) -> tuple[int, ...]:
        """Numbers of query tiles that a chunk of `tokens` can have, ascending. One that scores has
        the last."""
        spare_tiles = self.spare_tiles
        if tokens < self.chunks[-1]:
            few, most = spare_tiles[0], spare_tiles[-1]
            spare_tiles = (min(max(few, tokens // SHORT_PROMPT), most),)
        return tuple(-(-tokens // self.page_size) + spare for spare in spare_tiles)

    def chunk(self, tokens: int, tiles: int, context_pages: int) -> tuple[int, int, int | None]:
        """The smallest compiled chunk that fits: (its tokens, query tiles, pages to read)."""
        size = next(n for n in self.chunks if n >= tokens and self.tiles(n)[-1] >= tiles)
        return (
            size,
            next(n for n in self.tiles(size) if n >= tiles),
            next(n for n in self.contexts if n is None or n >= context_pages),
        )

    def scored(self, tokens: int) -> tuple[int, ...]:
        """Numbers of tokens that can be scored in a chunk of `tokens`, ascending; the last is all.
        The upper layers run for all tokens of a size."""
        sizes = (max(16, tokens // part) for part in (64, 8, 4, 2, 1))
        return tuple(sorted({min(size, tokens) for size in sizes})) if self.scoring else ()

    def tails(self, tokens: int) -> tuple[int, ...]:
        """Numbers of tokens in a chunk of `tokens` that can run through all layers without being
        scored, ascending; the last is all."""
        if not self.tail:
            return ()
        least = max(16, 1 << (self.tail - 1).bit_length())
        return tuple(sorted({min(size, tokens) for size in (least, 8 * least, tokens)}))


def has_own_start(config: Config) -> bool:
    """`Shapes.has_own_start` of the served `config`."""
    return kv_programs(config) == "both" or config.has_two_caches


def kv_programs(config: Config) -> KVPrograms:
    """The upper keys and values that programs of the served `config` compute for tokens that run
    through all layers: those from the boundary, the tokens' own, or both, of which each token keeps
    one kind."""
    # The first decode step takes the last token of a prompt, which keeps its own keys and values
    # only if it is in the tail.
    return "both" if config.generated_kv == "own" and not config.exact_tail else config.generated_kv
