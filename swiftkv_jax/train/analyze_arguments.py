"""`python -m swiftkv_jax.train analyze`: the distance of each SwiftKV cut from the model before any
distillation.

For a choice of K (layers that keep their own keys and values) and g (layers that share one
projection) it shows the student's distance from the teacher on a text, and what the cut saves. The
student is the one that training starts from: in closed form, fitted to text that it is not measured
on. With no --model it analyses the demo model. Example:

    python -m swiftkv_jax.train analyze --model Llama-3.1-8B-Instruct --data chat.jsonl
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from ..cli.model_options import add_revision
from .arguments import add_dtype
from .recipe import TOKENS_PER_DIMENSION, Init, Recipe


def add_flags(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    flag(
        "--model",
        help="checkpoint to analyse, Hugging Face or Orbax, or its name on the Hub (default: the "
        "demo model)",
    )
    add_revision(parser)
    flag(
        "--data",
        action="append",
        help="text, in the forms of training data; repeat to add more (demo: stdlib)",
    )
    flag(
        "--cuts",
        default="25%,37.5%,50%,62.5%,75%",
        help="layers that keep their own keys and values: percentages of all layers, numbers of "
        "layers such as K=3, or `all` (default: %(default)s)",
    )
    flag(
        "--groups",
        default="1,2,4",
        help="upper layers that share one key/value cache, where they divide evenly (default: "
        "%(default)s)",
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
        help="tokens for --init closed-form, as far as the text goes (default: "
        f"{TOKENS_PER_DIMENSION} per entry of the hidden state)",
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
        help="where analysis.json and analysis.png go (default: runs/analyze-MODEL)",
    )
