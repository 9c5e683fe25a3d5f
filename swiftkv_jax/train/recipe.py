"""Everything that decides a distillation run, as one frozen record."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Literal

from .. import demo
from ..errors import UsageError
from ..mesh import MeshShape
from ..pallas_kernels import Implementation
from ..transformer import Remat
from .data.sources import STDLIB
from .distill import AUTHORS, Objective
from .divergence import Divergence
from .profiling import parse_steps

Schedule = Literal["linear", "cosine", "constant"]
"""Of the learning rate after its warm-up."""
Resume = Literal["auto", "must", "never"] | int
"""auto: continue if there is a checkpoint; must: refuse to start without one; never: refuse to
start over one; a number: continue from exactly that step."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The defaults are the authors' recipe for Llama-3.1-8B (ArcticTraining
    `projects/swiftkv/configs`)."""

    model: str
    data: tuple[str, ...]
    """PATH or PATH:WEIGHT each."""
    output_dir: Path
    mesh: MeshShape = MeshShape()
    num_key_value_layers: int | None = None
    """None is that of the model's own delta, or half the layers."""
    key_value_group_size: int | None = None
    """None is that of the model's own delta, or 1."""
    eval_data: str | None = None
    max_length: int = 8192
    """Tokens in a packed row."""
    batch_size: int = 8
    """Rows in an optimiser step, over all devices and micro-batches."""
    gradient_accumulation_steps: int = 1
    """Micro-batches that an optimiser step is divided into."""
    max_steps: int | None = None
    """None is `num_train_epochs`."""
    num_train_epochs: int = 1
    """Passes over the data."""
    learning_rate: float = 2e-4
    lr_schedule: Schedule = "linear"
    warmup_ratio: float = 0.05
    max_grad_norm: float = 1.0
    temperature: float = AUTHORS.temperature
    kl: Divergence = AUTHORS.divergence
    kl_top_k: int | None = None
    hidden_loss_weight: float = AUTHORS.hidden_weight
    hidden_loss_layer: int = AUTHORS.hidden_layer
    dtype: str | None = None
    """Of the frozen weights and the arithmetic; the delta and its moments are always float32."""
    remat: Remat = "mlp"
    attention: Implementation | None = None
    """None chooses for the device."""
    shard_sequence: bool = False
    """Split what the forward pass keeps along the sequence, over the `model` devices: for long
    rows."""
    seed: int = 0
    save_steps: int = 200
    save_total_limit: int = 3
    logging_steps: int = 10
    report_to: tuple[str, ...] = ("jsonl",)
    profile_steps: str | None = None
    eval_steps: int | None = None
    """None evaluates before the first step and after the last."""
    eval_batches: int = 16
    early_stopping_patience: int | None = None
    """Evaluations in a row without a lower held-out loss after which the run ends."""
    load_best_model_at_end: bool = False
    """Export the state of the lowest held-out loss instead of the last."""
    max_unreadable_share: float = 0.01
    """Of a source's rows; more of them stop the run."""
    resume: Resume = "auto"

    def __post_init__(self):
        at_least_one = (
            "max_length batch_size gradient_accumulation_steps max_steps "
            "num_train_epochs save_steps save_total_limit"
        )
        at_least_one += " logging_steps eval_steps eval_batches early_stopping_patience kl_top_k"
        for name in f"{at_least_one} num_key_value_layers key_value_group_size".split():
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{_flag(name)} {value}: must be at least 1")
        for name in ("learning_rate", "temperature", "max_grad_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{_flag(name)} {getattr(self, name)}: must be above 0 and finite")
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"--seed {self.seed}: must be from 0 to {2**32 - 1}")
        for name in ("warmup_ratio", "max_unreadable_share"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{_flag(name)} {getattr(self, name)}: must be from 0 to below 1")
        if not self.hidden_loss_weight >= 0:
            raise UsageError(f"--hidden-loss-weight {self.hidden_loss_weight}: must be at least 0")
        if self.batch_size % self.gradient_accumulation_steps:
            raise UsageError(
                f"--batch-size {self.batch_size} must be a multiple of "
                f"--gradient-accumulation-steps"
            )
        if self.micro_batch_size % self.mesh.rows:
            raise UsageError(
                f"--batch-size {self.batch_size} in {self.gradient_accumulation_steps} "
                f"micro-batches must be a multiple of the "
                f"{self.mesh.rows} data devices of --mesh"
            )
        if self.profile_steps is not None:
            parse_steps(self.profile_steps)
        if self.shard_sequence and self.max_length % self.mesh.model:
            raise UsageError(
                f"--shard-sequence: --max-length {self.max_length} must be a multiple of the "
                f"{self.mesh.model} model devices"
            )
        if self.eval_data is None and (
            self.eval_steps or self.early_stopping_patience or self.load_best_model_at_end
        ):
            raise UsageError(
                "--eval-steps, --early-stopping-patience and --load-best-model-at-end need "
                "--eval-data"
            )
        if (self.early_stopping_patience or self.load_best_model_at_end) and not self.eval_steps:
            raise UsageError(
                "--early-stopping-patience and --load-best-model-at-end need --eval-steps"
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
        )


DEMO = Recipe(
    model=str(demo.LLAMA),
    data=(STDLIB,),
    output_dir=Path("runs/demo"),
    eval_data=STDLIB,
    max_length=512,
    max_steps=200,
    learning_rate=2e-3,
    remat="none",
    save_steps=50,
)
"""What runs when no model is named: the demo teacher on the standard library, a few minutes on two
CPU cores."""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
