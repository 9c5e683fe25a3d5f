"""The command `train analyze`: the distance of each cut from the model before any distillation."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from ... import cli
from ...checkpoints import load, open_any
from ...checkpoints.hub import local_path
from ...cli.devices import join_and_emulate
from ...cli.fields import given
from ...errors import DataError, UsageError
from ...kernel_check import checked_implementation, forward_configs
from ...model.attention import Attention
from ...model.config import GENERATED_KV, Config, GeneratedKV
from ...model.mesh import dp_size, make_mesh
from ...model.sharding import batch_sharding
from ...process.distributed import check_all_take_part, is_main_process
from ...process.files import write_json
from ...process.plotting import matplotlib_missing
from ...process.provenance import provenance
from ..analyze_options import AnalyzeOptions
from ..data.batches import batches_of
from ..data.excerpts import read_excerpts
from ..data.sources import unweighted
from ..recipe import DEMO, Recipe
from ..report.plots import draw_analysis
from .analysis_table import table
from .cut_list import NamedCut, parse_cuts, possible_cuts
from .cut_search import search
from .given_analysis import ANALYSIS, model_name
from .recommendation import Budget, Recommendation, parse_budget, recommend
from .sweep import Analysis, Sweep

logger = logging.getLogger(__name__)

CUTS = "37.5%,50%,62.5%,75%,87.5%"
"""Cuts that are measured where none are named."""
ANALYSIS_TOKENS_PER_DIMENSION = 64
"""Calibration tokens per entry of the hidden state, by default: a quarter of those that a delta is
fitted to, so that an analysis takes minutes. Losses are a little higher with fewer."""
EXACT_TAIL = 64
"""`Config.exact_tail` of the students that keep their own keys and values, by default."""
STATES_BYTES = 2**31
"""Bytes of one batch's hidden states at all layers, on one device: the rows of a batch follow."""


@dataclasses.dataclass(frozen=True)
class SweepSettings:
    """Settings of an analysis, by the options and the model's config alone."""

    model: str
    data: tuple[str, ...]
    config: Config
    """The plain Llama: all layers lower."""
    cuts: list[tuple[int, int]]
    """(K, g) of each cut."""
    named: list[NamedCut]
    """Its K, as they were asked for."""
    generated: tuple[GeneratedKV, ...]
    exact_tail: int
    budget: Budget
    prompt_length: int
    folder: Path


class Findings(NamedTuple):
    """Results of an analysis."""

    analysis: Analysis
    recommendation: Recommendation | None
    """None where nothing can be said about the budget."""
    settings: SweepSettings

    @property
    def num_layers(self) -> int:
        return self.settings.config.num_layers


def main(args: argparse.Namespace) -> int:
    return analyze(AnalyzeOptions(**given(AnalyzeOptions, args)))


def analyze(options: AnalyzeOptions) -> int:
    """Print the table and write the files. Returns the exit code. Raises `UsageError` for options
    that do not fit the model, `DataError` for text that does not suffice."""
    for text in options.data:
        unweighted("data", text)
    join_and_emulate(options.mesh)
    mesh = make_mesh(options.mesh)
    settings = settle(options)
    check_all_take_part(mesh)
    settings.folder.mkdir(parents=True, exist_ok=True)
    found = measure(options, settings, mesh, keep=True)
    if is_main_process():
        report(found, options)
    return cli.OK


def report(found: Findings, options: AnalyzeOptions) -> None:
    """Print the table and the conclusion, and write the files."""
    print(table(found.analysis, found.num_layers, found.settings.budget, found.recommendation))
    print(conclusion(found, options))
    write(found, options)


def measure(
    options: AnalyzeOptions, settings: SweepSettings, mesh: Mesh, *, keep: bool = False
) -> Findings:
    """Run the analysis. Raises `DataError` for text that does not suffice.

    `keep`: write `analysis.json` after each student already, into the folder, which exists. What
    was measured is there after an interruption or a failure, and the log says so.
    """
    config = settings.config
    model = load(settings.model, dtype=options.dtype, mesh=mesh, config=config)
    wanted = options.calibration_tokens or ANALYSIS_TOKENS_PER_DIMENSION * config.embed_dim
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
    if "own" in settings.generated and options.exact_tail is None and not settings.exact_tail:
        logger.info(
            "`exact_tail` is 0, not %d: a measured prompt, half of `max_length`=%d, is no longer",
            EXACT_TAIL,
            options.max_length,
        )

    configs = forward_configs(config, model.dtype, mesh)
    implementation = checked_implementation(None, configs, mesh.local_devices[0])
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
    sweep = Sweep(
        config,
        model.llama,
        measured,
        prompt_length=settings.prompt_length,
        attention=Attention(mesh, implementation),
        init=options.init,
        calibration=calibration,
        exact_tail=settings.exact_tail,
        lowest=min(k for k, _ in settings.cuts) if options.cuts is not None else 1,
    )
    keep = keep and is_main_process()

    def write_so_far() -> None:
        so_far = sweep.summary(sweep.results, finished=False)
        write_document(Findings(so_far, None, settings), options, finished=False)

    if keep:
        sweep.on_result = write_so_far
    named = options.cuts is not None
    try:
        cuts = search(sweep, settings.cuts, settings.generated, settings.budget, named=named)
        analysis = sweep.summary(cuts)
    except BaseException:
        if keep and sweep.results:
            logger.warning(
                "not finished: students measured so far, %d, are in %s, without a recommendation",
                len(sweep.results),
                settings.folder / ANALYSIS,
            )
        raise
    recommendation = None
    if options.init == "closed-form":
        recommendation = recommend(cuts, settings.budget, analysis.far_tokens)
    return Findings(analysis, recommendation, settings)


def conclusion(found: Findings, options: AnalyzeOptions) -> str:
    """The recommendation in a sentence, and the command to run next."""
    recommendation = found.recommendation
    budget = found.settings.budget
    if options.init != "closed-form":
        return "no recommendation: it needs students in closed form (`init`)"
    if recommendation is None:
        return f"no recommendation within {budget}: too few far tokens; measure more rows"
    command = recommendation.command(*_next_run(options, found.settings))
    return f"{recommendation.describe(found.num_layers)}\nnext: {command}"


def _next_run(
    options: AnalyzeOptions, settings: SweepSettings
) -> tuple[str | None, tuple[str, ...], str | None, int | None]:
    """(model, data, revision, length of rows) of the run to make next. Rows are as long as by
    default, where the model has positions for that; without a named model the default is short."""
    positions = settings.config.max_position_embeddings
    too_few = options.model is not None and positions < Recipe.max_length
    return options.model, options.data, options.revision, positions if too_few else None


def settle(options: AnalyzeOptions) -> SweepSettings:
    """Raises `UsageError` for options that do not fit the model."""
    if options.model and not options.data:
        raise UsageError("`model` also needs `data`")
    model = str(local_path(options.model or DEMO.model, options.revision))
    found = open_any(model).config
    config = dataclasses.replace(found.cut(found.num_layers), generated_kv="boundary", exact_tail=0)
    named = parse_cuts(CUTS if options.cuts is None else options.cuts, config.num_layers)
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
    folder = options.output_dir or Path("runs") / f"analyze-{model_name(model)}"
    data = options.data or DEMO.data
    length = checked_lengths(options, config)
    generated, tail = choose_generated(options)
    budget = parse_budget(options.max_perplexity_loss, options.max_far_loss)
    return SweepSettings(model, data, config, cuts, named, generated, tail, budget, length, folder)


def choose_generated(options: AnalyzeOptions) -> tuple[tuple[GeneratedKV, ...], int]:
    """Return the values of `Config.generated_kv` that are measured, and the exact tail. Raises
    `UsageError` for a tail that a measured prompt, half of a row, does not exceed."""
    tail = options.exact_tail
    prompt = options.max_length // 2
    if options.generated_kv == "boundary":
        if tail:
            raise UsageError(f"`exact_tail`={tail} needs `generated_kv`=own")
        return ("boundary",), 0
    if tail is None:
        tail = EXACT_TAIL if EXACT_TAIL < prompt else 0
    if not 0 <= tail < max(prompt, 1):
        raise UsageError(
            f"`exact_tail`={tail}: must be from 0 to below {prompt}, the length of a measured "
            f"prompt, which is half of `max_length`"
        )
    return (GENERATED_KV if options.generated_kv is None else ("own",)), tail


def parse_groups(text: str) -> list[int]:
    """`"1,2,4"` -> [1, 2, 4]. Raises `UsageError`."""
    if not all(part.strip().isdecimal() and int(part) for part in text.split(",")):
        raise UsageError(f"`groups`={text!r}: expected whole numbers from 1, for example 1,2,4")
    return [int(part) for part in text.split(",")]


def checked_lengths(options: AnalyzeOptions, config: Config) -> int:
    """The prompt length. Raises `UsageError` for rows and prompts longer than the model's."""
    prompt_length = options.prompt_length
    if prompt_length is None:
        prompt_length = min(8192, config.max_position_embeddings)
    for name, value in {"max_length": options.max_length, "prompt_length": prompt_length}.items():
        if value > config.max_position_embeddings:
            raise UsageError(
                f"`{name}`={value}: this model has {config.max_position_embeddings} positions"
            )
    if config.num_layers < 2:
        raise UsageError("`model`: a model of one layer has no upper layers to cut")
    return prompt_length


def write(found: Findings, options: AnalyzeOptions) -> None:
    """`analysis.json`, and `analysis.png` where matplotlib is installed."""
    write_document(found, options)
    folder = found.settings.folder
    if missing := matplotlib_missing():
        logger.info("no analysis.png: %s", missing)
    else:
        draw_analysis(found.analysis, folder / "analysis.png", found.recommendation)
    logger.info("written to %s", folder)


def write_document(found: Findings, options: AnalyzeOptions, *, finished: bool = True) -> None:
    """`analysis.json`."""
    analysis, recommendation, settings = found
    facts = provenance() | {
        "finished": finished,
        "model": settings.model,
        "data": settings.data,
        "dtype": options.dtype,
        "max_length": options.max_length,
        "prompt_length": settings.prompt_length,
        "num_layers": found.num_layers,
        "options": recorded_options(options),
        "budget": {
            "max_perplexity_loss": settings.budget.perplexity_loss,
            "max_far_loss": settings.budget.far_loss,
        },
        "recommendation": recommendation
        and recommendation.record(found.num_layers, *_next_run(options, settings)),
    }
    write_json(settings.folder / ANALYSIS, facts | dataclasses.asdict(analysis))


def recorded_options(options: AnalyzeOptions) -> dict[str, Any]:
    """Return the options on which the figures depend, as `analysis.json` has them beside its own
    fields."""
    elsewhere = "model", "revision", "data", "dtype", "max_length", "prompt_length", "mesh"
    fields = dataclasses.asdict(options)
    return {name: value for name, value in fields.items() if name not in (*elsewhere, "output_dir")}
