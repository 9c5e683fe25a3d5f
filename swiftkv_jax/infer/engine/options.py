"""What a user of the engine chooses, and what follows from it for the shapes that are compiled."""

from __future__ import annotations

import dataclasses

from ...cache import KVCacheDtype
from ...config import Config
from ...errors import OutOfMemoryError, UsageError
from ...hardware import GIB
from ..runner.memory import host_memory
from ..runner.shapes import Shapes, buckets

MAX_DECODE_STEPS = 128
CPU_CACHE_SHARE = 0.25
"""Of a machine's memory, for the cache, where the device does not say what it has."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Names and meanings are vLLM's where it has them. Raises `UsageError` that names the flag."""

    max_model_len: int | None = None
    """Most tokens of a row, prompt and new ones; None is all the positions the model was made
    for."""
    max_num_seqs: int = 64
    """Rows that decode together; with rows split over devices, on all of them together."""
    max_num_batched_tokens: int | None = None
    """Tokens of a chunk of prefill, on each device that holds rows: how long decoding may have to
    wait, and below some hundreds how far prefill falls short of the device's arithmetic. None is
    2048, on a CPU 512."""
    decode_steps: int = 8
    """Tokens that each row decodes in one call: fewer come out sooner, more spare the host."""
    kv_cache_dtype: KVCacheDtype = "auto"
    kv_cache_memory: int | None = None
    """Bytes on each device. None is what is left of `memory_utilization`; on a CPU, what
    `max_num_seqs` rows of `max_model_len` can fill, at most a quarter of the machine's memory."""
    memory_utilization: float = 0.9
    """Share of what JAX may use of a device's memory, for weights, cache and temporaries together.
    On a GPU that is three quarters unless the environment's XLA_CLIENT_MEM_FRACTION says otherwise;
    the commands make it 0.95."""
    page_size: int = 128
    """Positions of a page: what is shared of a prefix is whole pages. The device kernels take
    multiples of 128."""
    enable_prefix_caching: bool = True
    scoring: bool = False
    """Compile what `ScoreRequest` needs."""
    decode_rows: tuple[int, ...] | None = None
    """Sizes of a decode call, ascending; None is `max_num_seqs` and eighths of it."""
    chunks: tuple[int, ...] | None = None
    """Sizes of a chunk, ascending; None is `max_num_batched_tokens` and an eighth of it."""
    one_size: bool = False
    """Of the sizes that are None, only the largest: quick to prepare, for an engine that is not
    kept."""

    def __post_init__(self):
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "decode_steps",
            "kv_cache_memory",
            "page_size",
        ):
            value, least = getattr(self, name), 2 if name == "max_model_len" else 1
            if value is not None and (type(value) is not int or value < least):
                raise UsageError(
                    f"--{name.replace('_', '-')} {value!r} must be a whole number from {least} up"
                )
        if self.decode_steps > MAX_DECODE_STEPS:
            raise UsageError(
                f"--decode-steps {self.decode_steps} must be at most {MAX_DECODE_STEPS}: a call "
                f"runs them all, whoever ends"
            )
        if not 0 < self.memory_utilization <= 1:
            raise UsageError(
                f"--memory-utilization {self.memory_utilization} must be above 0 and at most 1"
            )


def choose_shapes(
    config: Config,
    options: EngineOptions,
    *,
    lanes: int,
    platform: str,
    page_bytes: int,
    weight_bytes: int,
    memory_limit: int | None,
    quantized: bool,
) -> Shapes:
    """The shapes for these options. `page_bytes` is a page of all layers, on one device;
    `memory_limit` what may be used there.

    Raises `UsageError` if the cache cannot hold one row of `max_model_len`.
    """
    positions = config.max_position_embeddings
    length = positions if options.max_model_len is None else options.max_model_len
    if length > positions:
        raise UsageError(
            f"--max-model-len {length} must be from 2 to the model's {positions} positions"
        )
    size, slots = options.page_size, -(-options.max_num_seqs // lanes)
    table_pages = -(-length // size)
    tokens = options.max_num_batched_tokens or (512 if platform == "cpu" else 2048)
    count, whole = (1 if options.one_size else 2), max(16, 1 << (length - 1).bit_length())
    chunks = options.chunks or buckets(min(tokens, whole), smallest=16, count=count)
    spare = 4 if platform == "cpu" else 32
    most_context = max(table_pages, -(-chunks[-1] // size) + spare)
    contexts = (
        buckets(most_context, smallest=-(-chunks[-1] // size) + spare, count=3)
        if quantized
        else (None,)
    )

    decode_rows = options.decode_rows or buckets(slots, smallest=1, count=count**2)
    if decode_rows[-1] != slots or any(
        sorted(set(sizes)) != list(sizes) for sizes in (chunks, decode_rows)
    ):
        raise UsageError(
            f"{chunks=} and {decode_rows=} must be ascending, and the last of decode_rows the "
            f"{slots} rows of each device"
        )
    if options.kv_cache_memory is not None:
        pages = options.kv_cache_memory // page_bytes
        has = host_memory() if memory_limit is None else memory_limit
        if options.kv_cache_memory + weight_bytes > has:
            raise OutOfMemoryError(
                f"--kv-cache-memory {options.kv_cache_memory / GIB:.2f} GiB and "
                f"{weight_bytes / GIB:.2f} GiB of weights are more than the "
                f"{has / GIB:.2f} GiB that may be used"
            )
    elif memory_limit is not None:
        pages = (memory_limit - weight_bytes - _reserve(config, chunks[-1])) // page_bytes
    else:
        pages = min(
            slots * table_pages,
            max(table_pages, int(CPU_CACHE_SHARE * host_memory()) // page_bytes),
        )
    return check_pages(
        Shapes(
            lanes=lanes,
            page_size=size,
            num_pages=pages,
            table_pages=table_pages,
            slots=slots,
            decode_rows=decode_rows,
            decode_steps=options.decode_steps,
            chunks=chunks,
            spare_pieces=spare,
            contexts=contexts,
            scoring=options.scoring,
        ),
        length,
        page_bytes,
    )


def check_pages(shapes: Shapes, length: int, page_bytes: int) -> Shapes:
    """`shapes`. Raises `UsageError` if their cache cannot hold one row of `length` tokens."""
    if shapes.num_pages < shapes.table_pages:
        raise UsageError(
            f"the KV cache has room for {max(shapes.num_pages, 0) * shapes.page_size} tokens, too "
            f"little for one row of --max-model-len "
            f"{length} ({shapes.table_pages * page_bytes / GIB:.2f} GiB): raise --kv-cache-memory "
            f"or --memory-utilization, lower "
            "--max-model-len, or store it in 8 bits with --kv-cache-dtype fp8"
        )
    return shapes


def _reserve(config: Config, tokens: int) -> int:
    """A first guess at the temporaries, before the compiler has been asked: some hidden states and
    one layer's MLP in float32, and logits of some rows."""
    return (
        GIB // 2
        + tokens * 4 * (4 * config.embed_dim + 3 * config.mlp_dim)
        + 256 * 4 * config.vocab_size
    )
