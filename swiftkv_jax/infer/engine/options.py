"""The options of an engine. Imports no JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...errors import UsageError
from ...model.config import GENERATED_KV, NO_OWN, GeneratedKV

if TYPE_CHECKING:
    from ...model.cache import KVCacheDtype

MAX_DECODE_STEPS = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of an engine, with vLLM's names and meanings where it has them.

    Raises `UsageError` that names the option for a value out of range.
    """

    max_model_len: int | None = None
    """Most tokens of a sequence, prompt and new ones together; None is the model's
    `max_position_embeddings`."""
    max_num_seqs: int = 64
    """Sequences that decode together, on all devices."""
    max_num_batched_tokens: int | None = None
    """Tokens of a prefill chunk on each data-parallel shard. At most `decode_steps` chunks run
    before a decode call. A larger chunk delays decoding; with fewer than some hundreds of tokens a
    device's arithmetic is not fully used. None is 2048, on a CPU 512."""
    decode_steps: int = 8
    """Tokens that each sequence decodes in one call, and the largest number of prefill chunks
    before it. With fewer, tokens are returned sooner; with more, the host has less work."""
    single_step_rows: int | None = 0
    """Up to this many sequences, a call decodes one token of each, whatever `decode_steps` is: the
    host keeps up with few sequences, and their tokens are returned one by one. Such calls have
    separate programs. None is 32, on a CPU 0 for weights below 256 MiB."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """Format of the KV cache: "auto" (the weights' dtype), "float32", "bfloat16", "fp8" or
    "int8"."""
    kv_cache_memory: int | None = None
    """Bytes of KV cache on each device. None: the rest of `memory_utilization`; on a CPU, enough
    for `max_num_seqs` sequences of `max_model_len`, at most a quarter of the machine's memory."""
    memory_utilization: float = 0.9
    """Share of the device memory that JAX may use, for weights, cache and temporaries together. On
    a GPU JAX may use three quarters unless the environment variable XLA_CLIENT_MEM_FRACTION sets
    another share."""
    page_size: int = 128
    """Positions of a page. Prefixes are shared in whole pages. The device kernels take multiples of
    128."""
    reserve_tokens: int = 512
    """New tokens for which a sequence reserves pages at a time. When no page is left for the next
    ones, the request that came last is preempted: it returns to the queue, and later runs its
    prompt and its answer so far through prefill. Its output is unchanged. A request with several
    samples reserves all of its `max_tokens`. With a smaller number more sequences run at once."""
    enable_prefix_caching: bool = True
    """Keep the pages of prompts and answers for later requests that begin with the same tokens.
    Pages of tokens that keep their own keys and values are never shared."""
    generated_kv: GeneratedKV | None = None
    """Where a student's generated tokens, and a scored continuation, take their upper keys and
    values from; None is the model's `Config.generated_kv`. Has no effect on a teacher, whose tokens
    always have their own."""
    exact_tail: int | None = None
    """Tokens at a prompt's end that keep their own keys and values too; None is the model's."""
    scoring: bool = False
    """Compile the programs that a `ScoreRequest` needs."""
    structured_outputs: bool = False
    """Compile the programs that a request with a `grammar` needs."""
    decode_rows: tuple[int, ...] | None = None
    """Sizes of a decode call, ascending; None is `max_num_seqs` and eighths of it."""
    chunks: tuple[int, ...] | None = None
    """Sizes of a chunk, ascending; None is `max_num_batched_tokens` and an eighth of it."""
    one_size: bool = False
    """For an engine that serves one call: compile only the largest of the sizes that are None, and
    allocate no more KV cache than `max_num_seqs` sequences fill."""
    compiler_options: Mapping[str, str | int | float | bool] = dataclasses.field(
        default_factory=dict, hash=False
    )
    """XLA's options (fields of its `DebugOptions`) for all programs of the engine. A list is a
    string with commas. XLA may change any of them between versions."""

    def __post_init__(self):
        for name, value in self.compiler_options.items():
            if not isinstance(name, str) or not isinstance(value, str | int | float | bool):
                raise UsageError(
                    f"`compiler_options`: {name!r}={value!r} must be a name with a string, a "
                    f"number or a bool"
                )
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "decode_steps",
            "kv_cache_memory",
            "page_size",
            "reserve_tokens",
        ):
            value, least = getattr(self, name), 2 if name == "max_model_len" else 1
            if value is not None and (type(value) is not int or value < least):
                raise UsageError(f"`{name}`={value!r} must be a whole number from {least} up")
        if self.decode_steps > MAX_DECODE_STEPS:
            raise UsageError(
                f"`decode_steps`={self.decode_steps} must be at most {MAX_DECODE_STEPS}: a call "
                f"runs all of them, also for sequences that have ended"
            )
        rows = self.single_step_rows
        if rows is not None and (type(rows) is not int or rows < 0):
            raise UsageError(f"`single_step_rows`={rows!r} must be a whole number from 0 up")
        _check_generated_kv(self.generated_kv, self.exact_tail)
        if not 0 < self.memory_utilization <= 1:
            raise UsageError(
                f"`memory_utilization`={self.memory_utilization} must be above 0 and at most 1"
            )


def _check_generated_kv(generated_kv: object, exact_tail: object) -> None:
    """Raise `UsageError` unless these are values of the options of their names, or None."""
    if generated_kv not in (None, *GENERATED_KV):
        raise UsageError(f"`generated_kv`={generated_kv!r} is not one of {', '.join(GENERATED_KV)}")
    if exact_tail is None:
        return
    if type(exact_tail) is not int or not 0 <= exact_tail < NO_OWN:
        raise UsageError(f"`exact_tail`={exact_tail!r} must be a whole number from 0 to 2^30 - 1")
    if exact_tail and generated_kv == "boundary":
        raise UsageError(f"`exact_tail`={exact_tail} needs `generated_kv`=own")
