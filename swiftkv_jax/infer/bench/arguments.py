"""`python -m swiftkv_jax.infer bench MODE`: how fast it is, SwiftKV and its teacher side by side.

    prefill   prompts into the cache, nothing else running; and the time to the first token of one
              prompt alone
    decode    the time per output token of --batch rows of --input-len tokens
    offline   --num-prompts requests at once, continuous batching
    latency   requests that arrive at --request-rate: TTFT, TPOT, inter-token and end-to-end times

Every figure stands beside what the same devices reach in a large matrix product and a copy,
measured before and after. A model without weights will do:

    python -m swiftkv_jax.infer bench prefill --config llama-3.1-8b --load-format dummy \\
        --input-len 512,2k,8k -o result.json

The table goes to standard output, all raw numbers to -o. Prompts are random, and no two are the
same: nothing comes from the prefix cache. Both variants get the same prompts. They take turns,
first one then the other, where both fit into memory; otherwise they run one after the other.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from ...cli import token_count
from ...cli.fields import add_flags
from ...cli.model_options import ModelOptions
from ...plan.presets import PRESETS
from ..engine.options import EngineOptions
from .cells import MODES, STUDENT, TEACHER

VARIANTS = {"on": STUDENT, "off": TEACHER}
"""Values of --swiftkv, and the variants that they measure."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("mode", choices=MODES, help="what to measure: see above")
    add_flags(parser, ModelOptions)
    add = parser.add_argument_group(
        "what to measure", conflict_handler="resolve"
    ).add_argument  # its own --swiftkv
    add(
        "--swiftkv",
        type=_variants,
        default=None,
        metavar="on,off",
        help="which to measure (default: both)",
    )
    add(
        "--config",
        metavar="NAME",
        help=f"one of {', '.join(PRESETS)}, or a folder with a config.json; with --load-format "
        "dummy",
    )
    add(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="dummy: random weights, made on the device",
    )
    add(
        "--num-key-value-layers",
        type=int,
        metavar="K",
        help="cut the model here (default: its own cut, or half of its layers)",
    )
    add(
        "--key-value-group-size",
        type=int,
        metavar="G",
        help="upper layers that share keys and values (default: the model's, or 1)",
    )
    add(
        "--prompt-attention-layers",
        type=int,
        metavar="M",
        help="upper layers of which prompts run the attention (default: the model's, or 0)",
    )
    add(
        "--prompt-mlp-neurons",
        type=int,
        metavar="N",
        help="neurons of each of their MLPs that prompts run too (default: the model's, or 0)",
    )
    add(
        "--boundary-taps",
        type=int,
        choices=(0, 1),
        help="1: keys from a token's state and the one before (default: the model's, or 0)",
    )
    add(
        "--exact-head",
        type=int,
        choices=(0, 1),
        help="1: the first token of a prompt runs through all layers (default: the model's, or 0)",
    )
    add(
        "--input-len",
        type=_lengths,
        default=[512, 2048],
        metavar="N,...",
        help="tokens of a prompt (default: 512,2k)",
    )
    add(
        "--output-len",
        type=token_count,
        metavar="N",
        help="new tokens of each; not in prefill (default: 128)",
    )
    add(
        "--batch", type=_counts, metavar="N,...", help="prefill: prompts; decode: rows (default: 1)"
    )
    add(
        "--num-prompts",
        type=_count,
        metavar="N",
        help="offline and latency: requests (default: 64)",
    )
    add(
        "--request-rate",
        type=_rates,
        metavar="R,...",
        help="latency: requests a second, or inf (default: 1)",
    )
    add(
        "--max-concurrency",
        type=_count,
        metavar="N",
        help="latency: most requests inside at a time",
    )
    add(
        "--repetitions",
        "-r",
        type=_count,
        default=5,
        metavar="N",
        help="repetitions of every measurement (default: 5)",
    )
    add("--seed", type=_seed, default=0, help="seed of the prompts and arrivals (default: 0)")
    add(
        "--output",
        "-o",
        type=Path,
        metavar="JSON",
        help="every raw number, and what was measured where",
    )
    add("--plot", type=Path, metavar="PNG", help="chart of the table; needs matplotlib")
    add_flags(parser, EngineOptions)


def _variants(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(VARIANTS) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} must be on, off, or on,off")
    return [VARIANTS[name] for name in names]


def _lengths(text: str) -> list[int]:
    found = [token_count(part) for part in text.split(",")]
    if min(found) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: a prompt to measure has at least 2 tokens")
    return found


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 up")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = [math.nan]
    if not all(rate > 0 for rate in rates):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of requests a second, such as 0.5,2,inf"
        )
    return rates
