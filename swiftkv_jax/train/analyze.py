"""The command `train analyze`: the distance of each cut from the model before any distillation."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .. import cli
from ..attention import Attention
from ..checkpoints import load, open_any
from ..checkpoints.hub import local_path, repository_of
from ..cli.devices import join_and_emulate
from ..config import Config
from ..distributed import check_all_take_part, is_main_process
from ..errors import DataError, UsageError
from ..io.files import write_json
from ..io.plotting import matplotlib_missing
from ..kernel_check import checked_implementation, forward_configs
from ..mesh import MeshShape, dp_size, make_mesh, parse_mesh
from ..sharding import batch_sharding
from .cut_list import NamedCut, parse_cuts
from .data.batches import batches_of
from .data.excerpts import read_excerpts
from .far_tokens import FAR_NATS, MAX_FAR_LOSS, MIN_FAR_TOKENS, far_cell, loses_too_much
from .plots import draw_analysis
from .recipe import DEMO, TOKENS_PER_DIMENSION, Init, check_calibration_tokens
from .sweep import Analysis, CutResult, analyze_cuts, possible_cuts

logger = logging.getLogger(__name__)

STATES_BYTES = 2**31
"""Bytes of one batch's hidden states at all layers, on one device: the rows of a batch follow."""


@dataclasses.dataclass(frozen=True)
class AnalyzeOptions:
    """The arguments of the command."""

    model: str | None
    """None is the demo model."""
    revision: str | None
    data: tuple[str, ...]
    cuts: str
    groups: str
    init: Init
    calibration_tokens: int | None
    """None is `TOKENS_PER_DIMENSION` for each entry of the hidden state."""
    rows: int
    """Rows to measure on."""
    max_length: int
    """Tokens in a row."""
    prompt_length: int | None
    """None is 8192, or what the model has positions for."""
    mesh: MeshShape
    dtype: str | None
    output_dir: Path | None


@dataclasses.dataclass(frozen=True)
class SweepSettings:
    """What is analysed, according to the options and the model's config alone."""

    model: str
    data: tuple[str, ...]
    config: Config
    """The plain Llama: all layers lower."""
    cuts: list[tuple[int, int]]
    """(K, g) of each cut."""
    named: list[NamedCut]
    """Its K, as they were asked for."""
    prompt_length: int
    folder: Path


def main(args: argparse.Namespace) -> int:
    fields = {name: getattr(args, name) for name in AnalyzeOptions.__dataclass_fields__}
    fields |= {"mesh": parse_mesh(args.mesh), "data": tuple(args.data or ())}
    return analyze(AnalyzeOptions(**fields))


def analyze(options: AnalyzeOptions) -> int:
    """Print the table and write the files. Returns the exit code. Raises `UsageError` for options
    that do not fit the model, `DataError` for text that does not suffice."""
    join_and_emulate(options.mesh)
    mesh, settings = make_mesh(options.mesh), settle(options)
    check_all_take_part(mesh)
    settings.folder.mkdir(parents=True, exist_ok=True)
    config = settings.config
    model = load(settings.model, dtype=options.dtype, mesh=mesh, config=config)
    wanted = options.calibration_tokens or TOKENS_PER_DIMENSION * config.embed_dim
    excerpts = read_excerpts(
        settings.data,
        model.tokenizer,
        options.max_length,
        options.rows,
        wanted if options.init == "closed-form" else 0,
    )
    if options.init == "closed-form" and not excerpts.calibration:
        raise DataError(
            f"`data`={' '.join(settings.data)}: no text is left beside the rows that are measured; "
            f"more text, fewer `rows`, or another `init` than closed-form"
        )
    if any("%" in cut.name for cut in settings.named):
        logger.info("of %d layers %s", config.num_layers, ", ".join(map(str, settings.named)))

    configs = forward_configs(config, model.dtype, mesh)
    attention = checked_implementation(None, configs, mesh.local_devices[0])
    bytes_per_row = (
        (config.num_layers + 1) * options.max_length * config.embed_dim * model.dtype.itemsize
    )
    measured_rows = -(-len(excerpts.measured) // dp_size(mesh))
    per_device = max(1, min(STATES_BYTES // bytes_per_row, measured_rows))
    measured, calibration = (
        [
            jax.device_put(batch, batch_sharding(mesh))
            for batch in batches_of(rows, per_device * dp_size(mesh), options.max_length)
        ]
        for rows in excerpts
    )
    analysis = analyze_cuts(
        config,
        model.llama,
        measured,
        settings.cuts,
        prompt_length=settings.prompt_length,
        attention=Attention(mesh, attention),
        init=options.init,
        calibration=calibration,
    )
    if is_main_process():
        print(table(analysis, config.num_layers))
        facts = {
            "model": settings.model,
            "data": settings.data,
            "dtype": str(model.dtype),
            "prompt_length": settings.prompt_length,
        }
        write(settings.folder, analysis, facts)
    return cli.OK


def settle(options: AnalyzeOptions) -> SweepSettings:
    """Raises `UsageError` for options that do not fit the model."""
    if options.model and not options.data:
        raise UsageError("`model` also needs `data`")
    check_calibration_tokens(options.calibration_tokens, options.init)
    model = str(local_path(options.model or DEMO.model, options.revision))
    found = open_any(model).config
    config = found.cut(found.num_layers)
    named = parse_cuts(options.cuts, config.num_layers)
    cuts, reasons = possible_cuts(
        config,
        [cut.k for cut in named],
        parse_groups(options.groups),
        options.init,
    )
    if not cuts:
        why = "; ".join(reasons.values())
        raise UsageError(f"`groups`={options.groups}: none fits at any of the cuts: {why}")
    for reason in reasons.values():
        logger.warning("left out: %s", reason)
    repository = repository_of(Path(model))
    name = Path(repository[0] if repository else model).resolve().name
    folder = options.output_dir or Path("runs") / f"analyze-{name}"
    data, length = options.data or DEMO.data, checked_lengths(options, config)
    return SweepSettings(model, data, config, cuts, named, length, folder)


def parse_groups(text: str) -> list[int]:
    """`"1,2,4"` -> [1, 2, 4]. Raises `UsageError`."""
    if not all(part.strip().isdecimal() and int(part) for part in text.split(",")):
        raise UsageError(f"`groups`={text!r}: expected whole numbers from 1, for example 1,2,4")
    return [int(part) for part in text.split(",")]


def checked_lengths(options: AnalyzeOptions, config: Config) -> int:
    """The prompt length. Raises `UsageError` for numbers below 1 and rows longer than the model."""
    prompt_length = options.prompt_length
    if prompt_length is None:
        prompt_length = min(8192, config.max_position_embeddings)
    lengths = {"max_length": options.max_length, "prompt_length": prompt_length}
    counts = {"rows": options.rows, "calibration_tokens": options.calibration_tokens}
    for name, value in (counts | lengths).items():
        if value is not None and value < 1:
            raise UsageError(f"`{name}`={value}: must be at least 1")
    for name, value in lengths.items():
        if value > config.max_position_embeddings:
            raise UsageError(
                f"`{name}`={value}: this model has {config.max_position_embeddings} positions"
            )
    if config.num_layers < 2:
        raise UsageError("`model`: a model of one layer has no upper layers to cut")
    return prompt_length


def table(analysis: Analysis, num_layers: int) -> str:
    """One line per cut, sorted by K, then g."""
    columns = [
        "K",
        "of layers",
        "g",
        "KL",
        "agreement",
        "perplexity",
        "far nats",
        "prefill FLOPs",
        "KV bytes/token",
        "KV cache",
    ]
    if analysis.calibration_tokens:
        columns += ["R2 of K", "R2 of V"]
    rows = [_cells(cut, num_layers, analysis.far_tokens) for cut in analysis.cuts]
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        for cells in (columns, *rows)
    ]
    title = f"undistilled students, {_describe_init(analysis)}, on {analysis.tokens:,} predicted"
    title += f" tokens; teacher's perplexity {analysis.teacher_perplexity:,.2f}"
    return "\n".join([title, lines[0], "-" * len(lines[0]), *lines[1:], _describe_far(analysis)])


def _describe_far(analysis: Analysis) -> str:
    """Sentences about the far tokens."""
    count = analysis.far_tokens
    text = (
        f"far nats: lost on the {count:,} tokens on which the teacher loses more "
        f"than {FAR_NATS:g} nat without the far part of the row"
    )
    if count < MIN_FAR_TOKENS:
        text += f"; {MIN_FAR_TOKENS} are needed: measure more `rows`, or longer ones (`max_length`)"
    if any(loses_too_much(count, cut.far_nats) for cut in analysis.cuts):
        text += f"; *: more than {MAX_FAR_LOSS:g}: distil it or keep more layers, and measure again"
    return text


def _describe_init(analysis: Analysis) -> str:
    """A phrase for the start of the students."""
    if analysis.init != "closed-form":
        return f"copied ({analysis.init})"
    return f"in closed form from {analysis.calibration_tokens:,} other tokens"


def _cells(cut: CutResult, num_layers: int, far_tokens: int) -> list[str]:
    cells = [
        str(cut.num_key_value_layers),
        f"{cut.num_key_value_layers / num_layers:.1%}",
        str(cut.key_value_group_size),
        f"{cut.kl:.4f}",
        f"{cut.agreement:.1%}",
        f"{cut.student_perplexity:,.2f}",
        far_cell(far_tokens, cut.far_nats) + "*" * loses_too_much(far_tokens, cut.far_nats),
        f"{cut.prefill_flops_share:.1%}",
        f"{cut.kv_bytes_per_token:,}",
        f"{cut.kv_bytes_share:.1%}",
    ]
    if fits := cut.layers[1:] or cut.layers:  # layer K's own are 1
        cells += [
            f"{np.mean([getattr(fit, name) for fit in fits]):.3f}" for name in ("r2_k", "r2_v")
        ]
    return cells


def write(folder: Path, analysis: Analysis, settings: dict[str, Any]) -> None:
    """`analysis.json`, and `analysis.png` where matplotlib is installed."""
    write_json(folder / "analysis.json", settings | dataclasses.asdict(analysis))
    if missing := matplotlib_missing():
        logger.info("no analysis.png: %s", missing)
    else:
        draw_analysis(analysis, folder / "analysis.png")
    logger.info("written to %s", folder)
