"""`python -m swiftkv_jax.train analyze`: the distance of each SwiftKV cut from the model before any
distillation.

For a choice of K (layers that keep their own keys and values) and g (layers that share one
projection) it shows the student's distance from the teacher on a text, and what the cut saves. The
student is the one that training starts from: in closed form, fitted to text that it is not measured
on. It recommends the cheapest cut within a budget, with a tap or prompt attention layers where they
pay, and the command that makes it. With no --model it analyses the demo model. Example:

    python -m swiftkv_jax.train analyze --model Llama-3.1-8B-Instruct --data chat.jsonl
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from ..cli.model_options import add_revision
from ..model.config import GENERATED_KV
from .arguments import add_dtype
from .recipe import Init, Recipe


def add_flags(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    flag(
        "--model",
        help="checkpoint to analyse: Hugging Face, Orbax, GGUF, or its name on the Hub (default: "
        "the demo model)",
    )
    add_revision(parser)
    flag(
        "--data",
        action="append",
        help="text, in the forms of training data; repeat to add more (demo: stdlib)",
    )
    flag(
        "--cuts",
        help="layers that keep their own keys and values: percentages of all layers, numbers of "
        "layers such as K=3, or `all` (default: from 37.5%% to 87.5%%, and those near the edge of "
        "the budget)",
    )
    flag(
        "--groups",
        default="1,2,4",
        help="upper layers that share one key/value cache, where they divide evenly (default: "
        "%(default)s)",
    )
    flag(
        "--generated-kv",
        choices=GENERATED_KV,
        help="measure students whose generated tokens take their keys and values from there "
        "(default: both; own without groups only)",
    )
    flag(
        "--exact-tail",
        type=int,
        metavar="W",
        help="last tokens of a prompt that keep their own too, with own (default: 64, or 0 where "
        "half of --max-length is no longer than that)",
    )
    flag(
        "--max-perplexity-loss",
        metavar="SHARE",
        help="recommend the cheapest cut that loses no more of the teacher's perplexity, such as "
        "2%% (default: 2%%, if --max-far-loss is not given either)",
    )
    flag(
        "--max-far-loss",
        type=float,
        metavar="NATS",
        help="the same for the tokens that depend on the far part of a row (default: "
        "0.15, if --max-perplexity-loss is not given either)",
    )
    flag(
        "--init",
        choices=get_args(Init),
        default=Recipe.init,
        help="start of the students, as in training (default: %(default)s)",
    )
    flag(
        "--calibration-tokens",
        type=int,
        metavar="N",
        help="tokens for --init closed-form, as far as the text goes (default: 64 per entry of "
        "the hidden state)",
    )
    flag(
        "--rows",
        type=int,
        default=16,
        help="packed rows of text to measure on (default: %(default)s)",
    )
    flag("--max-length", type=int, default=512, help="tokens in a row (default: %(default)s)")
    flag(
        "--prompt-length",
        type=int,
        help="length of the prompt for which prefill FLOPs are counted (default: 8192, "
        "or what the model has "
        "positions for)",
    )
    flag(
        "--mesh",
        default="1x1",
        help="devices, as in training: DATAxMODEL or named axes (default: %(default)s)",
    )
    add_dtype(parser)
    flag(
        "--output-dir",
        type=Path,
        help="where analysis.json, written after each student, and analysis.png go (default: "
        "runs/analyze-MODEL)",
    )
