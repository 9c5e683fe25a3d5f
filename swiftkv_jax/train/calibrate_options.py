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

import dataclasses
from pathlib import Path

from ..cli.fields import option
from ..errors import UsageError
from .recipe import DEMO
from .run_options import Init, RunOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationOptions(RunOptions):
    """Everything that decides a calibration."""

    eval_data: str | None = option(
        None,
        "held-out text to measure on (default: rows of --data that are not fitted to; demo: "
        "stdlib's)",
        metavar="PATH",
    )
    eval_batches: int = option(
        16,
        "batches of --eval-data used, of --batch-size (default: %(default)s, on a CPU 8)",
        at_least=1,
    )
    max_length: int = option(
        8192,
        "tokens in a packed row (default: %(default)s, on a CPU 512; demo: %(demo)s)",
        at_least=1,
    )
    batch_size: int = option(
        8, "rows at a time (default: %(default)s, on a CPU 2; demo: %(demo)s)", at_least=1
    )
    keep_delta: bool = option(
        False,
        "with --generated-kv own, for a trained model whose layers share caches: keep its "
        "delta, and scale its queries",
        group="model and data",
    )
    init: Init = dataclasses.field(default="closed-form", init=False)
    gradient_accumulation_steps: int = dataclasses.field(default=1, init=False)
    shard_sequence: bool = dataclasses.field(default=False, init=False)

    def __post_init__(self):
        super().__post_init__()
        if self.keep_delta and self.calibration_tokens is not None:
            raise UsageError("`calibration_tokens`: `keep_delta` fits nothing to them")


ON_A_CPU = {"max_length": 512, "batch_size": 2, "eval_batches": 8}
"""Defaults for a named model on a CPU. Few rows are then enough batches for an error."""
CALIBRATION_DEMO = CalibrationOptions(
    model=DEMO.model,
    data=DEMO.data,
    eval_data=DEMO.eval_data,
    output_dir=Path("runs/calibrate"),
    num_key_value_layers=DEMO.num_key_value_layers,
    max_length=DEMO.max_length,
)
"""The calibration without a named model."""
