"""Command-line arguments of training, by group; calibration and analysis share some of them."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any, get_args

from ..cli.model_options import add_process_arguments, add_revision
from ..errors import UsageError
from ..pallas_kernels import IMPLEMENTATIONS
from ..plan.presets import PRESETS
from .cut_arguments import add_cut
from .loss.objective import HiddenLoss, LossAverage, LossMask, Padding
from .recipe import DEMO, RECIPES, Init, Recipe

PROCESS_ARGUMENTS = "coordinator_address", "num_processes", "process_id"
"""Names of what `add_process_arguments` adds."""
NOT_IN_RECIPE = (
    *("recipe", "revision", "dry_run", "topology", "keep_delta"),
    *PROCESS_ARGUMENTS,
)
"""Names of arguments that are no fields of `Recipe`."""


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """All arguments of a training run, in groups."""
    add_model_and_data(parser.add_argument_group("model and data"))
    add_machine(parser.add_argument_group("machine"))
    add_optimisation(parser.add_argument_group("optimisation"))
    add_loss(parser.add_argument_group("loss"))
    add_checkpoints_and_reports(parser.add_argument_group("checkpoints and reports"))


def add_model_and_data(parser: argparse._ActionsContainer) -> None:
    """What is distilled, on which text, into which folder."""
    flag = parser.add_argument
    flag(
        "--model",
        help="checkpoint to distil: Hugging Face, Orbax, GGUF, or its name on the Hub; with "
        f"--dry-run also one of {', '.join(PRESETS)} (default: demo)",
    )
    add_revision(parser)
    add_cut(parser, "train for, and export,")
    flag(
        "--data",
        action="append",
        metavar="PATH[:WEIGHT]",
        help="JSONL, JSON, Parquet or ArrayRecord (rows of messages, prompt and completion, "
        "conversations, instruction and output, or text), text files, a Hugging Face dataset "
        "folder, a folder of such files, a pattern, a prepared folder, or `stdlib`; repeat to mix, "
        "by weight",
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
    add_max_length(parser)
    add_max_unreadable_share(parser)
    flag(
        "--output-dir",
        type=Path,
        help=f"data, checkpoints, metrics, report and the exported model (demo: {DEMO.output_dir})",
    )


def add_machine(parser: argparse._ActionsContainer) -> None:
    """The devices, how the work is divided over them, and the dry run."""
    flag = parser.add_argument
    flag(
        "--mesh",
        metavar="DATAxMODEL",
        default="1x1",
        help="or data=2,fsdp=4,model=2; -1 is the rest; emulated on a CPU (default: 1x1)",
    )
    add_dtype(parser, "frozen weights")
    flag(
        "--remat",
        choices=("none", "mlp", "layer"),
        help=f"what the backward pass recomputes ({Recipe.remat}; demo: none)",
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
    add_process_arguments(parser)
    flag(
        "--dry-run",
        action="store_true",
        help="print memory per device and predicted times, from the config alone",
    )
    flag(
        "--topology",
        metavar="NAME",
        help="with --dry-run: compile for h100:8, h200:1, v5p:2x2x1, v6e:4x4, ... without having "
        "it",
    )


def add_optimisation(parser: argparse._ActionsContainer) -> None:
    """The steps and the optimiser."""
    flag = parser.add_argument
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
        help=f"gradients with a larger norm are scaled down (default: {Recipe.max_grad_norm:g})",
    )
    flag("--seed", type=int, help=f"seed of the data order (default: {Recipe.seed})")


def add_loss(parser: argparse._ActionsContainer) -> None:
    """The distance between student and teacher that training lowers."""
    flag = parser.add_argument
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
        help="what the distillation loss of a step is divided by: its predicted targets, or all "
        f"its positions (default: {Recipe.loss_average})",
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


def add_checkpoints_and_reports(parser: argparse._ActionsContainer) -> None:
    """What is saved and measured during a run."""
    flag = parser.add_argument
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
        help=f"newest checkpoints kept, and the best (default: {Recipe.save_total_limit})",
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
        help=f"batches of --eval-data used, of --batch-size (default: {Recipe.eval_batches})",
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


# Shared with calibration and analysis -----------------------------------------


def add_max_length(parser: argparse._ActionsContainer) -> None:
    """The length of a packed row."""
    flag = parser.add_argument
    flag(
        "--max-length",
        type=int,
        help=f"tokens in a packed row (default: {Recipe.max_length}; demo: {DEMO.max_length})",
    )


def add_max_unreadable_share(parser: argparse._ActionsContainer) -> None:
    """How many rows may be unreadable."""
    parser.add_argument(
        "--max-unreadable-share",
        type=float,
        metavar="SHARE",
        help=f"share of unreadable rows in a source above which the command stops "
        f"(default: {Recipe.max_unreadable_share:g})",
    )


def add_dtype(parser: argparse._ActionsContainer, whose: str = "weights") -> None:
    """The dtype of the weights, which the help calls `whose`."""
    flag = parser.add_argument
    flag(
        "--dtype",
        choices=("float32", "bfloat16"),
        help=f"dtype of the {whose} (default: bfloat16 on accelerators, float32 on a CPU)",
    )


_NEEDED = {"data": "`data` (a path, or stdlib)", "output_dir": "`output_dir`"}
"""What a model that is not the demo's needs."""


def make_recipe(
    args: argparse.Namespace, given: dict[str, Any], *, demo: Recipe, command: str
) -> Recipe:
    """The `given` fields over those of `demo` where no model is named, else over the defaults of
    `Recipe`. Raises `UsageError`, which names the `command`, for arguments that are missing."""
    if args.analysis is not None:
        demo = dataclasses.replace(demo, num_key_value_layers=None)
    if given.get("max_steps") is not None and "num_train_epochs" in given:
        raise UsageError("give `max_steps` or `num_train_epochs`, not both")
    if args.model is None:
        if args.revision is not None:
            raise UsageError(f"`revision`={args.revision} goes with `model`")
        if "num_train_epochs" in given:
            given["max_steps"] = None  # the demo's own number of steps
        if args.data is not None and args.eval_data is None:
            given["eval_data"] = None  # the demo's held-out text belongs to the demo's data
        return dataclasses.replace(demo, **given)
    if args.dry_run:  # needs the model's config only
        given = {"data": (), "output_dir": Path("."), **given}
    elif args.model in PRESETS and not Path(args.model).exists():
        raise UsageError(
            f"`model`={args.model}: the name of a shape, for `dry_run` only; {command} needs a "
            f"checkpoint directory"
        )
    elif missing := [text for name, text in _NEEDED.items() if getattr(args, name) is None]:
        raise UsageError(f"`model` also needs {' and '.join(missing)}")
    recipe = Recipe(**given)  # what is wrong with it is said before a download
    from ..checkpoints.hub import local_path  # imports JAX

    model = local_path(args.model, args.revision, weights=not args.dry_run)
    return dataclasses.replace(recipe, model=str(model))


def _resume(text: str) -> str | int:
    if text in ("auto", "must", "never"):
        return text
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r}: choose auto, must, never, or a step")
