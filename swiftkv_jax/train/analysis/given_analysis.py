"""The recommendation of an analysis that was made before, and the recipe that takes it."""

from __future__ import annotations

import dataclasses
import logging
import math
from pathlib import Path
from typing import Any, NamedTuple

from ...checkpoints.hub import repository_of
from ...errors import CheckpointError, DataError, UsageError
from ...model.config import GENERATED_KV, Config
from ...model.cut import CUT_FIELDS, describe_cut
from ...process.json_files import read_json
from ..loss.quality import PerplexityLoss
from ..run.setup import cut_model
from ..run_options import RunOptions
from .recommendation import Recommendation

logger = logging.getLogger(__name__)

ANALYSIS = "analysis.json"
FOLDER = "analysis"
"""Folder of a run's own analysis, in its output folder."""

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "float | None": "a number or null",
    "bool": "true or false",
    "GeneratedKV": " or ".join(GENERATED_KV),
}
"""Descriptions of JSON values by the types of `Recommendation`."""


class GivenAnalysis(NamedTuple):
    """The parts of `analysis.json` that a run needs."""

    model: str
    """The path of the model that was measured."""
    num_layers: int
    recommendation: Recommendation
    document: dict[str, Any]
    """All of it, as it is."""


def read_analysis(folder: Path) -> GivenAnalysis:
    """The analysis in a folder, or in its file. Raises `UsageError` if there is none or it has no
    recommendation, `DataError` naming the file and the field for what is none of an analysis."""
    file = folder / ANALYSIS if folder.is_dir() else folder
    if not file.exists():
        raise UsageError(f"`analysis`={folder}: no {ANALYSIS} there; run swiftkv train analyze")
    try:
        found = read_json(file)
    except CheckpointError as error:
        raise DataError(str(error)) from None
    recommendation = found.get("recommendation")
    if recommendation is None:
        raise UsageError(
            f"`analysis`={folder}: no recommendation in {file.name}; run swiftkv train analyze"
        )
    if not isinstance(recommendation, dict):
        raise DataError(f"{file}: recommendation={recommendation!r}: expected a JSON object")
    num_layers = _checked(file, "num_layers", found.get("num_layers"), "int")
    if not isinstance(model := found.get("model"), str):
        raise DataError(f"{file}: model={model!r}: expected a path")
    fields = {
        field.name: _checked(
            file, f"recommendation.{field.name}", recommendation.get(field.name), str(field.type)
        )
        for field in dataclasses.fields(Recommendation)
    }
    return GivenAnalysis(model, num_layers, Recommendation(**fields), found)


def _checked(file: Path, name: str, value: Any, kind: str) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    fits = {
        "int": number and isinstance(value, int) and value >= 0,
        "float": number,
        "float | None": number or value is None,
        "bool": isinstance(value, bool),
        "GeneratedKV": value in GENERATED_KV,
    }[kind]
    if not fits:
        raise DataError(f"{file}: {name}={value!r}: expected {_KINDS[kind]}")
    return value


def with_analysis[T: RunOptions](recipe: T, config: Config) -> T:
    """The recipe with the cut that the one in `recipe.analysis` recommends for a model of `config`.

    The log has the recommendation: as a warning if it is not within its budget, or if its loss on
    far tokens is not known. Raises as `read_analysis`, and `UsageError` if the analysis is of a
    model with another number of layers.
    """
    if recipe.analysis is None:
        return recipe
    found = read_analysis(Path(recipe.analysis))
    if found.num_layers != config.num_layers:
        raise UsageError(
            f"`analysis`={recipe.analysis}: it is of a model of {found.num_layers} layers, and "
            f"this one has {config.num_layers}"
        )
    measured = model_name(found.model)
    name = model_name(recipe.model)
    if measured != name:
        logger.warning(
            "`analysis`=%s: it is of the model %s, and this one is %s",
            recipe.analysis,
            measured,
            name,
        )
    return with_recommendation(recipe, config, found.recommendation)


def model_name(model: str) -> str:
    """The last part of a model's name on the Hub, or of its path."""
    repository = repository_of(Path(model))
    return Path(repository[0] if repository else model).resolve().name


def with_recommendation[T: RunOptions](recipe: T, config: Config, chosen: Recommendation) -> T:
    """The recipe with the recommended cut where it names none, which the log says. Raises
    `UsageError` where what it names does not go with the rest."""
    doubtful = not chosen.within_budget or chosen.far_is_unknown
    logger.log(
        logging.WARNING if doubtful else logging.INFO, "%s", chosen.describe(config.num_layers)
    )
    filled = filled_cut(recipe, chosen.cut)
    cut_model(filled, config)
    student = dataclasses.replace(chosen, **{name: getattr(filled, name) for name in CUT_FIELDS})
    logger.info(
        "taking %s; name another with `num_key_value_layers`",
        describe_cut(student, config.num_layers),
    )
    replaced = [
        f"`{name}`={value}"
        for name in CUT_FIELDS
        if (value := getattr(recipe, name)) not in (None, chosen.cut[name])
    ]
    if replaced:
        logger.warning(
            "%s: given instead of what is recommended; the analysis did not measure this student",
            ", ".join(replaced),
        )
    return filled


def filled_cut[T: RunOptions](recipe: T, cut: dict[str, Any]) -> T:
    """The recipe with the fields of `cut` that it does not name. Without prompt attention layers
    there are no neurons, and with `generated_kv`=boundary there is no tail."""
    if recipe.prompt_attention_layers == 0:
        cut = cut | {"prompt_mlp_neurons": 0}
    if recipe.generated_kv == "boundary":
        cut = cut | {"exact_tail": 0}
    missing = {name: value for name, value in cut.items() if getattr(recipe, name) is None}
    return dataclasses.replace(recipe, **missing)


def warn_over_budget(recipe: RunOptions, config: Config, lost: PerplexityLoss, remedy: str) -> None:
    """Log a warning if a student lost a larger share of the teacher's perplexity on held-out text
    than the analysis that recommended its K allows, and not so much that it is warned of anyway."""
    if not lost.is_known or lost.is_too_much:
        return
    folder = Path(recipe.analysis or recipe.output_dir / FOLDER)
    try:
        chosen = read_analysis(folder).recommendation
    except (DataError, UsageError):
        return  # the cut comes from no analysis
    limit = chosen.max_perplexity_loss
    if chosen.num_key_value_layers != config.num_key_value_layers or limit is None:
        return
    if lost.exceeds(limit):
        logger.warning(
            "the student loses %s of perplexity on held-out text, more than the %g%% that the cut "
            "was chosen for: %s",
            lost,
            100 * limit,
            remedy,
        )
