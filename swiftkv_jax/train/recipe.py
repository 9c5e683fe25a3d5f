"""Everything that decides a distillation run, as one frozen record."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from .. import demo
from ..errors import UsageError
from ..pallas_kernels import Implementation
from .sources import STDLIB


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The defaults are the authors' recipe for Llama-3.1-8B (ArcticTraining `projects/swiftkv/configs`)."""

    model: str
    data: tuple[str, ...]
    output_dir: Path
    mesh: tuple[int, int] = (1, 1)
    """(data, model) devices."""
    num_key_value_layers: int | None = None
    """None is that of the model's own delta, or half the layers."""
    key_value_group_size: int | None = None
    """None is that of the model's own delta, or 1."""
    eval_data: str | None = None
    max_length: int = 8192
    """Tokens in a packed row."""
    batch_size: int = 8
    """Rows in an optimiser step, over all devices."""
    max_steps: int | None = None
    """None is one pass over the data."""
    learning_rate: float = 2e-4
    warmup_ratio: float = 0.05
    temperature: float = 2.0
    hidden_loss_weight: float = 1.0
    hidden_loss_layer: int = -2
    dtype: str | None = None
    """Of the frozen weights and the arithmetic; the delta and its moments are always float32."""
    remat: bool = True
    """Recompute the student's layers in the backward pass instead of keeping their activations."""
    attention: Implementation | None = None
    """None chooses for the device."""
    seed: int = 0
    save_steps: int = 200
    save_total_limit: int = 3
    logging_steps: int = 10
    eval_batches: int = 16
    resume: str = "auto"
    """auto: continue if there is a checkpoint; must: refuse to start without one; never: refuse to start over one."""

    def __post_init__(self):
        at_least_one = "max_length batch_size max_steps save_steps save_total_limit logging_steps eval_batches"
        for name in f"{at_least_one} num_key_value_layers key_value_group_size".split():
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{_flag(name)} {value}: must be at least 1")
        if not self.learning_rate > 0 or not self.temperature > 0:
            raise UsageError(f"--learning-rate {self.learning_rate} and --temperature {self.temperature} must be above 0")
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"--seed {self.seed}: must be from 0 to {2**32 - 1}")
        if not 0 <= self.warmup_ratio < 1:
            raise UsageError(f"--warmup-ratio {self.warmup_ratio}: must be from 0 to below 1")
        if not self.hidden_loss_weight >= 0:
            raise UsageError(f"--hidden-loss-weight {self.hidden_loss_weight}: must be at least 0")
        if self.batch_size % self.mesh[0]:
            raise UsageError(f"--batch-size {self.batch_size} must be a multiple of the {self.mesh[0]} data devices of --mesh")
        if self.resume not in ("auto", "must", "never"):
            raise UsageError(f"--resume {self.resume!r}: choose auto, must or never")


DEMO = Recipe(
    model=str(demo.LLAMA),
    data=(STDLIB,),
    output_dir=Path("runs/demo"),
    eval_data=STDLIB,
    max_length=512,
    max_steps=200,
    learning_rate=2e-3,
    remat=False,
    save_steps=50,
)
"""What runs when no model is named: the demo teacher on the standard library, a few minutes on two CPU cores."""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
