"""`python -m swiftkv_jax.train`: distil a SwiftKV delta.

With no --model it distils the demo model on the standard library's source. Example for a real model:

    python -m swiftkv_jax.train --mesh 8x1 --model llama-3.1-8b-instruct --data chat.jsonl --output-dir runs/8b
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from pathlib import Path

from ..cli import run
from ..errors import UsageError
from ..pallas_kernels import IMPLEMENTATIONS
from ..sharding import emulate_cpu_devices, parse_mesh
from .recipe import DEMO, Recipe


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m swiftkv_jax.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag = result.add_argument
    flag("--mesh", metavar="DATAxMODEL", default="1x1", help="devices over rows x devices over heads and widths; emulated on a CPU")
    flag("--model", help="checkpoint to distil, Hugging Face or Orbax (default: the demo model)")
    flag("--data", action="append", help="JSONL with `messages` or `text` rows, a text file, a folder, or `stdlib`; repeat to add more")
    flag("--eval-data", help="held-out data, in the same forms")
    flag("--output-dir", type=Path, help=f"checkpoints, metrics and the exported model (demo: {DEMO.output_dir})")
    flag("--num-key-value-layers", type=int, help="layers that keep their own keys and values (default: half)")
    flag("--key-value-group-size", type=int, help="upper layers that share one key/value cache, AcrossKV (default: 1)")
    flag("--max-length", type=int, help=f"tokens in a packed row (default: {Recipe.max_length}; demo: {DEMO.max_length})")
    flag("--batch-size", type=int, help=f"rows in a step, over all devices (default: {Recipe.batch_size})")
    flag("--max-steps", type=int, help=f"optimiser steps (default: one pass over the data; demo: {DEMO.max_steps})")
    flag("--learning-rate", type=float, help=f"peak (default: {Recipe.learning_rate:g}; demo: {DEMO.learning_rate:g})")
    flag("--warmup-ratio", type=float, help=f"share of the steps that warm up; then linear to 0 (default: {Recipe.warmup_ratio})")
    flag("--temperature", type=float, help=f"of both softmaxes in the KL (default: {Recipe.temperature:g})")
    flag("--hidden-loss-weight", type=float, help=f"of the hidden-state error (default: {Recipe.hidden_loss_weight:g})")
    flag("--hidden-loss-layer", type=int, help=f"hidden state compared, as Hugging Face counts (default: {Recipe.hidden_loss_layer})")
    flag("--dtype", choices=("float32", "bfloat16"), help="of the frozen weights (default: bfloat16 on accelerators, float32 on a CPU)")
    flag("--remat", action=argparse.BooleanOptionalAction, help="recompute activations instead of keeping them (default: yes; demo: no)")
    flag("--attention", choices=IMPLEMENTATIONS, help="implementation of attention (default: the one for the device)")
    flag("--seed", type=int, help=f"of the data order (default: {Recipe.seed})")
    flag("--save-steps", type=int, help=f"steps between checkpoints (default: {Recipe.save_steps}; demo: {DEMO.save_steps})")
    flag("--save-total-limit", type=int, help=f"checkpoints kept (default: {Recipe.save_total_limit})")
    flag("--logging-steps", type=int, help=f"steps between metrics (default: {Recipe.logging_steps})")
    flag("--eval-batches", type=int, help=f"batches of --eval-data used (default: {Recipe.eval_batches})")
    flag("--resume", choices=("auto", "must", "never"), help=f"what to do with checkpoints in --output-dir (default: {Recipe.resume})")
    return result


def recipe_from(args: argparse.Namespace) -> Recipe:
    """The flags given, over the demo's defaults or the general ones. Raises `UsageError`."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    given["mesh"] = parse_mesh(args.mesh)
    if args.data is not None:
        given["data"] = tuple(args.data)
    if args.model is None:
        if args.data is not None and args.eval_data is None:
            given["eval_data"] = None  # the demo's held-out text belongs to the demo's data
        return dataclasses.replace(DEMO, **given)
    if missing := [flag for flag, value in (("--data", args.data), ("--output-dir", args.output_dir)) if value is None]:
        raise UsageError(f"--model also needs {' and '.join(missing)}")
    return Recipe(**given)


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)

    def command() -> int:
        recipe = recipe_from(args)
        emulate_cpu_devices(math.prod(recipe.mesh))
        from . import loop  # after the devices are settled: Orbax and Grain look at them

        return loop.run(recipe)

    return run(command)


if __name__ == "__main__":
    sys.exit(main())
