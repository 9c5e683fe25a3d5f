"""Everything that decides a distillation run, as one frozen record."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .. import demo
from ..errors import UsageError
from ..model.config import Config, GeneratedKV
from ..model.cut import CUT_FIELDS
from ..model.mesh_shape import MeshShape
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

if TYPE_CHECKING:
    from ..model.transformer import Remat

Init = Literal["closed-form", "leader", "authors"]
"""The start of a fresh delta; see `initialization.Start` for the last two."""
Schedule = Literal["linear", "cosine", "constant"]
"""Course of the learning rate after its warm-up."""
Resume = Literal["auto", "must", "never"] | int
"""auto: continue if there is a checkpoint; must: refuse to start without one; never: refuse to
start over one; a number: continue from exactly that step."""

TOKENS_PER_DIMENSION = 256
"""Calibration tokens per entry of the hidden state, by default."""

_AT_LEAST_ONE = (
    "num_key_value_layers",
    "key_value_group_size",
    "calibration_tokens",
    "max_length",
    "batch_size",
    "gradient_accumulation_steps",
    "max_steps",
    "num_train_epochs",
    "kl_top_k",
    "save_steps",
    "save_total_limit",
    "logging_steps",
    "eval_steps",
    "eval_batches",
    "early_stopping_patience",
)


def check_calibration_tokens(tokens: int | None, init: Init) -> None:
    """Raise `UsageError` for a number of tokens that no start of `init` is fitted to."""
    if tokens is not None and init != "closed-form":
        raise UsageError(
            f"`calibration_tokens`={tokens} needs `init`=closed-form, and it is {init}"
        )


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The defaults are the authors' recipe for Llama-3.1-8B (ArcticTraining
    `projects/swiftkv/configs`) but for the start and the losses: see `AUTHORS_RECIPE`.

    Raises `UsageError` for values that no run can have.
    """

    model: str
    data: tuple[str, ...]
    """Training data, PATH or PATH:WEIGHT each."""
    output_dir: Path
    mesh: MeshShape = MeshShape()
    num_key_value_layers: int | None = None
    """K, the number of layers that keep their own keys and values. None: as in the model's delta,
    or as an analysis of the data recommends, see `chosen_cut`."""
    key_value_group_size: int | None = None
    """Upper layers that share one key/value cache. None: as in the model's delta, or 1."""
    prompt_attention_layers: int | None = None
    """Upper layers of which prompts run the attention (`Config.prompt_attention_layers`). None: as
    in the model's delta, or 0; the next two as well."""
    prompt_mlp_neurons: int | None = None
    boundary_taps: int | None = None
    generated_kv: GeneratedKV | None = None
    """Where generated tokens take their upper keys and values from, in training and in the exported
    model (`Config.generated_kv`); None: as in the model."""
    exact_tail: int | None = None
    """`Config.exact_tail`; None: as in the model."""
    exact_head: int | None = None
    """`Config.exact_head`; None: as in the model."""
    analysis: str | None = None
    """Folder of an analysis, whose recommendation the fields above that are None come from."""
    init: Init = "closed-form"
    """Start of the delta if the checkpoint has none at this cut: least squares on calibration
    tokens (`calibration`), or a copy of the teacher's projections
    (`initialization.init_swiftkv`)."""
    calibration_tokens: int | None = None
    """Tokens of the training data that `closed-form` is fitted to. None is 256 per entry of the
    hidden state."""
    eval_data: str | None = None
    max_length: int = 8192
    """Tokens in a packed row."""
    batch_size: int = 8
    """Rows in an optimiser step, over all devices and micro-batches."""
    gradient_accumulation_steps: int = 1
    """Micro-batches that an optimiser step is divided into."""
    max_steps: int | None = None
    """Optimiser steps. None is `num_train_epochs`."""
    num_train_epochs: int = 1
    """Passes over the data."""
    learning_rate: float = 2e-4
    lr_schedule: Schedule = "linear"
    warmup_ratio: float = 0.05
    max_grad_norm: float = 1.0
    temperature: float = AUTHORS.temperature
    kl: Divergence = AUTHORS.divergence
    kl_top_k: int | None = None
    hidden_loss: HiddenLoss = "relative"
    hidden_loss_weight: float = 0.1
    hidden_loss_layer: int = AUTHORS.hidden_layer
    """Hidden state that is compared. The hidden loss is 0 where that is not above the cut."""
    loss_average: LossAverage = "targets"
    """What the summed divergence of a step is divided by."""
    loss_mask: LossMask = "shifted"
    """Positions whose predictions count in the divergence."""
    padding: Padding = "separate"
    """How the padding at a row's end counts: not at all, or as part of the last document."""
    dtype: str | None = None
    """Dtype of the frozen weights and the arithmetic; the delta and its moments are always
    float32."""
    remat: Remat = "mlp"
    attention: Implementation | None = None
    """Implementation of attention; None chooses for the device."""
    shard_sequence: bool = False
    """Whether the activations that the forward pass keeps are split along the sequence over the
    `model` devices; for long rows."""
    seed: int = 0
    save_steps: int = 200
    save_total_limit: int = 3
    logging_steps: int = 10
    report_to: tuple[str, ...] = ("jsonl",)
    profile_steps: str | None = None
    eval_steps: int | None = None
    """Steps between evaluations. None evaluates before the first step and after the last."""
    eval_batches: int = 16
    """Batches of `batch_size` held-out rows in an evaluation."""
    early_stopping_patience: int | None = None
    """Evaluations in a row without a lower held-out loss after which the run ends."""
    load_best_model_at_end: bool = False
    """Whether the state of the lowest held-out loss, that of step 0 included, is exported instead
    of the last."""
    max_unreadable_share: float = 0.01
    """Share of a source's rows above which unreadable ones stop the run."""
    resume: Resume = "auto"

    def __post_init__(self):
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"`{name}`={value}: must be at least 1")
        for name in ("learning_rate", "temperature", "max_grad_norm"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise UsageError(f"`{name}`={value}: must be above 0 and finite")
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"`seed`={self.seed}: must be from 0 to {2**32 - 1}")
        for name in ("warmup_ratio", "max_unreadable_share"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise UsageError(f"`{name}`={value}: must be from 0 to below 1")
        if not self.hidden_loss_weight >= 0:
            raise UsageError(f"`hidden_loss_weight`={self.hidden_loss_weight}: must be at least 0")
        check_calibration_tokens(self.calibration_tokens, self.init)
        self._check_batch()
        self._check_evaluation()
        if self.profile_steps is not None:
            from .run.profiling import parse_steps

            parse_steps(self.profile_steps)

    def _check_batch(self) -> None:
        if self.batch_size % self.gradient_accumulation_steps:
            raise UsageError(
                f"`batch_size`={self.batch_size} must be a multiple of "
                f"`gradient_accumulation_steps`={self.gradient_accumulation_steps}"
            )
        if self.micro_batch_size % self.mesh.rows:
            parts = self.gradient_accumulation_steps
            divided = f" in {parts} micro-batches" if parts > 1 else ""
            raise UsageError(
                f"`batch_size`={self.batch_size}{divided} must be a multiple of the "
                f"{self.mesh.rows} data devices of `mesh`"
            )
        if self.shard_sequence and self.max_length % self.mesh.model:
            raise UsageError(
                f"`shard_sequence`: `max_length`={self.max_length} must be a multiple of the "
                f"{self.mesh.model} model devices"
            )

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
    def micro_batch_size(self) -> int:
        """Rows in a micro-batch, over all devices."""
        return self.batch_size // self.gradient_accumulation_steps

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


# Every field of `Recipe` is in one of these three.
STEERING = (
    "batch_size",
    "max_length",
    "learning_rate",
    "lr_schedule",
    "warmup_ratio",
    "max_grad_norm",
    "temperature",
    "kl",
    "kl_top_k",
    "hidden_loss_weight",
    "hidden_loss_layer",
    "seed",
)
"""Fields that steer the updates: a run continues only with the same values (see
`setup.fingerprint`)."""
STEERING_LATER = {
    "loss_average": "targets",
    "loss_mask": "shifted",
    "hidden_loss": "absolute",
    "padding": "separate",
}
"""Fields that steer the updates too, but are missing in the first checkpoints; each with the value
that those were trained with."""
UNRECORDED = STEERING_LATER | {name: getattr(Config, name) for name in CUT_FIELDS}
"""Values of settings that a checkpoint does not name."""
NOT_STEERING = (
    # Their results are in the fingerprint: weights, cut, data, number of steps.
    "model",
    "data",
    *CUT_FIELDS,
    "analysis",
    "init",
    "calibration_tokens",
    "max_steps",
    "num_train_epochs",
    "max_unreadable_share",
    "dtype",
    # They change only rounding.
    "mesh",
    "gradient_accumulation_steps",
    "remat",
    "attention",
    "shard_sequence",
    # They choose what is saved, reported and exported.
    "output_dir",
    "eval_data",
    "save_steps",
    "save_total_limit",
    "logging_steps",
    "report_to",
    "profile_steps",
    "eval_steps",
    "eval_batches",
    "early_stopping_patience",
    "load_best_model_at_end",
    "resume",
)
"""Fields that may change when a run is continued."""

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
