"""The cut of a run for which none is named: the recommendation of an analysis of its own data."""

from __future__ import annotations

import dataclasses
import logging

import jax.numpy as jnp
from jax.sharding import Mesh

from ..checkpoints.auxiliary import read_json
from ..checkpoints.source import Source
from ..checkpoints.training_run import EXPORT, RECIPE
from ..config import Config
from ..cost import prefill_flops
from ..cut import CUT_FIELDS
from ..distributed import is_main_process
from ..errors import ConfigError, DataError, UsageError
from ..model import default_dtype
from .analyze import (
    ANALYSIS_TOKENS_PER_DIMENSION,
    AnalyzeOptions,
    Findings,
    measure,
    report,
    settle,
)
from .output_folder import prepare_folder, removed_if_empty
from .progress import peak_flops
from .recipe import Recipe
from .recommendation import describe_cut

logger = logging.getLogger(__name__)

FOLDER = "analysis"
"""In the output folder."""
LONGEST = 30 * 60
"""Seconds that an analysis may take, by its operations, before half of the layers are taken."""
UTILISATION = 0.3
"""Share of the peak that an analysis is assumed to reach."""
STUDENTS = 25
"""About as many as an analysis measures."""


def with_cut(recipe: Recipe, source: Source, mesh: Mesh) -> Recipe:
    """The recipe with the recommended cut, if it names none and the model has none.

    A run that continues has its recorded one. Where there is no recommendation, the recipe stays as
    it is, and half of the layers are taken: the log says why.
    """
    if recipe.num_key_value_layers is not None or source.config.num_upper_layers:
        return recipe
    if (recipe.output_dir / EXPORT).exists():
        return recipe  # which is refused, or finished
    recorded = recipe.output_dir / RECIPE
    if recorded.is_file():
        found = read_json(recorded).get("config", {})
        cut = {name: found[name] for name in CUT_FIELDS if name in found}
        return dataclasses.replace(recipe, **cut)
    if reason := _no_analysis(recipe, source.config, mesh):
        logger.warning("half of the layers keep their own keys and values: %s", reason)
        return recipe
    try:
        with removed_if_empty(recipe.output_dir):
            prepare_folder(recipe.output_dir, recipe.model)
            found = _analyze(recipe, source.config, mesh)
    except (ConfigError, DataError, UsageError) as error:
        found, reason = None, f"no analysis: {error}"
    else:
        reason = "no recommendation: too few far tokens in the data"
    if found is None or found.recommendation is None:
        logger.warning("half of the layers keep their own keys and values: %s", reason)
        return recipe
    chosen, num_layers = found.recommendation, found.num_layers
    level = logging.INFO if chosen.within_budget else logging.WARNING
    logger.log(level, "%s", chosen.describe(num_layers))
    given = {name: getattr(recipe, name) for name in CUT_FIELDS}
    chosen = dataclasses.replace(
        chosen, **{name: value for name, value in given.items() if value is not None}
    )
    logger.info(
        "taking %s; name another with `num_key_value_layers`", describe_cut(chosen, num_layers)
    )
    return dataclasses.replace(recipe, **chosen.cut)


def _no_analysis(recipe: Recipe, config: Config, mesh: Mesh) -> str | None:
    """Why there is no analysis; None if there is one."""
    if recipe.init != "closed-form":
        return f"an analysis is of students in closed form, not of `init`={recipe.init}"
    seconds = estimate(config, recipe) / (UTILISATION * _peak(recipe, mesh))
    if seconds > LONGEST:
        return (
            f"an analysis would take about {seconds / 60:,.0f} minutes here; run swiftkv train "
            f"analyze with fewer `cuts` or on a faster machine, and name its folder with `analysis`"
        )
    return None


def _peak(recipe: Recipe, mesh: Mesh) -> float:
    dtype = jnp.dtype(recipe.dtype) if recipe.dtype else default_dtype()
    return peak_flops(mesh, dtype).flops


def estimate(config: Config, recipe: Recipe) -> float:
    """Operations of an analysis, about."""
    options = _options(recipe, config)
    per_row = prefill_flops(config, options.max_length, swiftkv=False)
    logits = 2 * config.vocab_size * config.embed_dim * options.max_length
    fitted = (options.calibration_tokens or 0) / options.max_length
    # Moments and maps of some K, whose teacher's states stay or are computed again, are like this.
    return 3 * fitted * per_row + STUDENTS * options.rows * (per_row / 2 + 2 * logits)


def _options(recipe: Recipe, config: Config) -> AnalyzeOptions:
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


def _analyze(recipe: Recipe, config: Config, mesh: Mesh) -> Findings:
    options = _options(recipe, config)
    settings = settle(options)
    found = measure(options, settings, mesh)
    if is_main_process():
        settings.folder.mkdir(exist_ok=True)
        report(found, options)
    return found
