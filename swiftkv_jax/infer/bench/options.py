"""Options of `bench`, and the cells and engine that follow from them."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any, Literal

from ...cli import token_count
from ...cli.fields import given, option
from ...cli.model_options import ModelOptions
from ...errors import UsageError
from ...plan.presets import PRESETS
from ..engine.options import EngineOptions
from .cells import QUEUED, STUDENT, TEACHER, Cell, Mode, make_cells

VARIANTS = {"on": STUDENT, "off": TEACHER}
"""Values of --swiftkv, and the variants that they measure."""


def parse_variants(text: str) -> tuple[str, ...]:
    names = text.split(",")
    if not set(names) <= set(VARIANTS) or len(set(names)) < len(names):
        raise UsageError(f"{text!r} must be on, off, or on,off")
    return tuple(VARIANTS[name] for name in names)


def parse_lengths(text: str) -> tuple[int, ...]:
    found = tuple(token_count(part) for part in text.split(","))
    if min(found) < 2:
        raise UsageError(f"{text!r}: a prompt to measure has at least 2 tokens")
    return found


def parse_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def parse_seed(text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"{text!r} is not a whole number from 0 up")
    return int(text)


def parse_counts(text: str) -> tuple[int, ...]:
    return tuple(parse_count(part) for part in text.split(","))


def parse_rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = (math.nan,)
    if not all(rate > 0 for rate in rates):
        raise UsageError(f"{text!r} is not a list of requests a second, such as 0.5,2,inf")
    return rates


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Measurements and the model that they are made of. None stands for the mode's default."""

    mode: Mode
    model: ModelOptions
    engine: dict[str, Any]
    """Fields of `EngineOptions` for which there was a flag."""
    swiftkv: tuple[str, ...] = option(
        (STUDENT, TEACHER),
        "which to measure (default: both)",
        metavar="on,off",
        parse=parse_variants,
    )
    """Names of what is measured, in the order of the command line."""
    config: str | None = option(
        None,
        f"one of {', '.join(PRESETS)}, or a folder with a config.json; with --load-format dummy",
        metavar="NAME",
    )
    load_format: Literal["auto", "dummy"] = option(
        "auto", "dummy: random weights, made on the device"
    )
    num_key_value_layers: int | None = option(
        None, "cut the model here (default: its own cut, or half of its layers)", metavar="K"
    )
    key_value_group_size: int | None = option(
        None, "upper layers that share keys and values (default: the model's, or 1)", metavar="G"
    )
    prompt_attention_layers: int | None = option(
        None,
        "upper layers of which prompts run the attention (default: the model's, or 0)",
        metavar="M",
    )
    prompt_mlp_neurons: int | None = option(
        None,
        "neurons of each of their MLPs that prompts run too (default: the model's, or 0)",
        metavar="N",
    )
    boundary_taps: int | None = option(
        None,
        "1: keys from a token's state and the one before (default: the model's, or 0)",
        choices=(0, 1),
    )
    exact_head: int | None = option(
        None,
        "1: the first token of a prompt runs through all layers (default: the model's, or 0)",
        choices=(0, 1),
    )
    input_len: tuple[int, ...] = option(
        (512, 2048), "tokens of a prompt (default: 512,2k)", metavar="N,...", parse=parse_lengths
    )
    output_len: int | None = option(
        None,
        "new tokens of each; not in prefill (default: 128)",
        metavar="N",
        parse=token_count,
    )
    batch: tuple[int, ...] | None = option(
        None, "prefill: prompts; decode: rows (default: 1)", metavar="N,...", parse=parse_counts
    )
    num_prompts: int | None = option(
        None, "offline and latency: requests (default: 64)", metavar="N", parse=parse_count
    )
    request_rate: tuple[float, ...] | None = option(
        None,
        "latency: requests a second, or inf (default: 1)",
        metavar="R,...",
        parse=parse_rates,
    )
    max_concurrency: int | None = option(
        None, "latency: most requests inside at a time", metavar="N", parse=parse_count
    )
    repetitions: int = option(
        5,
        "repetitions of every measurement (default: %(default)s)",
        metavar="N",
        names=("--repetitions", "-r"),
        parse=parse_count,
    )
    seed: int = option(
        0, "seed of the prompts and arrivals (default: %(default)s)", parse=parse_seed
    )
    output: Path | None = option(
        None,
        "every raw number, and what was measured where",
        metavar="JSON",
        names=("--output", "-o"),
    )

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> BenchOptions:
        """Read the arguments of `arguments.add_arguments`. Raises `UsageError`."""
        model = dataclasses.replace(ModelOptions.from_args(args), swiftkv="auto")
        return cls(
            mode=args.mode, model=model, engine=given(EngineOptions, args), **given(cls, args)
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
