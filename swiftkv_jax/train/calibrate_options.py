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
import dataclasses
from pathlib import Path
from typing import ClassVar, Literal

from ..cli.fields import MISSING, add_flags, option
from ..cli.model_options import ProcessOptions, revision
from ..errors import UsageError
from ..model.config import GeneratedKV
from ..model.mesh_shape import MeshShape, parse_mesh
from ..pallas_kernels import Implementation
from . import shared_options as shared
from .recipe import DEMO, Recipe
from .shared_options import Init, check_rows, check_shared


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationOptions:
    """Everything that decides a calibration. Raises `UsageError` for values that none can have."""

    model: str = option(
        MISSING,
        "checkpoint: Hugging Face, Orbax, GGUF, or its name on the Hub (default: the demo model)",
    )
    revision: str | None = revision()
    data: tuple[str, ...] = option(
        MISSING,
        "text, in the forms of training data; repeat to mix (demo: stdlib)",
        metavar="PATH[:WEIGHT]",
    )
    eval_data: str | None = option(
        None,
        "held-out text to measure on (default: rows of --data that are not fitted to; demo: "
        "stdlib's)",
        metavar="PATH",
    )
    output_dir: Path = option(MISSING, "model, record and prepared data (demo: %(demo)s)")
    num_key_value_layers: int | None = shared.num_key_value_layers()
    analysis: str | None = shared.analysis()
    key_value_group_size: int | None = shared.key_value_group_size()
    prompt_attention_layers: int | None = shared.prompt_attention_layers()
    prompt_mlp_neurons: int | None = shared.prompt_mlp_neurons()
    boundary_taps: int | None = shared.boundary_taps()
    generated_kv: GeneratedKV | None = option(
        None, shared.GENERATED_KV.format("fit to, measure with and export")
    )
    exact_tail: int | None = shared.exact_tail()
    exact_head: int | None = shared.exact_head()
    keep_delta: bool = option(
        False,
        "with --generated-kv own, for a trained model whose layers share caches: keep its "
        "delta, and scale its queries",
    )
    calibration_tokens: int | None = option(
        None, "(default: 256 per entry of the hidden state)", metavar="N", at_least=1
    )
    max_length: int = option(8192, shared.MAX_LENGTH, at_least=1)
    max_unreadable_share: float = shared.max_unreadable_share()
    batch_size: int = option(8, "rows at a time (default: %(default)s)", at_least=1)
    eval_batches: int = option(16, "of --eval-data (default: %(default)s)", at_least=1)
    seed: int = option(0, "seed of the order of the data (default: %(default)s)")
    mesh: MeshShape = option(
        MeshShape(),
        "as in training (default: %(default)s)",
        metavar="DATAxMODEL",
        convert=parse_mesh,
    )
    dtype: Literal["float32", "bfloat16"] | None = shared.dtype()

    init: ClassVar[Init] = "closed-form"
    shard_sequence: ClassVar[bool] = False
    attention: Implementation | None = None
    """Chosen for the device when the model is read."""

    def __post_init__(self):
        check_shared(self)
        check_rows(self)
        if self.keep_delta and self.calibration_tokens is not None:
            raise UsageError("`calibration_tokens`: `keep_delta` fits nothing to them")

    @property
    def micro_batch_size(self) -> int:
        """Rows at a time, over all devices."""
        return self.batch_size

    @property
    def eval_micro_batches(self) -> int:
        """Batches of held-out rows that are measured."""
        return self.eval_batches


CALIBRATION_DEMO = CalibrationOptions(
    model=DEMO.model,
    data=DEMO.data,
    eval_data=DEMO.eval_data,
    output_dir=Path("runs/calibrate"),
    num_key_value_layers=DEMO.num_key_value_layers,
    max_length=DEMO.max_length,
)
"""The calibration without a named model."""


RunOptions = Recipe | CalibrationOptions
"""Options that a model, data and an output folder follow from."""


@dataclasses.dataclass(frozen=True)
class CalibrateCommand:
    """Flags of the command that are no options of a calibration."""

    dry_run: bool = option(
        False,
        "print tokens, memory of the devices and of the host, and operations, from "
        "config.json alone; --model may then be the name of a shape, such as llama-3.1-8b",
    )
    topology: str | None = option(
        None, "with --dry-run: compile for h200:1, v5p:2x2x1, ...", metavar="NAME"
    )


def add_calibrate_flags(parser: argparse.ArgumentParser) -> None:
    """All flags of the command."""
    add_flags(parser, CalibrationOptions, demo=CALIBRATION_DEMO)
    add_flags(parser, ProcessOptions)
    add_flags(parser, CalibrateCommand)
