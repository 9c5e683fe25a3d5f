"""The cut of a run for which none is named: the recommendation of an analysis of its own data."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import jax.numpy as jnp
from jax.sharding import Mesh

from ...checkpoints.source import Source
from ...checkpoints.training_run import EXPORT, RECIPE
from ...errors import ConfigError, DataError, UsageError
from ...model.config import Config
from ...model.cut import CUT_FIELDS
from ...model.model import default_dtype
from ...plan.cost import prefill_flops
from ...process.distributed import is_main_process
from ...process.json_files import read_json
from ..loss.quality import MIN_FAR_TOKENS
from ..run.progress import peak_flops
from ..run.setup import cut_model
from ..run_options import RunOptions
from .analyze import (
    ANALYSIS_TOKENS_PER_DIMENSION,
    AnalyzeOptions,
    measure,
    recorded_options,
    report,
    settle,
)
from .given_analysis import (
    FOLDER,
    filled_cut,
    read_analysis,
    with_analysis,
    with_recommendation,
)
from .recommendation import Recommendation

logger = logging.getLogger(__name__)

LONGEST = 30 * 60
"""Seconds that an analysis may take, by its operations, before `fallback` is taken."""
UTILISATION = 0.3
"""Share of the peak that an analysis is assumed to reach."""
STUDENTS = 25
"""About as many as an analysis measures."""


def with_cut[T: RunOptions](recipe: T, source: Source, mesh: Mesh) -> T:
    """The recipe with the recommended cut, if it names none and the model has none.

    What it names of the cut stays. A run that continues has its recorded cut, and one that was
    interrupted before that its own analysis. Where there is no recommendation, or none with
    a loss on far tokens, it is `fallback`: the log says why. Other starts than the closed form keep
    half of the layers, as the authors do. With an `analysis` it is that one's, see `with_analysis`.
    """
    if recipe.analysis is not None:
        return with_analysis(recipe, source.config)
    if recipe.num_key_value_layers is not None or source.config.num_upper_layers:
        return recipe
    recorded = recipe.output_dir / RECIPE
    if recorded.is_file():
        found = read_json(recorded).get("config", {})
        return filled_cut(recipe, {name: found[name] for name in CUT_FIELDS if name in found})
    if (recipe.output_dir / EXPORT).exists():
        return recipe  # which is refused
    if recipe.init != "closed-form":
        logger.warning(
            "half of the layers keep their own keys and values: an analysis is of students in "
            "closed form, not of `init`=%s",
            recipe.init,
        )
        return recipe
    try:
        chosen = _recommendation(recipe, source.config, mesh)
    except _NotRecommendedError as reason:
        kept = fallback(recipe, source.config)
        if kept is None:
            return recipe  # which is refused
        layers = source.config.num_layers
        logger.warning("%d of %d layers keep their own keys and values: %s", kept, layers, reason)
        return filled_cut(recipe, {"num_key_value_layers": kept})
    return with_recommendation(recipe, source.config, chosen)


def fallback(recipe: RunOptions, config: Config) -> int | None:
    """Layers that keep their keys and values where nothing is recommended: three quarters, or the
    most below that go with what the recipe names of the cut; None if none do.

    With 23 of 30 layers SmolLM2-135M recalls as its teacher in closed form; with half it recalls
    next to nothing.
    """
    for kept in range(min(-(-3 * config.num_layers // 4), config.num_layers - 1), 0, -1):
        try:
            cut_model(dataclasses.replace(recipe, num_key_value_layers=kept), config)
        except UsageError:
            continue
        return kept
    return None


class _NotRecommendedError(Exception):
    """Why no cut is recommended."""


def _recommendation(recipe: RunOptions, config: Config, mesh: Mesh) -> Recommendation:
    """Take the recommendation of an analysis in which losses on far tokens are known. Raises
    `_NotRecommendedError`."""
    chosen = _made_before(recipe, config)
    if chosen is None:
        if reason := _takes_too_long(recipe, config, mesh):
            raise _NotRecommendedError(reason)
        try:
            chosen = _analyze(recipe, config, mesh)
        except (ConfigError, DataError, UsageError) as error:
            raise _NotRecommendedError(f"no analysis: {error}") from None
    if chosen is None or chosen.far_is_unknown:
        raise _NotRecommendedError(
            f"too few far tokens to recommend a cut ({MIN_FAR_TOKENS} are needed); run swiftkv "
            f"train analyze with more rows or longer ones, and name its folder with `analysis`"
        )
    return chosen


def _made_before(recipe: RunOptions, config: Config) -> Recommendation | None:
    """The recommendation of this run's own analysis, if one with the same options is there."""
    folder = recipe.output_dir / FOLDER
    options = _options(recipe, config)
    try:
        found = read_analysis(folder)
    except (DataError, UsageError):
        return None
    same = {
        "model": str(Path(recipe.model)),
        "data": list(options.data),
        "dtype": options.dtype,
        "max_length": options.max_length,
        "options": recorded_options(options),
    }
    if found.num_layers != config.num_layers or any(
        found.document.get(name) != value for name, value in same.items()
    ):
        return None
    logger.info("taking the analysis in %s again; remove it to make another", folder)
    return found.recommendation


def _takes_too_long(recipe: RunOptions, config: Config, mesh: Mesh) -> str | None:
    """Why there is no analysis if it would take longer than `LONGEST`; None if it would not."""
    seconds = estimate(config, recipe) / (UTILISATION * _peak(recipe, mesh))
    if seconds <= LONGEST:
        return None
    return (
        f"an analysis would take about {seconds / 60:,.0f} minutes here; run swiftkv train "
        f"analyze with fewer `cuts` or on a faster machine, and name its folder with `analysis`"
    )


def _peak(recipe: RunOptions, mesh: Mesh) -> float:
    return peak_flops(mesh, jnp.dtype(recipe.dtype or default_dtype())).flops


def estimate(config: Config, recipe: RunOptions) -> float:
    """Operations of an analysis, about."""
    options = _options(recipe, config)
    per_row = prefill_flops(config, options.max_length, swiftkv=False)
    logits = 2 * config.vocab_size * config.embed_dim * options.max_length
    fitted = (options.calibration_tokens or 0) / options.max_length
    # Moments and maps of some K, whose teacher's states stay or are computed again, are like this.
    return 3 * fitted * per_row + STUDENTS * options.rows * (per_row / 2 + 2 * logits)


def _options(recipe: RunOptions, config: Config) -> AnalyzeOptions:
    tokens = ANALYSIS_TOKENS_PER_DIMENSION * config.embed_dim
    return AnalyzeOptions(
        model=recipe.model,
        data=recipe.data,
        groups=str(recipe.key_value_group_size or 1),
        generated_kv=recipe.generated_kv or ("own" if recipe.exact_tail else None),
        exact_tail=recipe.exact_tail,
        calibration_tokens=min(recipe.calibration_tokens or tokens, tokens),
        max_length=min(recipe.max_length, AnalyzeOptions.max_length),
        mesh=recipe.mesh,
        dtype=recipe.dtype,
        output_dir=recipe.output_dir / FOLDER,
    )


def _analyze(recipe: RunOptions, config: Config, mesh: Mesh) -> Recommendation | None:
    options = _options(recipe, config)
    settings = settle(options)
    found = measure(options, settings, mesh)
    if is_main_process():
        settings.folder.mkdir(parents=True, exist_ok=True)
        report(found, options)
    return found.recommendation
