"""The shapes that serving compiles, chosen from the options of an engine."""

from __future__ import annotations

import dataclasses

from ...config import Config
from ...errors import OutOfMemoryError, UsageError
from ...hardware import GIB
from ..engine.options import EngineOptions
from ..engine.scheduler import Limits
from .memory import host_memory

CPU_CACHE_SHARE = 0.25
"""Share of the machine's memory for the KV cache where the device does not report its memory."""

FEW_TILES = 4
"""Spare query tiles of a chunk of few requests, which long prompts are."""


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The shapes that the programs are compiled for, of each data-parallel shard. A call uses the
    smallest of several sizes that is enough."""

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
    greedy_programs: bool
    """Whether calls of sequences that are all plain greedy have decode programs of their own."""
    chunks: tuple[int, ...]
    """Sizes of a prefill chunk in tokens, ascending."""
    spare_tiles: tuple[int, ...]
    """Query tiles of a chunk beyond those of one long prompt, ascending: how many short ones can
    share it. An unused tile costs attention a block of padding."""
    contexts: tuple[int | None, ...]
    """Numbers of pages that a chunk can read, ascending, for a cache in 8 bits; else (None,)."""
    scoring: bool
    """Whether tokens of a chunk can be scored."""

    @property
    def limits(self) -> Limits:
        """What the scheduler may plan."""
        longest = self.chunks[-1]
        return Limits(
            max_num_seqs=self.slots,
            chunk_tokens=longest,
            max_tiles=self.tiles(longest)[-1],
            context_pages=self.contexts[-1],
            scored_tokens=longest if self.scoring else 0,
        )

    def tiles(self, tokens: int) -> tuple[int, ...]:
        """Numbers of query tiles that a chunk of `tokens` can have, ascending. One that scores has
        the last."""
        return tuple(-(-tokens // self.page_size) + spare for spare in self.spare_tiles)

    def chunk(self, tokens: int, tiles: int, context_pages: int) -> tuple[int, int, int | None]:
        """The smallest chunk for so many tokens, query tiles and pages to read, as its numbers of
        them."""
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


def buckets(largest: int, *, smallest: int, count: int) -> tuple[int, ...]:
    """`largest` and eighths of it, down to `smallest`: at most `count`, ascending.

    A program for fewer tokens or rows reads the same weights, so on an accelerator what it saves is
    small until here.
    """
    sizes = [largest]
    while len(sizes) < count and sizes[-1] > smallest:
        sizes.append(max(sizes[-1] // 8, smallest))
    return tuple(reversed(sizes))


def choose_shapes(
    config: Config,
    options: EngineOptions,
    *,
    dp_size: int,
    platform: str,
    page_bytes: int,
    weight_bytes: int,
    memory_limit: int | None,
    quantized: bool,
) -> Shapes:
    """The shapes for these options.

    `page_bytes` are the bytes of a page in all layers on one device, `weight_bytes` those of the
    weights, `memory_limit` those that may be used (None: the device does not say). Raises
    `UsageError` if the cache cannot hold one sequence of `max_model_len`.
    """
    positions = config.max_position_embeddings
    length = positions if options.max_model_len is None else options.max_model_len
    if length > positions:
        raise UsageError(
            f"`max_model_len`={length} must be from 2 to the model's {positions} positions"
        )
    if options.page_size > max(EngineOptions.page_size, positions):
        raise UsageError(
            f"`page_size`={options.page_size} is more than the model's {positions} positions"
        )
    size, slots = options.page_size, -(-options.max_num_seqs // dp_size)
    table_pages = -(-length // size)
    tokens = options.max_num_batched_tokens or (512 if platform == "cpu" else 2048)
    count = 1 if options.one_size else 2
    longest = max(16, 1 << (length - 1).bit_length())
    chunks = options.chunks or buckets(min(tokens, longest), smallest=16, count=count)
    # A request has at most one tile more than its tokens fill.
    most = 4 if platform == "cpu" else 32
    spare = (most if options.scoring else min(most, slots + 1),)
    if spare[0] >= 2 * FEW_TILES and not options.one_size:
        spare = FEW_TILES, *spare
    contexts: tuple[int | None, ...] = (None,)
    if quantized:
        tiles = -(-chunks[-1] // size) + spare[-1]
        contexts = buckets(max(table_pages, tiles), smallest=tiles, count=3)
    decode_rows = options.decode_rows or buckets(slots, smallest=1, count=count**2)
    if decode_rows[-1] != slots or any(
        sorted(set(sizes)) != list(sizes) for sizes in (chunks, decode_rows)
    ):
        raise UsageError(
            f"`chunks`={chunks} and `decode_rows`={decode_rows} must be ascending, and the last of "
            f"`decode_rows` the {slots} sequences of each device"
        )
    if options.kv_cache_memory is not None:
        pages = options.kv_cache_memory // page_bytes
        has = host_memory() if memory_limit is None else memory_limit
        if options.kv_cache_memory + weight_bytes > has:
            raise OutOfMemoryError(
                f"`kv_cache_memory`={options.kv_cache_memory / GIB:.2f} GiB and "
                f"{weight_bytes / GIB:.2f} GiB of weights are more than the "
                f"{has / GIB:.2f} GiB that may be used"
            )
    elif memory_limit is not None:
        left = memory_limit - weight_bytes - _temporaries(config, chunks[-1])
        pages = left // page_bytes
    else:
        pages = min(
            slots * table_pages,
            max(table_pages, int(CPU_CACHE_SHARE * host_memory()) // page_bytes),
        )
    return check_pages(
        Shapes(
            dp_size=dp_size,
            page_size=size,
            num_pages=pages,
            table_pages=table_pages,
            slots=slots,
            decode_rows=decode_rows,
            decode_steps=options.decode_steps,
            # By default command buffers of XLA's GPU backend hold no loop, and so no sampler: at its branch
            # the host waits for the device, once a step.
            greedy_programs=platform == "gpu" and not options.one_size,
            chunks=chunks,
            spare_tiles=spare,
            contexts=contexts,
            scoring=options.scoring,
        ),
        length,
        page_bytes,
    )


def check_pages(shapes: Shapes, length: int, page_bytes: int) -> Shapes:
    """Return `shapes`. Raises `UsageError` if their cache cannot hold one sequence of `length`
    tokens."""
    if shapes.num_pages < shapes.table_pages:
        raise UsageError(
            f"the KV cache has room for {max(shapes.num_pages, 0) * shapes.page_size} tokens, too "
            f"little for one sequence of `max_model_len`={length} "
            f"({shapes.table_pages * page_bytes / GIB:.2f} GiB): raise `kv_cache_memory` or "
            f"`memory_utilization`, lower `max_model_len`, or store it in 8 bits with "
            f"`kv_cache_dtype`=fp8"
        )
    return shapes


def _temporaries(config: Config, tokens: int) -> int:
    """Estimated bytes of the temporaries, before the compiler reports them: some hidden states and
    one layer's MLP in float32, and logits of some rows."""
    return (
        GIB // 2
        + tokens * 4 * (4 * config.embed_dim + 3 * config.mlp_dim)
        + 256 * 4 * config.vocab_size
    )
