"""Flags for `EngineOptions`; `start` makes the engine that they describe.

A flag left out is None in the parsed arguments, so that the default of the command or of
`EngineOptions` takes its place.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from typing import Any

from ...cli import parse_size
from ...errors import UsageError
from ...model.config import GENERATED_KV, KV_CACHE_DTYPES
from ..engine.options import EngineOptions


def add_engine_arguments(parser: argparse._ActionsContainer) -> None:
    """Add flags for the fields of `EngineOptions`."""
    add = parser.add_argument
    add(
        "--max-model-len",
        "-c",
        type=token_count,
        metavar="N",
        help="most tokens of a sequence, prompt and answer together; 8k is 8192",
    )
    add(
        "--max-num-seqs", type=int, metavar="N", help="sequences that decode together (default: 64)"
    )
    add(
        "--max-num-batched-tokens",
        type=token_count,
        metavar="N",
        help="tokens of a chunk of prefill (default: 2k; on a CPU 512)",
    )
    add(
        "--decode-steps",
        type=int,
        metavar="N",
        help="tokens a sequence decodes in one call (default: 8; 1 where text is "
        "printed as it comes)",
    )
    add(
        "--single-step-rows",
        type=int,
        metavar="N",
        help="number of sequences up to which a call decodes one token each "
        "(default: 0; in the server 32, on a CPU 0 for weights below 256 MiB)",
    )
    add(
        "--kv-cache-dtype",
        type=lambda name: "fp8" if name == "fp8_e4m3" else name,
        choices=KV_CACHE_DTYPES,
        help="fp8 and int8 hold twice the tokens of bfloat16 (default: the weights' type)",
    )
    add(
        "--kv-cache-memory",
        type=_size,
        metavar="SIZE",
        help="size of the KV cache on each device, such as 24g (default: what is left)",
    )
    names = ("--memory-utilization", "--gpu-memory-utilization")
    add(
        *names,
        type=float,
        metavar="SHARE",
        help="share of the memory JAX may use, on a GPU 95 %% of it (default: 0.9)",
    )
    add(
        "--page-size",
        "--block-size",
        type=int,
        metavar="N",
        help="positions in a page of the KV cache (default: 128)",
    )
    add(
        "--reserve-tokens",
        type=token_count,
        metavar="N",
        help="new tokens for which a sequence gets pages at a time (default: 512)",
    )
    action = argparse.BooleanOptionalAction
    add(
        "--enable-prefix-caching",
        action=action,
        help="reuse the cache of prompts that begin with the same tokens (default: yes)",
    )
    # Users of vLLM know the first half of this one, and write it short.
    add(
        "--no-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        default=None,
        help="--no-enable-prefix-caching",
    )
    add(
        "--generated-kv",
        choices=GENERATED_KV,
        help="own: generated tokens keep each upper layer's own keys and values (default: the "
        "checkpoint's, or boundary)",
    )
    add(
        "--exact-tail",
        type=token_count,
        metavar="N",
        help="with own: also the last N tokens of a prompt (default: the checkpoint's, or 0)",
    )
    add(
        "--compiler-option",
        dest="compiler_options",
        action=_AddCompilerOption,
        metavar="NAME=VALUE",
        help="option of XLA for all programs, like xla_gpu_graph_min_graph_size=1; repeatable",
    )


class _AddCompilerOption(argparse.Action):
    """Collects NAME=VALUE in a dictionary. `true` and `false` are bools, the rest is left to XLA.
    Raises what argparse reports."""

    def __call__(self, parser, namespace, values, option_string=None):
        name, equals, value = str(values).partition("=")
        if not (name and equals):
            raise argparse.ArgumentError(self, f"{values!r} is not NAME=VALUE")
        kept = getattr(namespace, self.dest) or {}
        bools = {"true": True, "false": False}
        setattr(namespace, self.dest, kept | {name: bools.get(value.lower(), value)})


def token_count(text: str) -> int:
    """Argument type: `"8k"` is 8192 tokens."""
    match = re.fullmatch(r"(\d{1,9})([kK]?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens, such as 4096 or 4k")
    return int(match[1]) * (1024 if match[2] else 1)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def given_engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of `EngineOptions` for which there was a flag."""
    return given_fields(EngineOptions, args)


def given_fields(cls: type, args: argparse.Namespace) -> dict[str, Any]:
    """Parsed arguments that are fields of the dataclass `cls`, and not None."""
    names = (field.name for field in dataclasses.fields(cls))
    return {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
