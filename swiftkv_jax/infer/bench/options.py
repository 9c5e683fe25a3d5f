"""`python -m swiftkv_jax.infer bench MODE`: how fast it is, SwiftKV and its teacher side by side.

    prefill   prompts into the cache, nothing else running; and the time to the first token of one
              prompt alone
    decode    the time per output token of --batch rows of --input-len tokens
    offline   --num-prompts requests at once, continuous batching
    latency   requests that arrive at --request-rate: TTFT, TPOT, inter-token and end-to-end times

Every figure stands beside what the same devices reach in a large matrix product and a copy,
measured before and after. A model without weights will do:

    python -m swiftkv_jax.infer bench prefill --config llama-3.1-8b --load-format dummy \\
        --input-len 512,2k,8k -o result.json

The table goes to standard output, all raw numbers to -o. Prompts are random, and no two are the
same: nothing comes from the prefix cache. Both variants get the same prompts. They take turns,
first one then the other, where both fit into memory; otherwise they run one after the other.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any, Literal

from ...cli import token_count
from ...cli.fields import add_flags, given, group, option
from ...cli.model_options import ModelOptions
from ...errors import UsageError
from ...plan.presets import PRESETS
from ..engine.options import OFFLINE_PREFILL_CHUNKS, EngineOptions
from .cells import ALONE, MODES, QUEUED, STUDENT, TEACHER, Cell, Mode

VARIANTS = {"on": STUDENT, "off": TEACHER}
"""Values of --swiftkv, and the variants that they measure."""
_MODES_OF: dict[str, tuple[tuple[Mode, ...], str]] = {
    "batch": (ALONE, ": `max_num_seqs` says how many rows run together"),
    "max_num_seqs": (QUEUED, ": `batch` says how many rows run together"),
    "num_prompts": (QUEUED, ": `batch` says how many there are"),
    "request_rate": (("latency",), ""),
    "max_concurrency": (("latency",), ""),
    "prediction_error": (("decode",), ""),
    "output_len": (("decode", *QUEUED), ", which ends where the first token begins"),
}
"""Options that go with some modes only: (those modes, what follows in the error)."""


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


def parse_counts(text: str) -> tuple[int, ...]:
    counts = text.split(",")
    if not all(count.isdecimal() and int(count) for count in counts):
        raise UsageError(f"{text!r} is not a list of whole numbers from 1 up")
    return tuple(map(int, counts))


def parse_rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = (math.nan,)
    if not all(rate > 0 for rate in rates):
        raise UsageError(f"{text!r} is not a list of requests a second, such as 0.5,2,inf")
    return rates


def parse_share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise UsageError(f"{text!r} is not a share from 0 to 1")
    return share


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
        None, "offline and latency: requests (default: 64)", metavar="N", at_least=1
    )
    request_rate: tuple[float, ...] | None = option(
        None,
        "latency: requests a second, or inf (default: 1)",
        metavar="R,...",
        parse=parse_rates,
    )
    max_concurrency: int | None = option(
        None, "latency: most requests inside at a time", metavar="N", at_least=1
    )
    prediction_error: float | None = option(
        None,
        "decode: each row gets its own answer as prediction, this share of it wrong; "
        "with --speculative-config",
        metavar="SHARE",
        parse=parse_share,
    )
    repetitions: int = option(
        5,
        "repetitions of every measurement (default: %(default)s)",
        metavar="N",
        names=("--repetitions", "-r"),
        at_least=1,
    )
    seed: int = option(0, "seed of the prompts and arrivals (default: %(default)s)", at_least=0)
    output: Path | None = option(
        None,
        "every raw number, and what was measured where",
        metavar="JSON",
        names=("--output", "-o"),
    )

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> BenchOptions:
        """Read the arguments of `add_arguments`. Raises `UsageError`."""
        model = dataclasses.replace(ModelOptions.from_args(args), swiftkv="auto")
        engine = given(EngineOptions, args)
        return cls(mode=args.mode, model=model, engine=engine, **given(cls, args))

    @property
    def cut(self) -> dict[str, int]:
        """The options of the cut that were given, as `add_swiftkv` and `choose_cut` take them."""
        names = ("num_key_value_layers", "key_value_group_size", "prompt_attention_layers")
        names += ("prompt_mlp_neurons", "boundary_taps")
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("mode", choices=MODES, help="what to measure: see above")
    add_flags(parser, ModelOptions, leave_out=("adapter", "swiftkv"))
    add_flags(group(parser, "what to measure"), BenchOptions)
    add_flags(parser, EngineOptions)


def plan(options: BenchOptions) -> tuple[EngineOptions, list[Cell]]:
    """The engine's options and the cells, in the order in which they run.

    The shapes of the engine are those of the cells: no row longer, no call larger than what is
    measured. Raises `UsageError` for options that do not go with the mode.
    """
    mode = options.mode
    given_options = vars(options) | options.engine
    for name, (modes, hint) in _MODES_OF.items():
        if given_options.get(name) is not None and mode not in modes:
            raise UsageError(f"`{name}` is for {' and '.join(modes)}, not for {mode}{hint}")
    if options.prediction_error is not None and options.engine.get("speculative") is None:
        raise UsageError("`prediction_error` needs `speculative`")
    defaults: dict[str, Any] = {}
    if mode == "prefill":
        defaults["decode_steps"] = 1
    if mode == "offline":
        defaults["max_prefill_chunks"] = OFFLINE_PREFILL_CHUNKS
    steps = EngineOptions(**defaults | options.engine).decode_steps
    cells = _cells(options, steps)
    defaults["max_model_len"] = max(cell.length for cell in cells)
    if mode in ALONE:
        dp_size = options.model.mesh.rows
        batches = {cell.prompts for cell in cells}
        defaults["max_num_seqs"] = max(batches)
        defaults["decode_rows"] = tuple(sorted({-(-batch // dp_size) for batch in batches}))
    return EngineOptions(**defaults | options.engine), cells


def _cells(options: BenchOptions, decode_steps: int) -> list[Cell]:
    """One cell for each combination of lengths, batches and rates. Raises `UsageError` for an
    output too short to time."""
    new = options.output_len or 128
    if options.mode == "prefill":
        new = 1
    elif options.mode == "decode":
        if new < 2 * decode_steps:
            raise UsageError(
                f"`output_len`={new} must be at least {2 * decode_steps}: two calls of "
                f"`decode_steps`={decode_steps}"
            )
        new = -(-new // decode_steps) * decode_steps
    if options.mode in ALONE:
        pairs = itertools.product(options.input_len, options.batch or (1,))
        return [
            Cell(length, new, batch, prediction_error=options.prediction_error)
            for length, batch in pairs
        ]
    prompts = options.num_prompts or 64
    if options.mode == "offline":
        return [Cell(length, new, prompts) for length in options.input_len]
    pairs = itertools.product(options.input_len, options.request_rate or (1.0,))
    return [Cell(length, new, prompts, rate, options.max_concurrency) for length, rate in pairs]
