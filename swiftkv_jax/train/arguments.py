"""The options of a training or calibration run, from what a command line gives and the defaults."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..plan.presets import PRESETS
from .calibrate_options import CalibrationOptions
from .recipe import Recipe

_NEEDED = {"data": "`data` (a path, or stdlib)", "output_dir": "`output_dir`"}
"""Options that a model needs unless it is the demo's."""


def make_options[T: (Recipe, CalibrationOptions)](
    given: dict[str, Any], *, demo: T, command: str, dry_run: bool
) -> T:
    """The `given` fields over those of `demo` where no model is named, else over the defaults of
    its class. Raises `UsageError`, which names the `command`, for what is missing."""
    if "analysis" in given:
        demo = dataclasses.replace(demo, num_key_value_layers=None)
    if "max_steps" in given and "num_train_epochs" in given:
        raise UsageError("give `max_steps` or `num_train_epochs`, not both")
    if "model" not in given:
        if "revision" in given:
            raise UsageError(f"`revision`={given['revision']} goes with `model`")
        if "num_train_epochs" in given:
            given = given | {"max_steps": None}  # the demo's own number of steps
        if "data" in given and "eval_data" not in given:
            given = given | {"eval_data": None}  # the demo's held-out text belongs to its data
        return dataclasses.replace(demo, **given)
    model = given["model"]
    if dry_run:  # needs the model's config only
        given = {"data": (), "output_dir": Path(".")} | given
    elif model in PRESETS and not Path(model).exists():
        raise UsageError(
            f"`model`={model}: the name of a shape, for `dry_run` only; {command} needs a "
            f"checkpoint directory"
        )
    elif missing := [text for name, text in _NEEDED.items() if name not in given]:
        raise UsageError(f"`model` also needs {' and '.join(missing)}")
    options = type(demo)(**given)  # what is wrong with it is said before a download
    from ..checkpoints.hub import local_path  # imports JAX

    path = local_path(model, options.revision, weights=not dry_run)
    return dataclasses.replace(options, model=str(path))
