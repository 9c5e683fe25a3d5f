"""`python -m swiftkv_jax.train calibrate`: a SwiftKV model in closed form, without training.

One pass of the teacher over some text, then least squares: the upper layers' keys and values from
the hidden state that enters the first of them, and for layers that share a cache the best basis for
both. Seconds for small models; `--dry-run` counts the operations of larger ones. Prints how well
each layer follows and the distance from the teacher on held-out text, beside that of a copy of the
teacher's projections. With no --model it calibrates the demo model. Example:

    python -m swiftkv_jax.train calibrate --model Llama-3.1-8B-Instruct --data chat.jsonl \\
        --eval-data held-out.jsonl --output-dir runs/8b

OUTPUT_DIR/model can be served, and distilled further by `train --model OUTPUT_DIR/model`. With
--keep-delta nothing is fitted: the model keeps its trained delta, and only its queries for shared
caches are scaled, for generated tokens that keep per-layer keys and values.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..cli.model_options import add_process_arguments, add_revision
from .arguments import add_dtype, add_max_length, add_max_unreadable_share
from .cut_arguments import add_cut
from .recipe import Recipe


def add_flags(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    flag(
        "--model",
        help="checkpoint: Hugging Face, Orbax, GGUF, or its name on the Hub (default: the demo "
        "model)",
    )
    add_revision(parser)
    flag(
        "--data",
        action="append",
        metavar="PATH[:WEIGHT]",
        help="text, in the forms of training data; repeat to mix (demo: stdlib)",
    )
    flag(
        "--eval-data",
        metavar="PATH",
        help="held-out text to measure on (default: rows of "
        "--data that are not fitted to; demo: stdlib's)",
    )
    flag("--output-dir", type=Path, help="model, record and prepared data (demo: runs/calibrate)")
    add_cut(parser, "fit to, measure with and export")
    flag(
        "--keep-delta",
        action="store_true",
        help="with --generated-kv own, for a trained model whose layers share caches: keep its "
        "delta, and scale its queries",
    )
    flag(
        "--calibration-tokens",
        type=int,
        metavar="N",
        help="(default: 256 per entry of the hidden state)",
    )
    add_max_length(parser)
    add_max_unreadable_share(parser)
    flag("--batch-size", type=int, help=f"rows at a time (default: {Recipe.batch_size})")
    flag("--eval-batches", type=int, help=f"of --eval-data (default: {Recipe.eval_batches})")
    flag("--seed", type=int, help="seed of the order of the data (default: 0)")
    flag("--mesh", default="1x1", metavar="DATAxMODEL", help="as in training (default: 1x1)")
    add_dtype(parser)
    add_process_arguments(parser)
    flag(
        "--dry-run",
        action="store_true",
        help="print tokens, memory of the devices and of the host, and operations, from "
        "config.json alone; --model may then be the name of a shape, such as llama-3.1-8b",
    )
    flag("--topology", metavar="NAME", help="with --dry-run: compile for h200:1, v5p:2x2x1, ...")
