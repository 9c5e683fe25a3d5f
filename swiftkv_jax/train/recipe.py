"""Everything that decides a distillation run, as one frozen record."""

from __future__ import annotations

import dataclasses
import importlib
import math
from pathlib import Path
from typing import Any, Literal

from .. import demo
from ..cli.fields import option
from ..errors import UsageError
from ..model.config import Remat
from ..pallas_kernels import Implementation
from .data.sources import STDLIB
from .loss.objective import (
    AUTHORS,
    Divergence,
    HiddenLoss,
    LossAverage,
    LossMask,
    Objective,
    Padding,
)
from .run_options import Init, RunOptions, check_share, steering

Schedule = Literal["linear", "cosine", "constant"]
"""Course of the learning rate after its warm-up."""
Resume = Literal["auto", "must", "never"] | int
"""auto: continue if there is a checkpoint; must: refuse to start without one; never: refuse to
start over one; a number: continue from exactly that step."""


def parse_resume(text: str) -> str | int:
    """Argument type of `resume`."""
    if text in ("auto", "must", "never"):
        return text
    if text.isdecimal():
        return int(text)
    raise UsageError(f"{text!r}: choose auto, must, never, or a step")


_REPORT_PACKAGES = {  # a name of `report_to`: the module that it needs, and how to get it
    "jsonl": None,
    "tensorboard": ("tensorboardX", "pip install 'swiftkv-jax[report]'"),
    "wandb": ("wandb", "pip install wandb"),
}


def parse_report_to(text: str) -> tuple[str, ...]:
    """`"tensorboard,wandb"` -> ("jsonl", "tensorboard", "wandb"): JSON lines are always written.

    Raises `UsageError` for an unknown name, and for one whose package is not installed.
    """
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in _REPORT_PACKAGES]:
        raise UsageError(
            f"`report_to`={text!r}: {unknown[0]!r} is unknown; choose from "
            f"{', '.join(_REPORT_PACKAGES)}"
        )
    for name in names:
        report_package(name)
    return tuple(dict.fromkeys(["jsonl", *names]))


def report_package(name: str) -> Any:
    """The module of a name of `report_to`. Raises `UsageError` if it is not installed."""
    if _REPORT_PACKAGES[name] is None:
        return None
    module, command = _REPORT_PACKAGES[name]
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UsageError(f"`report_to`={name} needs {module}: {command}") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(RunOptions):
    """The defaults are the authors' recipe for Llama-3.1-8B (ArcticTraining
    `projects/swiftkv/configs`) but for the start and the losses: see `AUTHORS_RECIPE`.

    Raises `UsageError` for values that no run can have.
    """

    init: Init = option(
        "closed-form",
        "start of a fresh delta: closed-form, least squares on --calibration-tokens of the "
        "data; or copies of the teacher's projections (default: %(default)s)",
        group="model and data",
    )
    remat: Remat = option(
        "mlp", "what the backward pass recomputes (%(default)s; demo: %(demo)s)", group="machine"
    )
    shard_sequence: bool = option(
        False, "split kept activations along the sequence over model, for long rows"
    )
    attention: Implementation | None = option(
        None, "implementation of attention (default: the one for the device)"
    )
    gradient_accumulation_steps: int = option(
        1,
        "micro-batches that a step is divided into (default: %(default)s)",
        group="optimisation",
        at_least=1,
    )
    max_steps: int | None = option(
        None,
        "optimiser steps (default: --num-train-epochs; demo: %(demo)s)",
        group="optimisation",
        at_least=1,
    )
    num_train_epochs: int = option(1, "passes over the data (default: %(default)s)", at_least=1)
    learning_rate: float = steering(2e-4, "peak (default: %(default)s; demo: %(demo)s)")
    lr_schedule: Schedule = steering("linear", "after the warm-up (default: %(default)s)")
    warmup_ratio: float = steering(0.05, "share of the steps that warm up (default: %(default)s)")
    max_grad_norm: float = steering(
        1.0, "gradients with a larger norm are scaled down (default: %(default)s)"
    )
    temperature: float = steering(
        AUTHORS.temperature, "temperature of both softmaxes (default: %(default)s)", group="loss"
    )
    kl: Divergence = steering(
        AUTHORS.divergence, "divergence of student and teacher (default: %(default)s)"
    )
    kl_top_k: int | None = steering(
        None,
        "compare the teacher's K likeliest tokens only (default: all)",
        metavar="K",
        at_least=1,
    )
    hidden_loss_weight: float = steering(
        0.1, "weight of the hidden-state error (default: %(default)s)", at_least=0
    )
    hidden_loss: HiddenLoss = steering(
        "relative",
        "hidden-state error of a token relative to the teacher's mean square, or as it is "
        "(default: %(default)s)",
    )
    hidden_loss_layer: int = steering(
        AUTHORS.hidden_layer, "hidden state compared, as Hugging Face counts (default: %(default)s)"
    )
    """The hidden loss is 0 where that is not above the cut."""
    loss_average: LossAverage = steering(
        "targets",
        "what the distillation loss of a step is divided by: its predicted targets, or all "
        "its positions (default: %(default)s)",
    )
    loss_mask: LossMask = steering(
        "shifted",
        "predictions that count: those of targets, or with unshifted those at targets "
        "(default: %(default)s)",
    )
    padding: Padding = steering(
        "separate",
        "the end of a row that no document fills: counted nowhere, or joined to the last "
        "document (default: %(default)s)",
    )
    resume: Resume = option(
        "auto",
        "auto, must, never, or a step to continue from (default: %(default)s)",
        metavar="WHEN",
        parse=parse_resume,
        group="checkpoints and reports",
    )
    save_steps: int = option(
        200, "steps between checkpoints (default: %(default)s; demo: %(demo)s)", at_least=1
    )
    save_total_limit: int = option(
        3, "newest checkpoints kept, and the best (default: %(default)s)", at_least=1
    )
    logging_steps: int = option(10, "steps between metrics (default: %(default)s)", at_least=1)
    report_to: tuple[str, ...] = option(
        ("jsonl",),
        "jsonl (always), tensorboard, wandb; separated by commas",
        metavar="SINKS",
        parse=str,
        convert=parse_report_to,
    )
    profile_steps: str | None = option(
        None, "trace these steps into OUTPUT_DIR/profile", metavar="FIRST:LAST"
    )
    eval_steps: int | None = option(
        None,
        "steps between evaluations on --eval-data (default: before the first and after the "
        "last step)",
        at_least=1,
    )
    early_stopping_patience: int | None = option(
        None, "stop after N evaluations without a lower held-out loss", metavar="N", at_least=1
    )
    load_best_model_at_end: bool = option(
        False, "export the state of the lowest held-out loss, not the last"
    )
    """True if the best state is exported, not the last. The state of step 0 is a candidate."""
    speculator: int | None = option(
        None,
        "then train a head that drafts N tokens for --speculative-config, into "
        "OUTPUT_DIR/speculator",
        metavar="N",
        at_least=1,
        group="speculator",
    )
    speculator_steps: int = option(
        3000, "steps of its training (default: %(default)s; demo: %(demo)s)", at_least=1
    )
    speculator_learning_rate: float = option(
        1e-3, "peak, after which it falls as a cosine (default: %(default)s; demo: %(demo)s)"
    )

    def __post_init__(self):
        super().__post_init__()
        positive = "learning_rate speculator_learning_rate temperature max_grad_norm"
        for name in positive.split():
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise UsageError(f"`{name}`={value}: must be above 0 and finite", option=name)
        check_share("warmup_ratio", self.warmup_ratio)
        if self.shard_sequence and self.max_length % self.mesh.model:
            raise UsageError(
                f"`shard_sequence`: `max_length`={self.max_length} must be a multiple of the "
                f"{self.mesh.model} model devices"
            )
        self._check_evaluation()
        if self.profile_steps is not None:
            from .run.profiling import parse_steps

            parse_steps(self.profile_steps)

    def _check_evaluation(self) -> None:
        uses_best = self.early_stopping_patience or self.load_best_model_at_end
        if self.eval_data is None and (self.eval_steps or uses_best):
            raise UsageError(
                "`eval_steps`, `early_stopping_patience` and `load_best_model_at_end` need "
                "`eval_data`"
            )
        if uses_best and not self.eval_steps:
            raise UsageError(
                "`early_stopping_patience` and `load_best_model_at_end` need `eval_steps`"
            )

    @property
    def objective(self) -> Objective:
        return Objective(
            self.temperature,
            self.kl,
            self.kl_top_k,
            self.hidden_loss_weight,
            self.hidden_loss_layer,
            self.loss_average,
            self.hidden_loss,
        )


STEERING = tuple(field.name for field in dataclasses.fields(Recipe) if "steers" in field.metadata)
"""The fields that steer the updates."""

DEMO = Recipe(
    model=str(demo.LLAMA),
    data=(STDLIB,),
    output_dir=Path("runs/demo"),
    num_key_value_layers=4,
    eval_data=STDLIB,
    max_length=512,
    max_steps=200,
    learning_rate=2e-3,
    remat="none",
    save_steps=50,
    speculator_steps=600,
    speculator_learning_rate=8e-3,
)
"""The run without a named model: the demo teacher on the standard library, a few minutes on two CPU
cores."""

AUTHORS_RECIPE: dict[str, Any] = {
    "init": "authors",
    "loss_average": "positions",
    "loss_mask": "unshifted",
    "padding": "joined",
    "hidden_loss": "absolute",
    "hidden_loss_weight": AUTHORS.hidden_weight,
}
"""The settings in which the defaults differ from the authors' trainer. The authors' trainer starts
from the mean of a group's projections. It divides both losses by all positions; padding is included
and continues the last document. It counts the prediction at position n if token n, not token n + 1,
is a target. It does not scale the hidden-state error."""

RECIPES = {"authors": AUTHORS_RECIPE}
"""Settings that go together, by name."""
