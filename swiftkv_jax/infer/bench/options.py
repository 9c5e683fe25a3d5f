"""Flags of `bench`, and the cells and engine that follow from them."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

from ...cli.model_options import ModelOptions, add_model_arguments
from ...errors import UsageError
from ...presets import PRESETS
from ..commands.engine_options import add_engine_arguments, given_engine_options, token_count
from ..engine.options import EngineOptions
from .cells import MODES, QUEUED, Cell, Mode, make_cells
from .summary import STUDENT, TEACHER

VARIANTS = {"on": STUDENT, "off": TEACHER}
"""Values of --swiftkv, and the variants that they measure."""


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
        """From the arguments of `add_flags`. Raises `UsageError`."""
        names = {field.name for field in dataclasses.fields(cls)} - {"model", "engine", "variants"}
        model = dataclasses.replace(ModelOptions.from_args(args), swiftkv="auto")
        return cls(
            model=model,
            engine=given_engine_options(args),
            variants=tuple(args.swiftkv or (STUDENT, TEACHER)),
            **{name: getattr(args, name) for name in names},
        )

    @property
    def measures_alone(self) -> bool:
        """Whether rows all begin together and nothing else runs: in prefill and decode."""
        return self.mode not in QUEUED


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("mode", choices=MODES, help="what to measure: see above")
    add_model_arguments(parser)
    add = parser.add_argument_group(
        "what to measure", conflict_handler="resolve"
    ).add_argument  # its own --swiftkv
    add(
        "--swiftkv",
        type=_variants,
        default=None,
        metavar="on,off",
        help="which to measure (default: both)",
    )
    add(
        "--config",
        metavar="NAME",
        help=f"one of {', '.join(PRESETS)}, or a folder with a config.json; with --load-format "
        "dummy",
    )
    add(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="dummy: random weights, made on the device",
    )
    add(
        "--num-key-value-layers",
        type=int,
        metavar="K",
        help="cut the model here (default: its own cut, or half of its layers)",
    )
    add(
        "--key-value-group-size",
        type=int,
        metavar="G",
        help="upper layers that share keys and values (default: the model's, or 1)",
    )
    add(
        "--input-len",
        type=_lengths,
        default=[512, 2048],
        metavar="N,...",
        help="tokens of a prompt (default: 512,2k)",
    )
    add(
        "--output-len",
        type=token_count,
        metavar="N",
        help="new tokens of each; not in prefill (default: 128)",
    )
    add(
        "--batch", type=_counts, metavar="N,...", help="prefill: prompts; decode: rows (default: 1)"
    )
    add(
        "--num-prompts",
        type=_count,
        metavar="N",
        help="offline and latency: requests (default: 64)",
    )
    add(
        "--request-rate",
        type=_rates,
        metavar="R,...",
        help="latency: requests a second, or inf (default: 1)",
    )
    add(
        "--max-concurrency",
        type=_count,
        metavar="N",
        help="latency: most requests inside at a time",
    )
    add(
        "--repetitions",
        "-r",
        type=_count,
        default=5,
        metavar="N",
        help="repetitions of every measurement (default: 5)",
    )
    add("--seed", type=_seed, default=0, help="seed of the prompts and arrivals (default: 0)")
    add(
        "--output",
        "-o",
        type=Path,
        metavar="JSON",
        help="every raw number, and what was measured where",
    )
    add("--plot", type=Path, metavar="PNG", help="chart of the table; needs matplotlib")
    add_engine_arguments(parser)


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


def _variants(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(VARIANTS) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} must be on, off, or on,off")
    return [VARIANTS[name] for name in names]


def _lengths(text: str) -> list[int]:
    found = [token_count(part) for part in text.split(",")]
    if min(found) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: a prompt to measure has at least 2 tokens")
    return found


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 up")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = [math.nan]
    if not all(rate > 0 for rate in rates):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of requests a second, such as 0.5,2,inf"
        )
    return rates
