"""Options of `bench`, and the cells and engine that follow from them."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from ...cli.fields import given
from ...cli.model_options import ModelOptions
from ...errors import UsageError
from ..engine.options import EngineOptions
from .cells import QUEUED, STUDENT, TEACHER, Cell, Mode, make_cells


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Measurements and the model that they are made of. None stands for the mode's default."""

    mode: Mode
    model: ModelOptions
    engine: dict[str, Any]
    """Fields of `EngineOptions` for which there was a flag."""
    variants: tuple[str, ...]
    """Names of what is measured, in the order of the command line."""
    config: str | None
    """Preset or folder of an architecture without weights."""
    load_format: str
    """auto, or dummy for random weights."""
    num_key_value_layers: int | None
    key_value_group_size: int | None
    prompt_attention_layers: int | None
    prompt_mlp_neurons: int | None
    boundary_taps: int | None
    exact_head: int | None
    input_len: list[int]
    output_len: int | None
    batch: list[int] | None
    num_prompts: int | None
    request_rate: list[float] | None
    max_concurrency: int | None
    repetitions: int
    seed: int
    output: Path | None
    plot: Path | None

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> BenchOptions:
        """Read the arguments of `arguments.add_flags`. Raises `UsageError`."""
        names = {field.name for field in dataclasses.fields(cls)} - {"model", "engine", "variants"}
        model = dataclasses.replace(ModelOptions.from_args(args), swiftkv="auto")
        return cls(
            model=model,
            engine=given(EngineOptions, args),
            variants=tuple(args.swiftkv or (STUDENT, TEACHER)),
            **{name: getattr(args, name) for name in names},
        )

    @property
    def measures_alone(self) -> bool:
        """Whether rows all begin together and nothing else runs: in prefill and decode."""
        return self.mode not in QUEUED


def plan(options: BenchOptions) -> tuple[EngineOptions, list[Cell]]:
    """The engine's options and the cells.

    The shapes of the engine are those of the cells: no row longer, no call larger than what is
    measured. Raises `UsageError` for options that do not go with the mode.
    """
    _check_mode(options)
    batches = options.batch or [1]
    defaults: dict[str, Any] = {"decode_steps": 1} if options.mode == "prefill" else {}
    steps = EngineOptions(**defaults | options.engine).decode_steps
    cells = make_cells(
        options.mode,
        input_lens=options.input_len,
        output_len=options.output_len or 128,
        batches=batches,
        num_prompts=options.num_prompts or 64,
        request_rates=options.request_rate or [1.0],
        max_concurrency=options.max_concurrency,
        decode_steps=steps,
    )
    defaults |= {"decode_steps": steps, "max_model_len": max(cell.length for cell in cells)}
    if options.measures_alone:
        dp_size = options.model.mesh.rows
        defaults |= {
            "max_num_seqs": max(batches),
            "decode_rows": tuple(sorted({-(-batch // dp_size) for batch in batches})),
        }
    return EngineOptions(**defaults | options.engine), cells


def _check_mode(options: BenchOptions) -> None:
    mode = options.mode
    if options.batch and not options.measures_alone:
        raise UsageError(
            f"`batch` is for prefill and decode: in {mode} `max_num_seqs` says how many rows run "
            f"together"
        )
    if "max_num_seqs" in options.engine and options.measures_alone:
        raise UsageError(
            f"`max_num_seqs` is for offline and latency: in {mode} `batch` says how many rows run "
            f"together"
        )
    if mode != "latency" and (options.request_rate or options.max_concurrency):
        raise UsageError(f"`request_rate` and `max_concurrency` are for latency, not for {mode}")
    if options.num_prompts and options.measures_alone:
        raise UsageError(
            f"`num_prompts` is for offline and latency: in {mode} `batch` says how many there are"
        )
    if options.output_len and mode == "prefill":
        raise UsageError("`output_len` is not for prefill, which ends where the first token begins")
