"""The options of an engine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ...cli import parse_size, token_count
from ...cli.fields import check_options, option
from ...errors import UsageError
from ...model.config import GENERATED_KV, NO_OWN, GeneratedKV, KVCacheDtype
from ...model.speculator_config import refused_drafter
from .shadow_drafts import MAX_LOOKUP

MAX_DECODE_STEPS = 128
OFFLINE_PREFILL_CHUNKS = 32
"""`max_prefill_chunks` where all answers are awaited together."""
MAX_SPECULATIVE_TOKENS = 15
PrefixCacheForm = Literal["full", "boundary"]
"""Content of a page beyond the device: see `EngineOptions.prefix_cache_form`."""
METHODS = ("ngram", "ngram_gpu")
"""vLLM's names of drafts from a request's own text."""
SPECULATORS = ("mlp_speculator", "arctic")
"""vLLM's and ArcticInference's names of drafts by a speculator (`model.speculator`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Speculation of an engine, with vLLM's names.

    Raises `UsageError` for a value out of range.
    """

    num_speculative_tokens: int | None = None
    """Most drafts of a sequence in a step. Calls with many rows draft fewer. None: 15, or fewer
    where the decode kernels take fewer of the model."""
    prompt_lookup_min: int = 2
    """Fewest tokens at the end of a text that must have occurred in it before."""
    prompt_lookup_max: int = MAX_LOOKUP
    """Most tokens that are compared."""
    enable_adaptive_verification: bool = True
    """Permission to decode one token a step where more are not expected to pay, by the measured
    cost of a step and the share of drafts that were right."""
    model: str | None = None
    """Folder of a speculator, or its name on the Hub. It drafts where no match is as long as its
    drafts. None: drafts come from a request's own text alone."""
    enable_suffix_decoding: bool = True
    """Permission to draft from a request's own text too, beside a speculator."""

    def __post_init__(self):
        for name, least, most in (
            ("num_speculative_tokens", 1, MAX_SPECULATIVE_TOKENS),
            ("prompt_lookup_min", 1, MAX_LOOKUP),
            ("prompt_lookup_max", self.prompt_lookup_min, MAX_LOOKUP),
        ):
            value = getattr(self, name)
            if value is None and name == "num_speculative_tokens":
                continue
            if type(value) is not int or not least <= value <= most:
                raise UsageError(
                    f"`speculative_config.{name}`={value!r} must be a whole number from {least} to "
                    f"{most}",
                    option="speculative_config",
                )
        for name in ("enable_adaptive_verification", "enable_suffix_decoding"):
            if type(value := getattr(self, name)) is not bool:
                raise UsageError(
                    f"`speculative_config.{name}`={value!r} must be true or false",
                    option="speculative_config",
                )
        named = isinstance(self.model, str | Path) and str(self.model)
        if self.model is not None and not named:
            raise UsageError(
                f"`speculative_config.model`={self.model!r} must be the folder of a speculator, or "
                f"its name on the Hub",
                option="speculative_config",
            )
        if self.model is None and not self.enable_suffix_decoding:
            raise UsageError(
                "`speculative_config.enable_suffix_decoding`=False needs a `model` that drafts",
                option="speculative_config",
            )


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """The JSON object of `--speculative-config`, as vLLM takes it. Raises `UsageError`."""
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise UsageError(f"`speculative_config` is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise UsageError("`speculative_config` must be a JSON object")
    known_methods = (*METHODS, *SPECULATORS)
    method = fields.pop("method", SPECULATORS[0] if "model" in fields else METHODS[0])
    if method not in known_methods:
        reason = refused_drafter(str(method)) or f"is not one of {', '.join(known_methods)}"
        raise UsageError(f"`speculative_config.method`={method!r} {reason}")
    if (method in SPECULATORS) is not isinstance(fields.get("model"), str):
        needs = "needs `model`, its folder" if method in SPECULATORS else "goes without `model`"
        raise UsageError(f"`speculative_config.method`={method!r} {needs}")
    known = {field.name for field in dataclasses.fields(SpeculativeConfig)}
    if unknown := fields.keys() - known:
        raise UsageError(
            f"`speculative_config.{min(unknown)}` is not supported: the keys are method, "
            f"{', '.join(sorted(known))}"
        )
    return SpeculativeConfig(**fields)


def _server[T](default: T, help: str, **how: Any) -> T:
    """The field of an option for which only the server has a flag."""
    return option(default, help, scope="server", **how)


def parse_compiler_option(text: str) -> tuple[str, str | bool]:
    """`"NAME=VALUE"` -> (name, value): `true` and `false` are bools, the rest is left to XLA.
    Raises `UsageError`."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise UsageError(f"{text!r} is not NAME=VALUE")
    bools = {"true": True, "false": False}
    return name, bools.get(value.lower(), value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of an engine, with vLLM's names and meanings where it has them.

    Raises `UsageError` that names the option for a value out of range.
    """

    max_model_len: int | None = option(
        None,
        "most tokens of a sequence, prompt and answer together; 8k is 8192",
        metavar="N",
        names=("--max-model-len", "-c"),
        parse=token_count,
        at_least=2,
    )
    """None is the model's `max_position_embeddings`."""
    max_num_seqs: int = option(
        64,
        "sequences that decode together (default: %(default)s; of files on accelerators up to 256)",
        metavar="N",
        at_least=1,
    )
    """Number of sequences on all devices together."""
    max_num_batched_tokens: int | None = option(
        None,
        "tokens of a chunk of prefill (default: 2k; on a CPU 512)",
        metavar="N",
        parse=token_count,
        at_least=1,
    )
    """Number of tokens on each data-parallel shard. A larger chunk delays decoding; with fewer than
    some hundreds of tokens a device's arithmetic is not fully used."""
    max_prefill_chunks: int | None = option(None, at_least=1)
    """Most chunks of prefill before a decode call; None is the tokens that a sequence emits in the
    call. More fill more rows before each call, and delay the tokens of running sequences."""
    decode_steps: int = option(
        8,
        "tokens a sequence decodes in one call (default: %(default)s; 1 where text is printed "
        "as it comes)",
        metavar="N",
        at_least=1,
    )
    """Fewer return tokens sooner; more leave the host less work."""
    single_step_rows: int | None = option(
        0,
        "number of sequences up to which a call decodes one token each (default: %(default)s; "
        "in the server 32, on a CPU 0 for weights below 256 MiB)",
        metavar="N",
        at_least=0,
    )
    """The host keeps up with few sequences, and their tokens are returned one by one, whatever
    `decode_steps` is. Such calls have separate programs. None is the server's default."""
    kv_cache_dtype: KVCacheDtype = option(
        "auto",
        "fp8 and int8 hold twice the tokens of bfloat16 (default: the weights' type)",
        parse=lambda name: "fp8" if name == "fp8_e4m3" else name,
    )
    """"auto" is the weights' dtype."""
    kv_cache_memory: int | None = option(
        None,
        "size of the KV cache on each device, such as 24g (default: what is left)",
        metavar="SIZE",
        parse=parse_size,
        at_least=1,
    )
    """Bytes. None: the rest of `memory_utilization`; on a CPU, enough for `max_num_seqs` sequences
    of `max_model_len`, at most a quarter of the machine's memory."""
    memory_utilization: float = option(
        0.9,
        "share of the memory JAX may use, on a GPU 95 %% of it (default: %(default)s)",
        metavar="SHARE",
        names=("--memory-utilization", "--gpu-memory-utilization"),
    )
    """For weights, cache and temporaries together. On a GPU JAX may use three quarters unless the
    environment variable XLA_CLIENT_MEM_FRACTION sets another share."""
    page_size: int = option(
        128,
        "positions in a page of the KV cache (default: %(default)s)",
        metavar="N",
        names=("--page-size", "--block-size"),
        at_least=1,
    )
    """Prefixes are shared in whole pages. The device kernels take multiples of 128."""
    reserve_tokens: int = option(
        512,
        "new tokens for which a sequence gets pages at a time (default: %(default)s)",
        metavar="N",
        parse=token_count,
        at_least=1,
    )
    """Number of new tokens that get pages at a time. When no page is left for the next ones, the
    request that came last is preempted: it returns to the queue, and later runs its prompt and its
    answer so far through prefill. Its output is unchanged. A request with several samples reserves
    all of its `max_tokens`. With a smaller number more sequences run at once."""
    enable_prefix_caching: bool = option(
        True,
        "reuse the cache of prompts that begin with the same tokens (default: yes)",
        names=("--enable-prefix-caching", "--prefix-caching"),
    )
    """Pages of tokens that keep their own keys and values are never shared."""
    generated_kv: GeneratedKV | None = option(
        None,
        "own: generated tokens keep each upper layer's own keys and values (default: the "
        "checkpoint's, or boundary)",
    )
    """Source of the upper keys and values of generated tokens, and of a scored continuation. It has
    no effect on a teacher, whose tokens always have their own."""
    exact_tail: int | None = option(
        None,
        "with own: also the last N tokens of a prompt (default: the checkpoint's, or 0)",
        metavar="N",
        parse=token_count,
    )
    quantize_activations: bool = option(
        False,
        "with int8 weights: multiply int8 by int8, with activations in 8 bits too; for TPU v5e "
        "and v5p (default: no)",
    )
    """Each token's by its own largest magnitude. fp8 weights have no such option: the device
    decides."""
    speculative: SpeculativeConfig | None = option(
        None,
        "several tokens a step where the answer repeats its prompt, and the same ones; "
        '{} or {"num_speculative_tokens": 7} as vLLM takes it, with the method ngram; with '
        '{"model": DIR} also where a speculator is right, methods arctic and mlp_speculator',
        metavar="JSON",
        names=("--speculative-config",),
        parse=parse_speculative_config,
    )
    """None decodes one token of a sequence in a step."""
    prefix_cache_host: int | None = _server(
        None,
        "host memory for pages that leave the prefix cache, such as 8g (default: none)",
        metavar="SIZE",
        parse=parse_size,
        at_least=1,
    )
    """Bytes of host memory for pages that the prefix cache has no room for on the device. They are
    loaded again where a prompt begins with their tokens. None: they are lost."""
    prefix_cache_dir: Path | None = _server(
        None,
        "folder for files of these pages, which a later server finds",
        metavar="DIR",
    )
    """Folder, of this engine alone, for files of these pages, which later engines find. None: there
    are no files."""
    prefix_cache_disk: int | None = _server(
        None,
        "size of those files together, such as 20g",
        metavar="SIZE",
        parse=parse_size,
        at_least=1,
    )
    """Bytes that these files may take."""
    prefix_cache_form: PrefixCacheForm = _server(
        "full",
        "boundary: these pages hold one hidden state of a token in the place of its upper keys "
        "and values, which are made of it again (default: %(default)s)",
    )
    """Pages of the form `boundary` are smaller in host memory, on disk and on the bus. On the
    device the cache has the state too, and what is made again is equal up to rounding."""
    enable_lora: bool = _server(False, "keep places for LoRA adapters")
    """Keep places for LoRA adapters (`Engine.adapters`), of which each request names one or none:
    `max_loras` of `max_lora_rank`."""
    lora_upper_only: bool = _server(
        False,
        "refuse adapters that change keys or values of prompts, so that all share one prefix cache "
        "and cost prefill nothing",
    )
    max_loras: int = _server(4, "adapters at once (default: %(default)s)", metavar="N", at_least=1)
    max_lora_rank: int = _server(
        16, "largest rank of one (default: %(default)s)", metavar="N", at_least=1
    )
    scoring: bool = _server(
        False,
        "log-probabilities of prompts: /v1/score, prompt_logprobs, and echo with logprobs",
        names=("--enable-scoring",),
    )
    """Compile the programs that a `ScoreRequest` needs."""
    sampling: bool = True
    """Compile the programs that requests need unless they are plain greedy
    (`SamplingParams.is_plain_greedy`)."""
    structured_outputs: bool = _server(
        False,
        "no grammars, JSON schemas and forced tool calls, and fewer programs to compile",
        names=("--no-structured-outputs",),
    )
    """Compile the programs that a request with a `grammar` needs."""
    decode_rows: tuple[int, ...] | None = None
    """Sizes of a decode call, ascending, of which the last is the slots of a data-parallel shard;
    None chooses them for the device."""
    chunks: tuple[int, ...] | None = None
    """Sizes of a chunk, ascending, in the place of `max_num_batched_tokens`; None chooses them for
    the device."""
    one_size: bool = False
    """For an engine that serves one call: compile only the largest of the sizes that are None, and
    that of as many of the longest sequences as the KV cache holds, and allocate no more of it than
    `max_num_seqs` sequences fill."""
    compiler_options: Mapping[str, str | int | float | bool] = option(
        {},
        "option of XLA for all programs, like xla_gpu_graph_min_graph_size=1; repeatable",
        metavar="NAME=VALUE",
        names=("--compiler-option",),
        parse=parse_compiler_option,
    )
    """Fields of XLA's `DebugOptions`. A list is a string with commas. XLA may change any of them
    between versions."""

    def __post_init__(self):
        check_options(self)
        for name, value in self.compiler_options.items():
            if not isinstance(name, str) or not isinstance(value, str | int | float | bool):
                raise UsageError(
                    f"`compiler_options`: {name!r}={value!r} must be a name with a string, a "
                    f"number or a bool",
                    option="compiler_options",
                )
        if self.decode_steps > MAX_DECODE_STEPS:
            raise UsageError(
                f"`decode_steps`={self.decode_steps} must be at most {MAX_DECODE_STEPS}: a call "
                f"runs all of them, also for sequences that have ended",
                option="decode_steps",
            )
        for name, needed in (
            ("prefix_cache_host", "enable_prefix_caching"),
            ("prefix_cache_dir", "prefix_cache_host"),
            ("prefix_cache_dir", "prefix_cache_disk"),
            ("prefix_cache_disk", "prefix_cache_dir"),
            ("prefix_cache_form", "prefix_cache_host"),
            ("lora_upper_only", "enable_lora"),
        ):
            if getattr(self, name) != getattr(EngineOptions, name) and not getattr(self, needed):
                raise UsageError(f"`{name}` needs `{needed}`", option=name)
        _check_generated_kv(self.generated_kv, self.exact_tail)
        for name in ("decode_rows", "chunks"):
            _check_sizes(name, getattr(self, name))
        if not 0 < self.memory_utilization <= 1:
            raise UsageError(
                f"`memory_utilization`={self.memory_utilization} must be a number above 0 and at "
                f"most 1",
                option="memory_utilization",
            )


def _check_sizes(name: str, sizes: Any) -> None:
    """Raise `UsageError` unless these are sizes of a call, ascending, or None."""
    if sizes is None:
        return
    numbers = isinstance(sizes, tuple | list) and all(type(size) is int for size in sizes)
    if not numbers or sorted({0, *sizes}) != [0, *sizes]:
        raise UsageError(
            f"`{name}`={sizes!r} must be ascending whole numbers from 1 up", option=name
        )


def _check_generated_kv(generated_kv: object, exact_tail: object) -> None:
    """Raise `UsageError` unless these are values of the options of their names, or None."""
    if generated_kv not in (None, *GENERATED_KV):
        raise UsageError(
            f"`generated_kv`={generated_kv!r} is not one of {', '.join(GENERATED_KV)}",
            option="generated_kv",
        )
    if exact_tail is None:
        return
    if type(exact_tail) is not int or not 0 <= exact_tail < NO_OWN:
        raise UsageError(
            f"`exact_tail`={exact_tail!r} must be a whole number from 0 to 2^30 - 1",
            option="exact_tail",
        )
    if exact_tail and generated_kv == "boundary":
        raise UsageError(f"`exact_tail`={exact_tail} needs `generated_kv`=own", option="exact_tail")
