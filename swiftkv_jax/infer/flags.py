"""Flags that the commands share, and the model they name."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

import jax

from .. import demo
from ..bundle import Model
from ..cli import log
from ..errors import CheckpointError, UsageError
from ..pallas_kernels import IMPLEMENTATIONS
from ..sharding import emulate_cpu_devices, make_mesh, parse_mesh
from .sampling import SamplingParams

SWIFTKV = {"auto": None, "on": True, "off": False}


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    flag("--model", "-m", type=Path, metavar="DIR", help="checkpoint, Hugging Face or Orbax (default: the demo model)")
    flag("--swiftkv", choices=SWIFTKV, default="auto", help="off runs the unmodified teacher (default: on if the checkpoint has it)")
    flag("--dtype", choices=("float32", "bfloat16"), help="of weights and cache (default: bfloat16 on accelerators, float32 on a CPU)")
    flag("--mesh", metavar="DATAxMODEL", default="1x1", help="devices over rows x devices over heads; on a CPU they are emulated")
    flag("--attention", choices=IMPLEMENTATIONS, help="implementation of attention (default: the one for the device)")
    flag("--max-model-len", "-c", type=length, metavar="N", help="most tokens in a row, prompt and new ones; 8k is 8192")


def add_sampling_flags(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    flag = parser.add_argument
    flag("--max-tokens", "-n", type=int, default=max_tokens, metavar="N", help=f"most new tokens (default: {max_tokens})")
    flag("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default: 0)")
    flag("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest tokens; 0 is off (default: 0)")
    flag("--top-p", type=float, default=1.0, metavar="P", help="draw from the fewest tokens that hold probability P (default: 1)")
    flag("--seed", type=int, default=0, help="of the draws (default: 0)")
    flag("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeat to add more")
    flag("--ignore-eos", action="store_true", help="go on after an end token")


def length(text: str) -> int:
    """`"8k"` -> 8192."""
    match = re.fullmatch(r"(\d{1,9})([kK]?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens, such as 4096 or 4k")
    return int(match[1]) * (1024 if match[2] else 1)


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Raises `UsageError` that names the flag."""
    if "" in args.stop:
        raise UsageError("--stop '': a stop string must have at least one character")
    return SamplingParams(args.max_tokens, args.temperature, args.top_k, args.top_p, args.seed, args.ignore_eos)


def load_model(args: argparse.Namespace) -> tuple[Model, jax.sharding.Mesh | None]:
    """The checkpoint on its devices. Raises `UsageError` or `CheckpointError`."""
    shape = parse_mesh(args.mesh)
    emulate_cpu_devices(math.prod(shape))
    if shape.fsdp != 1:
        raise UsageError(f"--mesh {args.mesh}: fsdp is for training; inference keeps its weights whole, or splits them over model")
    mesh = make_mesh(shape) if math.prod(shape) != 1 else None
    path = args.model or demo.SWIFTKV
    if args.model is None and not (path / "config.json").exists():
        raise CheckpointError(f"the demo model is not in this installation ({path}): pass --model DIR")
    from ..checkpoints import load  # after the devices are settled

    model = load(path, dtype=args.dtype, mesh=mesh)
    if args.swiftkv == "on" and model.swiftkv is None:
        raise UsageError(f"--swiftkv on: {path} has no SwiftKV weights")
    if args.swiftkv == "off" and model.llama.upper_qkv is None:
        raise UsageError(f"--swiftkv off: {path} has no teacher: its upper q, k, v were dropped")
    log(f"{path}: {describe(model, model.uses_swiftkv(SWIFTKV[args.swiftkv]))}")
    return model, mesh


def describe(model: Model, swiftkv: bool) -> str:
    config = model.config
    if swiftkv:
        mode = f"SwiftKV, prompts run {config.num_lower_layers} of {config.num_layers} layers, {config.num_cache_layers} layers of KV"
    else:
        mode = f"{'teacher' if model.swiftkv is not None else 'plain Llama'}, {config.num_layers} layers"
    return f"{mode}; {model.dtype} on {jax.device_count()} x {jax.devices()[0].device_kind}"
