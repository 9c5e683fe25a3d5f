"""Flags that the commands share, the model they name, and what the engine and the sampler are told.

A flag left out is None in the parsed arguments, so that what the checkpoint or the command prefers
can take its place.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from ... import cli, demo
from ...cache import FORMATS
from ...cli.devices import (
    DEFAULT_COMPILE_CACHE,
    enable_compilation_cache,
    parse_size,
    set_gpu_memory_fraction,
)
from ...distributed import check_all_take_part, join_processes
from ...errors import CheckpointError, UsageError
from ...mesh import emulate_cpu_devices, make_mesh, parse_mesh
from ...model import Model
from ...pallas_kernels import IMPLEMENTATIONS
from ..engine.engine import Engine, engine_for
from ..engine.options import EngineOptions
from ..engine.sampling_params import SamplingParams

SWIFTKV = {"auto": None, "on": True, "off": False}
GENERATION_CONFIG = "generation_config.json"
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What generation_config.json may say of sampling."""


def add_model_flags(parser: argparse.ArgumentParser, *, demo: bool = True) -> None:
    """The checkpoint, the devices, and how many processes share them. `demo`: the demo model will
    do."""
    flag, default = parser.add_argument, " (default: the demo model)" if demo else ""
    flag(
        "--model",
        "-m",
        type=Path,
        metavar="DIR",
        required=not demo,
        help=f"checkpoint, Hugging Face or Orbax{default}",
    )
    flag(
        "--swiftkv",
        choices=SWIFTKV,
        default="auto",
        help="off runs the unmodified teacher (default: on if the checkpoint has it)",
    )
    flag(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of weights and cache (default: bfloat16 on accelerators, float32 on a CPU)",
    )
    flag(
        "--quantization",
        choices=("none", "fp8", "int8"),
        help="of the layers' matrices, while they are read (default: as stored)",
    )
    flag(
        "--mesh",
        metavar="DATAxMODEL",
        default="1x1",
        help="devices over rows x devices over heads; on a CPU they are emulated",
    )
    flag(
        "--attention",
        choices=IMPLEMENTATIONS,
        help="implementation of attention (default: the one for the device)",
    )
    flag(
        "--coordinator-address",
        metavar="HOST:PORT",
        help="of process 0, where Slurm, Open MPI, Cloud TPU or Kubernetes do not say",
    )
    flag(
        "--num-processes",
        type=int,
        metavar="N",
        help="with --coordinator-address; all run the same command, process 0 writes",
    )
    flag("--process-id", type=int, metavar="I", help="with --coordinator-address")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Fields of `EngineOptions`."""
    flag = parser.add_argument
    flag(
        "--max-model-len",
        "-c",
        type=length,
        metavar="N",
        help="most tokens in a row, prompt and new ones; 8k is 8192",
    )
    flag("--max-num-seqs", type=int, metavar="N", help="rows that decode together (default: 64)")
    flag(
        "--max-num-batched-tokens",
        type=length,
        metavar="N",
        help="tokens of a chunk of prefill (default: 2k; on a CPU 512)",
    )
    flag(
        "--decode-steps",
        type=int,
        metavar="N",
        help="tokens a row decodes in one call (default: 8; 1 where text is printed as it comes)",
    )
    flag(
        "--kv-cache-dtype",
        choices=FORMATS,
        help="fp8 and int8 hold twice the tokens of bfloat16 (default: the weights' type)",
    )
    flag(
        "--kv-cache-memory",
        type=_size,
        metavar="SIZE",
        help="of the KV cache on each device, such as 24g (default: what is left)",
    )
    names = ("--memory-utilization", "--gpu-memory-utilization")
    flag(
        *names,
        type=float,
        metavar="SHARE",
        help="share of the memory JAX may use, on a GPU 95 %% of it (default: 0.9)",
    )
    flag(
        "--page-size",
        type=int,
        metavar="N",
        help="positions in a page of the KV cache (default: 128)",
    )
    action = argparse.BooleanOptionalAction
    flag(
        "--enable-prefix-caching",
        action=action,
        help="reuse what is cached of prompts that begin alike (default: yes)",
    )
    # Users of vLLM know the first half of this one, and write it short.
    flag(
        "--no-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        default=None,
        help="--no-enable-prefix-caching",
    )
    cache = DEFAULT_COMPILE_CACHE
    flag(
        "--compile-cache",
        metavar="DIR",
        default=cache,
        help=f"where compiled programs are kept, or none (default: {cache})",
    )


def add_sampling_flags(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Fields of `SamplingParams` but for those that give several results (`add_result_flags`)."""
    flag = parser.add_argument
    names = ("--max-tokens", "--max-new-tokens")
    flag(
        *names,
        type=int,
        default=max_tokens,
        metavar="N",
        help=f"most new tokens (default: {max_tokens})",
    )
    flag(
        "--min-tokens",
        type=int,
        metavar="N",
        help="no end token, and no stop string, before this many (default: 0)",
    )
    flag(
        "--temperature",
        "--temp",
        type=float,
        help=f"0 takes the likeliest token (default: {GENERATION_CONFIG}'s, or 0)",
    )
    flag("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens; 0 is off")
    flag(
        "--top-p",
        type=float,
        metavar="P",
        help="draw from the fewest tokens that hold probability P; 1 is off",
    )
    flag(
        "--min-p",
        type=float,
        metavar="P",
        help="draw from tokens at least P times as likely as the likeliest; 0 is off",
    )
    flag(
        "--repetition-penalty",
        "--repeat-penalty",
        type=float,
        metavar="R",
        help="of tokens in prompt or output; 1 is off",
    )
    flag("--presence-penalty", type=float, metavar="R", help="of tokens in the output; 0 is off")
    flag(
        "--frequency-penalty",
        type=float,
        metavar="R",
        help="of tokens in the output, each time; 0 is off",
    )
    flag(
        "--logit-bias",
        type=_bias,
        action="append",
        metavar="ID=VALUE",
        help="added to a token's logit; repeat to add more",
    )
    flag("--seed", type=int, help="of the draws (default: 0)")
    flag("--stop", action="append", metavar="TEXT", help="end before this text; repeat to add more")
    flag(
        "--stop-token-ids",
        type=_token_ids,
        metavar="ID,...",
        help="tokens that end the text as the model's own end tokens do",
    )
    flag("--ignore-eos", action="store_true", default=None, help="go on after an end token")


def add_result_flags(parser: argparse.ArgumentParser) -> None:
    """The fields of `SamplingParams` that `add_sampling_flags` leaves out."""
    flag = parser.add_argument
    flag("--n", type=int, metavar="N", help="samples of each prompt (default: 1)")
    flag(
        "--logprobs",
        type=int,
        metavar="K",
        help="log-probabilities of the tokens, and of the K likeliest (default: none)",
    )


def length(text: str) -> int:
    """`"8k"` -> 8192."""
    match = re.fullmatch(r"(\d{1,9})([kK]?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens, such as 4096 or 4k")
    return int(match[1]) * (1024 if match[2] else 1)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _bias(text: str) -> tuple[int, float]:
    match = re.fullmatch(r"(\d{1,9})=(.+)", text)
    try:
        return int(match[1]), float(match[2])  # type: ignore[index]
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=VALUE, such as 17=-100") from None


def _token_ids(text: str) -> list[int]:
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids, such as 2,13")
    return [int(token) for token in text.split(",")]


def engine_options(args: argparse.Namespace, **defaults: Any) -> EngineOptions:
    """The flags given, over the command's `defaults`, over those of `EngineOptions`. Raises
    `UsageError` that names the flag."""
    return EngineOptions(**(defaults | _given(EngineOptions, args)))


def sampling_params(args: argparse.Namespace, model: Model | None = None) -> SamplingParams:
    """The flags given, over what the model's generation_config.json says if it says `do_sample`,
    over greedy.

    Without a model only the flags count: enough to check them before weights are read. Raises
    `UsageError` that names the parameter, and `CheckpointError` for values in the file that cannot
    be.
    """
    given = _given(SamplingParams, args)
    if given.get("logit_bias") is not None:
        given["logit_bias"] = dict(given["logit_bias"])
    return SamplingParams(**(_checkpoint_sampling(model) | given))


def _given(fields: type, args: argparse.Namespace) -> dict[str, Any]:
    """The attributes of `args` that are fields of a dataclass, and not None."""
    names = (field.name for field in dataclasses.fields(fields))
    return {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}


def _checkpoint_sampling(model: Model | None) -> dict[str, Any]:
    if model is None or GENERATION_CONFIG not in model.auxiliary_files.contents:
        return {}
    config = json.loads(model.auxiliary_files.contents[GENERATION_CONFIG])
    if not config.get("do_sample"):
        return {}
    found: dict[str, Any] = {"temperature": 1.0} | {
        name: config[name] for name in SAMPLING_DEFAULTS if config.get(name) is not None
    }
    try:
        SamplingParams(**found)
    except UsageError as error:
        raise CheckpointError(f"{GENERATION_CONFIG}: {error}") from None
    log(
        f"sampling as {GENERATION_CONFIG} says, where flags do not: "
        + ", ".join(f"{name} {value}" for name, value in found.items())
    )
    return found


def writes() -> bool:
    """Whether this is the process that writes and prints. All of them must run the same
    requests."""
    return jax.process_index() == 0


def log(message: str) -> None:
    """`cli.log`, in one process only."""
    if writes():
        cli.log(message)


def settle_devices(args: argparse.Namespace) -> jax.sharding.Mesh | None:
    """Join the other processes, if any, and set up the compile cache and the mesh; before anything
    touches a device."""
    shape = parse_mesh(args.mesh)
    if shape.fsdp != 1:
        raise UsageError(
            f"--mesh {args.mesh}: fsdp is for training; inference keeps its weights whole, or "
            f"splits them over model"
        )
    set_gpu_memory_fraction()
    processes = join_processes(args.coordinator_address, args.num_processes, args.process_id)
    emulate_cpu_devices(math.prod(shape) // processes)
    if args.compile_cache != "none":
        enable_compilation_cache(args.compile_cache)
    if math.prod(shape) == 1 and jax.process_count() == 1:
        return None
    mesh = make_mesh(shape)
    check_all_take_part(mesh)
    return mesh


def load_model(
    args: argparse.Namespace, log: Callable[[str], None] = log
) -> tuple[Model, jax.sharding.Mesh | None]:
    """The checkpoint on its devices. Raises `UsageError` or `CheckpointError`."""
    mesh = settle_devices(args)
    path = args.model or demo.SWIFTKV
    if args.model is None and not (path / "config.json").exists():
        raise CheckpointError(
            f"the demo model is not in this installation ({path}): pass --model DIR"
        )
    from ...checkpoints import load  # after the devices are settled

    model = load(path, dtype=args.dtype, mesh=mesh, quantization=args.quantization)
    if args.swiftkv == "on" and model.swiftkv is None:
        raise UsageError(f"--swiftkv on: {path} has no SwiftKV weights")
    if args.swiftkv == "off" and model.llama.upper_qkv is None:
        raise UsageError(f"--swiftkv off: {path} has no teacher: its upper q, k, v were dropped")
    log(f"{path}: {describe(model, model.uses_swiftkv(SWIFTKV[args.swiftkv]))}")
    _check_tokenizer(model, path, log)
    return model, mesh


def start_engine(
    args: argparse.Namespace, model: Model, mesh: jax.sharding.Mesh | None, options: EngineOptions
) -> Engine:
    """An engine for the model, compiled and ready."""
    start = time.perf_counter()
    engine = engine_for(
        model,
        options,
        swiftkv=SWIFTKV[args.swiftkv],
        mesh=mesh,
        attention=args.attention,
        donate=True,
        log=log,
    )
    log(f"ready in {time.perf_counter() - start:.1f} s")
    return engine


def _check_tokenizer(model: Model, path: Path, log: Callable[[str], None]) -> None:
    """A vocabulary that the model does not have is another model's. Tokens added to it, such as one
    for padding that no prompt ever holds, are common, and work: a prompt that does hold one is
    refused by name."""
    if model.tokenizer is None:
        return
    base, whole, known = model.tokenizer.vocab_size, len(model.tokenizer), model.config.vocab_size
    if base > known:
        raise CheckpointError(
            f"{path}: the tokenizer has {base} tokens, the model {known}: these are files of "
            f"different models"
        )
    if whole > known:
        log(
            f"warning: {path}: the tokenizer adds {whole - known} tokens that the model does not "
            f"have; prompts with them are refused"
        )


def describe(model: Model, swiftkv: bool) -> str:
    config = model.config
    if swiftkv:
        mode = (
            f"SwiftKV, prompts run {config.num_lower_layers} of {config.num_layers} layers, "
            f"{config.num_cache_layers} layers of KV"
        )
    else:
        mode = (
            f"{'teacher' if model.swiftkv is not None else 'plain Llama'}, {config.num_layers} "
            f"layers"
        )
    weights = "" if model.quantization is None else f", {model.quantization}"
    return (
        f"{mode}; {model.dtype}{weights} on {jax.device_count()} x {jax.devices()[0].device_kind}"
    )
