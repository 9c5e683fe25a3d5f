"""The shapes that serving compiles, chosen from the options of an engine."""

from __future__ import annotations

import dataclasses
import logging

from ...errors import OutOfMemoryError, UsageError
from ...model.config import Config
from ...plan.cost import mlp_width
from ...plan.hardware import GIB
from ..engine.options import MAX_SPECULATIVE_TOKENS, EngineOptions, SpeculativeConfig
from ..engine.shapes import Shapes, UnconstrainedKind, has_own_start, kv_programs
from .memory import MemoryPlan, host_memory

logger = logging.getLogger(__name__)

CPU_CACHE_SHARE = 0.25
"""Share of the machine's memory for the KV cache where the device does not report its memory."""

SINGLE_STEP_ROWS = 32
"""Number of sequences for which the host can process single tokens while a device decodes the next
ones: about 15 microseconds each, for a step of 2 to 5 ms."""
SINGLE_STEP_BYTES = 256 * 2**20
"""Weights from which that holds on a CPU, which reads some 20 GB/s: a step of smaller ones takes no
longer than the host needs for a call, on the same cores."""
FEW_TILES = 4
"""Spare query tiles of a chunk with few requests, as with long prompts."""
RIDGE_TOKENS = 256.0
"""`Hardware.ridge_tokens` of an accelerator that is not in its table. No size of a chunk is halved
below it by default: each is a program or more to compile."""
GPU_DECODE_ROWS = (1, 8, 32, 64, 96, 128, 192, 256, 384)
"""Sizes of a decode call by default on a GPU: from some 64 rows on, the time of a step grows with
the rows."""
OFFLINE_NUM_SEQS = 256
"""Most sequences by default where all answers are awaited together, on an accelerator."""
FIRST_TOKENS = ("gpu", "tpu")
"""Platforms whose engines go on from a chunk to the first token (`Shapes.first_tokens`). On a CPU
it would save little beside the prompt."""
MAX_BLOCK_QUERIES = 64
"""Most queries of a step for each key/value head: what the decode kernels take."""
WIDTHS = ((1, 16), (8, 8), (1 << 30, 4))
"""Sequences of a call, and the tokens of each in a step up to which it costs about as much as one
token on an H100, by the roofline."""


def buckets(largest: int, *, smallest: int, count: int) -> tuple[int, ...]:
    """`largest` and eighths of it, down to `smallest`: at most `count`, ascending.

    A program for fewer tokens or rows reads the same weights, so on an accelerator smaller steps
    between sizes would save little.
    """
    sizes = [largest]
    while len(sizes) < count and sizes[-1] > smallest:
        sizes.append(max(sizes[-1] // 8, smallest))
    return tuple(reversed(sizes))


def offline_num_seqs(platform: str, requests: int) -> int:
    """`max_num_seqs` by default where the answers to so many requests are awaited together. On a
    CPU 256 are slower than 64."""
    default = EngineOptions.max_num_seqs
    return default if platform == "cpu" else max(default, min(requests, OFFLINE_NUM_SEQS))


def choose_shapes(
    config: Config,
    options: EngineOptions,
    *,
    dp_size: int,
    platform: str,
    page_bytes: int,
    weight_bytes: int,
    memory_limit: int | None,
    kept_bytes: int = 0,
    ridge_tokens: float = RIDGE_TOKENS,
) -> Shapes:
    """The shapes for these options.

    `page_bytes` are the bytes of a page in all layers on one device, `weight_bytes` those of the
    weights, `memory_limit` those that may be used (None: the device does not say), `kept_bytes`
    those of a model beside the weights, `ridge_tokens` is `Hardware.ridge_tokens` of the device.
    Raises `UsageError` if the cache cannot hold one sequence of `max_model_len`.
    """
    length = _max_model_len(config, options)
    page_size = options.page_size
    slots = -(-options.max_num_seqs // dp_size)
    table_pages = -(-length // page_size)
    chunks = options.chunks or _chunk_sizes(options, length, slots, platform, ridge_tokens)
    longest_pages = table_pages * (1 + config.pages_per_own_page)
    all_pages = slots * longest_pages
    if options.kv_cache_memory is not None:
        _check_memory(options.kv_cache_memory, weight_bytes, kept_bytes, memory_limit)
        num_pages = options.kv_cache_memory // page_bytes
    elif memory_limit is not None:
        needed = weight_bytes + kept_bytes + _temporaries(config, chunks[-1])
        num_pages = (memory_limit - needed) // page_bytes
        if options.one_size:  # no later call will look for prefixes
            num_pages = min(num_pages, all_pages)
    else:
        share = int(CPU_CACHE_SHARE * host_memory())
        num_pages = min(all_pages, max(table_pages, share // page_bytes))
    cached_rows = num_pages // longest_pages
    decode_rows = options.decode_rows or _decode_rows(options, slots, cached_rows, platform)
    if decode_rows[-1] != slots:
        raise UsageError(
            f"the last of `decode_rows`={decode_rows} must be the {slots} sequences of each device",
            option="decode_rows",
        )
    shapes = Shapes(
        dp_size=dp_size,
        page_size=page_size,
        num_pages=num_pages,
        table_pages=table_pages,
        slots=slots,
        decode_rows=decode_rows,
        decode_steps=options.decode_steps,
        decode_kinds=_decode_kinds(options, platform),
        chunks=chunks,
        spare_tiles=_spare_tiles(options, slots, platform),
        contexts=(None,),
        scoring=options.scoring,
        single_step_rows=_single_step_rows(options, slots, platform, weight_bytes),
        structured_outputs=options.structured_outputs,
        has_own_start=has_own_start(config),
        pages_per_own_page=config.pages_per_own_page,
        tail=_tail(config, preempts=options.reserve_tokens < length),
        first_tokens=platform in FIRST_TOKENS and dp_size == 1 and _first_tokens(config, options),
        num_adapters=options.max_loras if options.enable_lora else 0,
        adapts_prefill=options.enable_lora and not options.lora_upper_only,
    )
    if options.speculative is not None:
        shapes = with_widths(shapes, config, options.speculative)
    return check_pages(shapes, length, page_bytes)


def _max_model_len(config: Config, options: EngineOptions) -> int:
    """Tokens of the longest sequence. Raises `UsageError` if the model, or a page, does not fit."""
    positions = config.max_position_embeddings
    length = options.max_model_len or positions
    if length > positions:
        raise UsageError(
            f"`max_model_len`={length} must be from 2 to the model's {positions} positions"
        )
    if options.page_size > max(EngineOptions.page_size, positions):
        raise UsageError(
            f"`page_size`={options.page_size} is more than the model's {positions} positions"
        )
    return length


def _chunk_sizes(
    options: EngineOptions, length: int, slots: int, platform: str, ridge_tokens: float
) -> tuple[int, ...]:
    """`Shapes.chunks` by default.

    On an accelerator sizes halve until one is below `ridge_tokens`, from where on a smaller one
    would take as long, and prompts of several requests fill the largest.
    """
    tokens = options.max_num_batched_tokens or (512 if platform == "cpu" else 2048)
    most = length if platform == "cpu" else length * slots
    largest = min(tokens, max(16, 1 << (most - 1).bit_length()))
    if options.one_size:
        return (largest,)
    if platform == "cpu":
        return buckets(largest, smallest=16, count=2)
    sizes = [largest]
    while sizes[-1] > max(ridge_tokens, RIDGE_TOKENS):
        sizes.append(sizes[-1] // 2)
    return tuple(reversed(sizes))


def _decode_rows(
    options: EngineOptions, slots: int, cached_rows: int, platform: str
) -> tuple[int, ...]:
    """`Shapes.decode_rows` by default, with a cache that holds `cached_rows` of the longest
    sequences."""
    sizes = buckets(slots, smallest=1, count=4)
    if platform == "gpu":
        sizes = (*(rows for rows in GPU_DECODE_ROWS if rows < slots), slots)
    if options.one_size:
        cached = next(size for size in sizes if size >= min(cached_rows, slots))
        return (cached, slots) if cached < slots else (slots,)
    return sizes


def _decode_kinds(options: EngineOptions, platform: str) -> tuple[UnconstrainedKind, ...]:
    if not options.sampling:
        return ("greedy",)
    # By default command buffers of XLA's GPU backend hold no loop, and so no sampler: at its branch
    # the host waits for the device, once a step.
    separate = platform == "gpu" and not options.one_size
    return ("sampling", "greedy") if separate else ("sampling",)


def _spare_tiles(options: EngineOptions, slots: int, platform: str) -> tuple[int, ...]:
    """`Shapes.spare_tiles`: a request has at most one tile more than its tokens fill."""
    most = 4 if platform == "cpu" else 32
    spare = most if options.scoring else min(most, slots + 1)
    return (FEW_TILES, spare) if spare >= 2 * FEW_TILES and not options.one_size else (spare,)


def _check_memory(
    kv_cache_memory: int, weight_bytes: int, kept_bytes: int, memory_limit: int | None
) -> None:
    """Raise `OutOfMemoryError` if the weights and the cache that was asked for do not fit."""
    has = host_memory() if memory_limit is None else memory_limit
    if kv_cache_memory + weight_bytes + kept_bytes > has:
        kept = f", and {kept_bytes / GIB:.2f} GiB of the model without `donate`," * bool(kept_bytes)
        raise OutOfMemoryError(
            f"`kv_cache_memory`={kv_cache_memory / GIB:.2f} GiB and "
            f"{weight_bytes / GIB:.2f} GiB of weights{kept} are more than the "
            f"{has / GIB:.2f} GiB that may be used"
        )


def _single_step_rows(options: EngineOptions, slots: int, platform: str, weight_bytes: int) -> int:
    """`Shapes.single_step_rows`, of each shard."""
    rows = options.single_step_rows
    if rows is None:
        is_small = platform == "cpu" and weight_bytes < SINGLE_STEP_BYTES
        rows = 0 if is_small else SINGLE_STEP_ROWS
    return 0 if options.decode_steps == 1 else min(rows, slots)


def widest_step(config: Config, speculative: SpeculativeConfig) -> int:
    """Most tokens of a sequence in a step: by default as many as the decode kernels take of the
    served `config`. Raises `UsageError` for more, and for a model whose tokens would not be those
    of width 1."""
    if config.boundary_taps:
        reason = "`boundary_taps` keep the state of the last token of a page, which may be a draft"
        raise UsageError(f"`speculative_config`: {reason}", option="speculative_config")
    if config.has_two_caches and kv_programs(config) == "both":
        raise UsageError(
            "`speculative_config` with groups of layers that share keys and values, and "
            "`generated_kv`=own, needs `exact_tail` of 1 or more",
            option="speculative_config",
        )
    most = MAX_BLOCK_QUERIES * config.num_kv_heads // config.num_heads
    of_each = f"{config.num_heads // config.num_kv_heads} query heads for each key/value head"
    if most < 2:
        raise UsageError(
            f"`speculative_config` does not go with {of_each}", option="speculative_config"
        )
    limit = 1 + (speculative.num_speculative_tokens or min(MAX_SPECULATIVE_TOKENS, most - 1))
    if limit > most:
        raise UsageError(
            f"`speculative_config.num_speculative_tokens`={limit - 1} must be at most {most - 1} "
            f"with {of_each}",
            option="speculative_config",
        )
    return limit


def with_widths(shapes: Shapes, config: Config, speculative: SpeculativeConfig) -> Shapes:
    """`shapes` with wide decode calls. Raises as `widest_step`."""
    limit = widest_step(config, speculative)
    lookup = (speculative.prompt_lookup_min, speculative.prompt_lookup_max)
    if not speculative.enable_suffix_decoding:
        lookup = (2, 1)  # no match is longer than the longest
    of_rows = (next(w for up_to, w in WIDTHS if rows <= up_to) for rows in shapes.decode_rows)
    return dataclasses.replace(
        shapes,
        widths=tuple(min(width, limit) for width in of_rows),
        lookup=lookup,
    )


def _tail(config: Config, *, preempts: bool) -> int:
    """`Shapes.tail`. The last token of a prompt is decoded, not prefilled. Generated tokens are
    prefilled after a preemption."""
    reruns = preempts and config.num_upper_layers > 0 and config.generated_kv == "own"
    return max(config.exact_tail - 1, int(reruns))


def _first_tokens(config: Config, options: EngineOptions) -> bool:
    """Say whether the last token of a prompt can run in a chunk: for a student, whose upper layers
    see it as they see the others; of a teacher all layers would run for all tokens. With
    `one_size` no request is alone."""
    plain = config.num_upper_layers > 0 and kv_programs(config) == "boundary"
    return plain and options.speculative is None and not options.one_size


def with_contexts(shapes: Shapes) -> Shapes:
    """`shapes` for chunks whose pages are gathered first, with up to three numbers of them.

    For attention that widens the whole pool that it is given (`Attention.widens_pool`): it gets
    only the pages that a chunk reads.
    """
    tiles = shapes.tiles(shapes.chunks[-1])[-1]
    most = shapes.table_pages * (1 + shapes.pages_per_own_page)
    contexts = buckets(max(most, tiles), smallest=tiles, count=3)
    return dataclasses.replace(shapes, contexts=contexts)


def with_smaller_cache(shapes: Shapes, num_bytes: int, page_bytes: int) -> Shapes:
    """`shapes` with a cache that takes `num_bytes` less. Raises as `check_pages`."""
    num_pages = shapes.num_pages - -(-num_bytes // page_bytes)
    shapes = dataclasses.replace(shapes, num_pages=num_pages)
    return check_pages(shapes, shapes.table_pages * shapes.page_size, page_bytes)


def check_pages(shapes: Shapes, length: int, page_bytes: int) -> Shapes:
    """Return `shapes`. Raises `UsageError` if their cache cannot hold one prompt of `length`
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


def log_shapes(shapes: Shapes, plan: MemoryPlan) -> None:
    """Log the memory plan and the most drafts of a step, and warn of a cache that cannot hold an
    answer of the largest length, which may need more than a prompt (`check_fits`)."""
    tokens = shapes.dp_size * shapes.num_pages * shapes.page_size
    logger.info("%s, for %s tokens of KV cache", plan, f"{tokens:,}")
    if shapes.widths:
        logger.info("speculation: at most %d drafts of a sequence in a step", shapes.most_drafts)
    if shapes.num_pages < (1 + shapes.pages_per_own_page) * shapes.table_pages:
        own_pages = (shapes.num_pages - shapes.table_pages) // shapes.pages_per_own_page
        logger.warning(
            "the KV cache has room for one sequence of %d tokens only if at most %d of them keep "
            "their own upper keys and values: requests for more are refused",
            shapes.table_pages * shapes.page_size,
            own_pages * shapes.page_size,
        )


def _temporaries(config: Config, tokens: int) -> int:
    """Estimated bytes of the temporaries, before the compiler reports them: some hidden states and
    one layer's MLP in float32, and logits of some rows."""
    mlp = 3 * mlp_width(config) + config.num_experts_per_token * config.embed_dim
    return GIB // 2 + tokens * 4 * (4 * config.embed_dim + mlp) + 256 * 4 * config.vocab_size
