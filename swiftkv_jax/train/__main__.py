"""`python -m swiftkv_jax.train`: distil a SwiftKV delta.

With no --model it distils the demo model on the standard library's source. Example for a real
model, on eight GPUs:

    python -m swiftkv_jax.train --mesh fsdp=8 --model Llama-3.1-70B-Instruct \\
        --data chat.jsonl --output-dir runs/70b

The same command continues an interrupted run. --dry-run says beforehand what it takes and how long.
Also:

    python -m swiftkv_jax.train analyze ...    which cut to choose: undistilled divergence, FLOPs
                                               and KV bytes of each
    python -m swiftkv_jax.train calibrate ...  a model in closed form, without training
    python -m swiftkv_jax.train prepare ...    read, tokenise and pack the data once, for many runs
    python -m swiftkv_jax.train show FOLDER    look at prepared rows, targets marked
    python -m swiftkv_jax.train report RUN     the curves of a run, also while it goes on
"""

from __future__ import annotations

from .. import interrupts

if __name__ == "__main__":
    interrupts.install()  # before the imports that take a second

import argparse
import dataclasses
import importlib
import signal
import sys
from pathlib import Path
from typing import get_args

from .. import cli
from ..cli.devices import join_and_emulate, refuse_x64
from ..cli.model_options import add_process_arguments
from ..config import GENERATED_KV
from ..errors import UsageError
from ..mesh import parse_mesh
from ..pallas_kernels import IMPLEMENTATIONS
from ..presets import PRESETS
from .data.packing import LossMask, Padding
from .distill import HiddenLoss, LossAverage
from .metrics import parse_report_to
from .recipe import DEMO, RECIPES, Init, Recipe

# Arguments that are no fields of `Recipe`.
_NOT_IN_RECIPE = (
    "recipe",
    "dry_run",
    "topology",
    "coordinator_address",
    "num_processes",
    "process_id",
)


def parser() -> argparse.ArgumentParser:
    result = cli.ArgumentParser(
        prog=cli.prog("train"),
        description=cli.as_called(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flag = result.add_argument_group("model and data").add_argument
    flag(
        "--model",
        help="checkpoint to distil, Hugging Face or Orbax; with --dry-run also llama-3.1-8b, "
        "-70b, -405b (default: demo)",
    )
    flag(
        "--num-key-value-layers",
        type=int,
        metavar="K",
        help="layers that keep their own keys and values (default: half)",
    )
    flag(
        "--key-value-group-size",
        type=int,
        metavar="G",
        help="upper layers that share one key/value cache, AcrossKV (default: 1)",
    )
    flag(
        "--data",
        action="append",
        metavar="PATH[:WEIGHT]",
        help="JSONL (messages, prompt and completion, conversations or text), text files, "
        "Parquet, ArrayRecord, a Hugging Face dataset "
        "folder, a folder of such files, a prepared one, or `stdlib`; repeat to mix, by weight",
    )
    flag(
        "--generated-kv",
        choices=GENERATED_KV,
        help="train for, and export, generated tokens that keep upper keys and values of their own "
        "(default: as the model says)",
    )
    flag(
        "--exact-tail",
        type=int,
        metavar="W",
        help="with --generated-kv own: so do the last W tokens of a prompt (default: as the model)",
    )
    flag(
        "--init",
        choices=get_args(Init),
        help="start of a fresh delta: closed-form, least squares on --calibration-tokens of the "
        f"data; or copies of the teacher's projections (default: {Recipe.init})",
    )
    flag(
        "--calibration-tokens",
        type=int,
        metavar="N",
        help="tokens for --init closed-form (default: 256 per entry of the hidden state)",
    )
    flag("--eval-data", metavar="PATH", help="held-out data, in the same forms")
    flag(
        "--max-length",
        type=int,
        help=f"tokens in a packed row (default: {Recipe.max_length}; demo: {DEMO.max_length})",
    )
    flag(
        "--max-unreadable-share",
        type=float,
        help=f"share of a source's rows; more stop the run "
        f"(default: {Recipe.max_unreadable_share:g})",
    )
    flag(
        "--output-dir",
        type=Path,
        help=f"data, checkpoints, metrics, report and the exported model (demo: {DEMO.output_dir})",
    )

    machine = result.add_argument_group("machine")
    flag = machine.add_argument
    flag(
        "--mesh",
        metavar="DATAxMODEL",
        default="1x1",
        help="or data=2,fsdp=4,model=2; -1 is the rest; emulated on a CPU (default: 1x1)",
    )
    flag(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="dtype of the frozen weights (default: bfloat16 on accelerators, float32 on a CPU)",
    )
    flag(
        "--remat",
        choices=("none", "mlp", "layer"),
        help=f"what is computed again backward ({Recipe.remat}; demo: none)",
    )
    flag(
        "--shard-sequence",
        action="store_true",
        default=None,
        help="split kept activations along the sequence over model, for long rows",
    )
    flag(
        "--attention",
        choices=IMPLEMENTATIONS,
        help="implementation of attention (default: the one for the device)",
    )
    add_process_arguments(machine)
    flag(
        "--dry-run",
        action="store_true",
        help="print memory per device, time and the reasons, from config.json alone",
    )
    flag(
        "--topology",
        metavar="NAME",
        help="with --dry-run: compile for h100:8, h200:1, v5p:2x2x1, v6e:4x4, ... without having "
        "it",
    )

    flag = result.add_argument_group("optimisation").add_argument
    flag(
        "--batch-size",
        type=int,
        help=f"rows in an optimiser step, over all devices (default: {Recipe.batch_size})",
    )
    flag(
        "--gradient-accumulation-steps",
        type=int,
        help="micro-batches that a step is divided into (default: 1)",
    )
    flag(
        "--max-steps",
        type=int,
        help=f"optimiser steps (default: --num-train-epochs; demo: {DEMO.max_steps})",
    )
    flag("--num-train-epochs", type=int, help="passes over the data (default: 1)")
    flag(
        "--learning-rate",
        type=float,
        help=f"peak (default: {Recipe.learning_rate:g}; demo: {DEMO.learning_rate:g})",
    )
    flag(
        "--lr-schedule",
        choices=("linear", "cosine", "constant"),
        help=f"after the warm-up (default: {Recipe.lr_schedule})",
    )
    flag(
        "--warmup-ratio",
        type=float,
        help=f"share of the steps that warm up (default: {Recipe.warmup_ratio})",
    )
    flag(
        "--max-grad-norm",
        type=float,
        help=f"longer gradients are scaled down (default: {Recipe.max_grad_norm:g})",
    )
    flag("--seed", type=int, help=f"seed of the data order (default: {Recipe.seed})")

    flag = result.add_argument_group("loss").add_argument
    flag(
        "--recipe",
        choices=tuple(RECIPES),
        help="authors: start and losses as in the authors' trainer, also on data with masked "
        "prompts: --init authors --loss-average positions --loss-mask unshifted --padding joined "
        "--hidden-loss absolute --hidden-loss-weight 1",
    )
    flag(
        "--temperature",
        type=float,
        help=f"temperature of both softmaxes (default: {Recipe.temperature:g})",
    )
    flag(
        "--kl",
        choices=("forward", "reverse", "jsd"),
        help=f"divergence of student and teacher (default: {Recipe.kl})",
    )
    flag(
        "--kl-top-k",
        type=int,
        metavar="K",
        help="compare the teacher's K likeliest tokens only (default: all)",
    )
    flag(
        "--hidden-loss-weight",
        type=float,
        help=f"weight of the hidden-state error (default: {Recipe.hidden_loss_weight:g})",
    )
    flag(
        "--hidden-loss",
        choices=get_args(HiddenLoss),
        help="hidden-state error of a token relative to the teacher's mean square, or as it is "
        f"(default: {Recipe.hidden_loss})",
    )
    flag(
        "--hidden-loss-layer",
        type=int,
        help=f"hidden state compared, as Hugging Face counts (default: {Recipe.hidden_loss_layer})",
    )
    flag(
        "--loss-average",
        choices=get_args(LossAverage),
        help="what the KL of a step is divided by: its predicted targets, or all its positions "
        f"(default: {Recipe.loss_average})",
    )
    flag(
        "--loss-mask",
        choices=get_args(LossMask),
        help="predictions that count: those of targets, or with unshifted those at targets "
        f"(default: {Recipe.loss_mask})",
    )
    flag(
        "--padding",
        choices=get_args(Padding),
        help="the end of a row that no document fills: counted nowhere, or joined to the last "
        f"document (default: {Recipe.padding})",
    )

    flag = result.add_argument_group("checkpoints and reports").add_argument
    flag(
        "--resume",
        type=_resume,
        metavar="WHEN",
        help=f"auto, must, never, or a step to continue from (default: {Recipe.resume})",
    )
    flag(
        "--save-steps",
        type=int,
        help=f"steps between checkpoints (default: {Recipe.save_steps}; demo: {DEMO.save_steps})",
    )
    flag(
        "--save-total-limit",
        type=int,
        help=f"newest checkpoints kept, besides the best (default: {Recipe.save_total_limit})",
    )
    flag(
        "--logging-steps", type=int, help=f"steps between metrics (default: {Recipe.logging_steps})"
    )
    flag(
        "--report-to",
        metavar="SINKS",
        help="jsonl (always), tensorboard, wandb; separated by commas",
    )
    flag("--profile-steps", metavar="FIRST:LAST", help="trace these steps into OUTPUT_DIR/profile")
    flag(
        "--eval-steps",
        type=int,
        help="steps between evaluations on --eval-data (default: before the first and after the "
        "last step)",
    )
    flag(
        "--eval-batches",
        type=int,
        help=f"batches of --eval-data used (default: {Recipe.eval_batches})",
    )
    flag(
        "--early-stopping-patience",
        type=int,
        metavar="N",
        help="stop after N evaluations without a lower held-out loss",
    )
    flag(
        "--load-best-model-at-end",
        action="store_true",
        default=None,
        help="export the state of the lowest held-out loss, not the last",
    )
    return result


def _resume(text: str) -> str | int:
    if text in ("auto", "must", "never"):
        return text
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r}: choose auto, must, never, or a step")


def recipe_from(args: argparse.Namespace) -> Recipe:
    """The arguments given, over those of --recipe, over the demo's defaults or the general ones.
    Raises `UsageError`."""
    given = RECIPES.get(args.recipe, {}) | {
        name: value
        for name, value in vars(args).items()
        if value is not None and name not in _NOT_IN_RECIPE
    }
    given["mesh"] = parse_mesh(args.mesh)
    if args.data is not None:
        given["data"] = tuple(args.data)
    if args.report_to is not None:
        given["report_to"] = parse_report_to(args.report_to)
    if args.model is None:
        if args.data is not None and args.eval_data is None:
            given["eval_data"] = None  # the demo's held-out text belongs to the demo's data
        return dataclasses.replace(DEMO, **given)
    if args.dry_run:  # needs the model's config only
        given = {"data": (), "output_dir": Path("."), **given}
    elif args.model in PRESETS and not Path(args.model).exists():
        raise UsageError(
            f"`model`={args.model}: the name of a shape, for `dry_run` only; a run needs a "
            f"checkpoint directory"
        )
    elif missing := [f"`{name}`" for name in ("data", "output_dir") if getattr(args, name) is None]:
        raise UsageError(f"`model` also needs {' and '.join(missing)}")
    return Recipe(**given)


_COMMANDS = {  # first argument: module and function
    "analyze": ("analyze", "main"),
    "calibrate": ("calibrate", "main"),
    "prepare": ("data.commands", "prepare_main"),
    "show": ("data.commands", "show_main"),
    "report": ("report", "main"),
}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in _COMMANDS:
        module, function = _COMMANDS[argv[0]]
        return getattr(importlib.import_module(f".{module}", __package__), function)(argv[1:])
    flags = parser()
    args = flags.parse_args(argv)

    def command() -> int:
        recipe = recipe_from(args)
        if args.topology and not args.dry_run:
            raise UsageError("`topology` goes with `dry_run`: a run uses the devices that are here")
        if args.dry_run:
            from . import plan

            return plan.main(recipe, args.topology)
        refuse_x64()
        join_and_emulate(recipe.mesh, args.coordinator_address, args.num_processes, args.process_id)
        from . import loop  # after the devices are set up: Orbax and Grain look at them

        result = loop.run(recipe)
        # SIGTERM is an orderly end; Ctrl-C is reported as an interruption.
        return cli.INTERRUPTED if result.stopped_by == signal.SIGINT else cli.OK

    return cli.run(command, flags)


if __name__ == "__main__":
    cli.end(main())
