"""Everything that decides a distillation run, as one frozen record."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal

from .. import demo
from ..cli.fields import MISSING, option
from ..cli.model_options import revision
from ..errors import UsageError
from ..model.config import Config, GeneratedKV, Remat
from ..model.cut import CUT_FIELDS
from ..model.mesh_shape import MeshShape, parse_mesh
from ..pallas_kernels import Implementation
from ..plan.presets import PRESETS
from . import shared_options as shared
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
from .shared_options import (
    Init,
    Steers,
    check_calibration_tokens,
    check_rows,
    check_share,
    check_shared,
    steering,
)

Schedule = Literal["linear", "cosine", "constant"]
"""Course of the learning rate after its warm-up."""
Resume = Literal["auto", "must", "never"] | int
"""auto: continue if there is a checkpoint; must: refuse to start without one; never: refuse to
start over one; a number: continue from exactly that step."""


def parse_resume(text: str) -> str | int:
    """Argument type of `resume`."""
    if text in ("auto", "must", "never"):
        return text
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise UsageError(f"{text!r}: choose auto, must, never, or a step")


def parse_report_to(text: str) -> tuple[str, ...]:
    """`metrics.parse_report_to`, which imports JAX."""
    from .run.metrics import parse_report_to

    return parse_report_to(text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """The defaults are the authors' recipe for Llama-3.1-8B (ArcticTraining
    `projects/swiftkv/configs`) but for the start and the losses: see `AUTHORS_RECIPE`.

    Raises `UsageError` for values that no run can have.
    """

    model: str = option(
        MISSING,
        "checkpoint to distil: Hugging Face, Orbax, GGUF, or its name on the Hub; with "
        f"--dry-run also one of {', '.join(PRESETS)} (default: demo)",
        group="model and data",
    )
    revision: str | None = revision()
    num_key_value_layers: int | None = shared.num_key_value_layers()
    """K. None: as in the model's delta, or as an analysis of the data recommends, see
    `chosen_cut`."""
    analysis: str | None = shared.analysis()
    """Folder of an analysis, whose recommendation the fields of the cut that are None come from."""
    key_value_group_size: int | None = shared.key_value_group_size()
    prompt_attention_layers: int | None = shared.prompt_attention_layers()
    prompt_mlp_neurons: int | None = shared.prompt_mlp_neurons()
    boundary_taps: int | None = shared.boundary_taps()
    generated_kv: GeneratedKV | None = option(
        None, shared.GENERATED_KV.format("train for, and export,")
    )
    exact_tail: int | None = shared.exact_tail()
    exact_head: int | None = shared.exact_head()
    data: tuple[str, ...] = option(
        MISSING,
        "JSONL, JSON, Parquet or ArrayRecord (rows of messages, prompt and completion, "
        "conversations, instruction and output, or text), text files, a Hugging Face dataset "
        "folder, a folder of such files, a pattern, a prepared folder, or `stdlib`; repeat to "
        "mix, by weight",
        metavar="PATH[:WEIGHT]",
    )
    init: Init = option(
        "closed-form",
        "start of a fresh delta: closed-form, least squares on --calibration-tokens of the "
        "data; or copies of the teacher's projections (default: %(default)s)",
    )
    """Start of the delta if the checkpoint has none at this cut."""
    calibration_tokens: int | None = option(
        None,
        "tokens for --init closed-form (default: 256 per entry of the hidden state)",
        metavar="N",
        at_least=1,
    )
    eval_data: str | None = option(None, "held-out data, in the same forms", metavar="PATH")
    max_length: int = steering(8192, shared.MAX_LENGTH, at_least=1)
    max_unreadable_share: float = shared.max_unreadable_share()
    output_dir: Path = option(
        MISSING, "data, checkpoints, metrics, report and the exported model (demo: %(demo)s)"
    )
    mesh: MeshShape = option(
        MeshShape(),
        "or data=2,fsdp=4,model=2; -1 is the rest; emulated on a CPU (default: %(default)s)",
        metavar="DATAxMODEL",
        convert=parse_mesh,
        group="machine",
    )
    dtype: Literal["float32", "bfloat16"] | None = option(
        None, "dtype of the frozen weights (default: bfloat16 on accelerators, float32 on a CPU)"
    )
    """The arithmetic's too; the delta and its moments are always float32."""
    remat: Remat = option("mlp", "what the backward pass recomputes (%(default)s; demo: %(demo)s)")
    shard_sequence: bool = option(
        False, "split kept activations along the sequence over model, for long rows"
    )
    attention: Implementation | None = option(
        None, "implementation of attention (default: the one for the device)"
    )
    batch_size: int = steering(
        8,
        "rows in an optimiser step, over all devices (default: %(default)s)",
        group="optimisation",
        at_least=1,
    )
    gradient_accumulation_steps: int = option(
        1, "micro-batches that a step is divided into (default: %(default)s)", at_least=1
    )
    max_steps: int | None = option(
        None, "optimiser steps (default: --num-train-epochs; demo: %(demo)s)", at_least=1
    )
    num_train_epochs: int = option(1, "passes over the data (default: %(default)s)", at_least=1)
    learning_rate: float = steering(2e-4, "peak (default: %(default)s; demo: %(demo)s)")
    lr_schedule: Schedule = steering("linear", "after the warm-up (default: %(default)s)")
    warmup_ratio: float = steering(0.05, "share of the steps that warm up (default: %(default)s)")
    max_grad_norm: float = steering(
        1.0, "gradients with a larger norm are scaled down (default: %(default)s)"
    )
    seed: int = steering(0, "seed of the data order (default: %(default)s)")
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
        0.1, "weight of the hidden-state error (default: %(default)s)"
    )
    hidden_loss: HiddenLoss = steering(
        "relative",
        "hidden-state error of a token relative to the teacher's mean square, or as it is "
        "(default: %(default)s)",
        earlier="absolute",
    )
    hidden_loss_layer: int = steering(
        AUTHORS.hidden_layer, "hidden state compared, as Hugging Face counts (default: %(default)s)"
    )
    """The hidden loss is 0 where that is not above the cut."""
    loss_average: LossAverage = steering(
        "targets",
        "what the distillation loss of a step is divided by: its predicted targets, or all "
        "its positions (default: %(default)s)",
        earlier="targets",
    )
    loss_mask: LossMask = steering(
        "shifted",
        "predictions that count: those of targets, or with unshifted those at targets "
        "(default: %(default)s)",
        earlier="shifted",
    )
    padding: Padding = steering(
        "separate",
        "the end of a row that no document fills: counted nowhere, or joined to the last "
        "document (default: %(default)s)",
        earlier="separate",
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
    eval_batches: int = option(
        16, "batches of --eval-data used, of --batch-size (default: %(default)s)", at_least=1
    )
    early_stopping_patience: int | None = option(
        None, "stop after N evaluations without a lower held-out loss", metavar="N", at_least=1
    )
    load_best_model_at_end: bool = option(
        False, "export the state of the lowest held-out loss, not the last"
    )
    """Whether the best state is exported, not the last. The state of step 0 is a candidate."""

    def __post_init__(self):
        check_shared(self)
        for name in ("learning_rate", "temperature", "max_grad_norm"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise UsageError(f"`{name}`={value}: must be above 0 and finite", option=name)
        check_share("warmup_ratio", self.warmup_ratio)
        if not self.hidden_loss_weight >= 0:
            raise UsageError(f"`hidden_loss_weight`={self.hidden_loss_weight}: must be at least 0")
        check_calibration_tokens(self.calibration_tokens, self.init)
        if self.batch_size % self.gradient_accumulation_steps:
            raise UsageError(
                f"`batch_size`={self.batch_size} must be a multiple of "
                f"`gradient_accumulation_steps`={self.gradient_accumulation_steps}"
            )
        check_rows(self)
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
    def micro_batch_size(self) -> int:
        """Rows in a micro-batch, over all devices."""
        return self.batch_size // self.gradient_accumulation_steps

    @property
    def eval_micro_batches(self) -> int:
        """Micro-batches of held-out rows in an evaluation."""
        return self.eval_batches * self.gradient_accumulation_steps

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


STEERS: dict[str, Steers] = {
    field.name: field.metadata["steers"]
    for field in dataclasses.fields(Recipe)
    if "steers" in field.metadata
}
"""The fields that steer the updates."""
STEERING_LATER = {name: note.earlier for name, note in STEERS.items() if note.earlier is not None}
"""Fields that the first checkpoints lack, with the values that those were trained with."""
STEERING = tuple(name for name in STEERS if name not in STEERING_LATER)
UNRECORDED = STEERING_LATER | {name: getattr(Config, name) for name in CUT_FIELDS}
"""Values of settings that a checkpoint does not name."""

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
