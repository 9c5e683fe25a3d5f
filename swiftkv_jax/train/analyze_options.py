"""`python -m swiftkv_jax.train analyze`: the distance of each SwiftKV cut from the model before any
distillation.

For a choice of K (layers that keep their own keys and values) and g (layers that share one
projection) it shows the student's distance from the teacher on a text, and what the cut saves. The
student is the one that training starts from: in closed form, fitted to text that it is not measured
on. It recommends the cheapest cut within a budget, with a tap or prompt attention layers where they
pay, and the command that makes it. With no --model it analyses the demo model. Example:

    python -m swiftkv_jax.train analyze --model Llama-3.1-8B-Instruct --data chat.jsonl
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from ..cli.fields import option
from ..cli.model_options import revision
from ..model.config import GeneratedKV
from ..model.mesh_shape import MeshShape, parse_mesh
from .run_options import Init, check_calibration_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnalyzeOptions:
    """The options of an analysis."""

    model: str | None = option(
        None,
        "checkpoint to analyse: Hugging Face, Orbax, GGUF, or its name on the Hub (default: "
        "the demo model)",
    )
    revision: str | None = revision()
    data: tuple[str, ...] = option(
        (), "text, in the forms of training data; repeat to add more (demo: stdlib)"
    )
    cuts: str | None = option(
        None,
        "layers that keep their own keys and values: percentages of all layers, numbers of "
        "layers such as K=3, or `all` (default: from 37.5%% to 87.5%%, and those near the edge "
        "of the budget)",
    )
    groups: str = option(
        "1,2,4",
        "upper layers that share one key/value cache, where they divide evenly (default: "
        "%(default)s)",
    )
    generated_kv: GeneratedKV | None = option(
        None,
        "measure students whose generated tokens take their keys and values from there "
        "(default: both; own without groups only)",
    )
    exact_tail: int | None = option(
        None,
        "last tokens of a prompt that keep their own too, with own (default: 64, or 0 where "
        "half of --max-length is no longer than that)",
        metavar="W",
    )
    max_perplexity_loss: str | None = option(
        None,
        "recommend the cheapest cut that loses no more of the teacher's perplexity, its standard "
        "error included, such as 2%% (default: 2%%, if --max-far-loss is not given either)",
        metavar="SHARE",
    )
    max_far_loss: float | None = option(
        None,
        "the same for the tokens that depend on the far part of a row (default: 0.15, if "
        "--max-perplexity-loss is not given either)",
        metavar="NATS",
    )
    init: Init = option(
        "closed-form", "start of the students, as in training (default: %(default)s)"
    )
    calibration_tokens: int | None = option(
        None,
        "tokens for --init closed-form, as far as the text goes (default: 64 per entry of "
        "the hidden state)",
        metavar="N",
        at_least=1,
    )
    rows: int = option(16, "packed rows of text to measure on (default: %(default)s)", at_least=1)
    max_length: int = option(512, "tokens in a row (default: %(default)s)", at_least=1)
    prompt_length: int | None = option(
        None,
        "length of the prompt for which prefill FLOPs are counted (default: 8192, or what the "
        "model has positions for)",
        at_least=1,
    )
    mesh: MeshShape = option(
        MeshShape(),
        "devices, as in training: DATAxMODEL or named axes (default: %(default)s)",
        convert=parse_mesh,
    )
    dtype: Literal["float32", "bfloat16"] | None = option(
        None, "dtype of the weights (default: bfloat16 on accelerators, float32 on a CPU)"
    )
    output_dir: Path | None = option(
        None,
        "where analysis.json, written after each student, and analysis.png go (default: "
        "runs/analyze-MODEL)",
    )

    def __post_init__(self):
        check_calibration_tokens(self.calibration_tokens, self.init)
