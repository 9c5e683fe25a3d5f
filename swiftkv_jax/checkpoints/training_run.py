"""Open the output folder of a training run as a model: its base model, and the delta of one of its
checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from ..errors import CheckpointError, UsageError
from ..model.config import Config
from ..model.cut import CUT_FIELDS
from ..process.json_files import read_json
from . import open_any
from .digest import digest_all
from .source import Reader, Source, shardings, with_delta
from .states import FOLDER, DamagedError, Metadata, list_steps, read_leaf, read_metadata
from .tensor_map import MappedLeaf, leaves

logger = logging.getLogger(__name__)

RECIPE = "recipe.json"
"""The settings of the run: `model`, the path of its base model, and `config`, the model's
architecture and cut."""

CALIBRATION = "calibration.json"
"""Record of what a calibration fitted and measured."""
EXPORT = "model"
"""Folder of the exported model in the output folder of a run or a calibration."""
SPECULATOR = "speculator"
"""Folder of the exported speculator in the output folder of a run."""


def is_run(path: str | os.PathLike[str]) -> bool:
    """True if a directory is the output folder of a training run."""
    return (Path(path) / RECIPE).is_file()


def exported_model(path: Path) -> Path:
    """The exported model in the output folder of a finished run or a calibration; `path` itself if
    it is no such folder."""
    if not (path / EXPORT).is_dir() or (path / "config.json").exists():
        return path
    return path / EXPORT if is_run(path) or (path / CALIBRATION).is_file() else path


def run_steps(path: str | os.PathLike[str]) -> list[int]:
    """The steps that a run has checkpoints of, ascending."""
    return list_steps(Path(path) / FOLDER)


def open_run(
    path: str | os.PathLike[str],
    step: int | None = None,
    base: str | os.PathLike[str] | None = None,
) -> Source:
    """The model that a run had made at `step`; it may still be running. No frozen weights are read
    yet.

    `step` None is the newest intact checkpoint, with a warning about damaged ones. `base` is where
    the base model is if not where the run found it. The delta comes in the base model's dtype
    unless another is asked for. Frozen weights are compared with those that the run was trained on
    when the first of them is read. Raises `CheckpointError` for damage and for another base model,
    `UsageError` if there is no such step.
    """
    path = Path(os.path.abspath(path))
    opened = _open_base(path, base)
    if step is None:
        step = _newest_intact(path, opened.config)
    elif step not in run_steps(path):
        raise UsageError(
            f"`step`={step}: no checkpoint of that step in {path / FOLDER}; {_there(path)}"
        )
    state = path / FOLDER / str(step)
    metadata = read_metadata(state)
    delta_dtype = opened.dtypes["embed"]
    dtypes = {leaf.name: delta_dtype for leaf in _delta(opened.config)}
    checked = dataclasses.replace(opened, reader=_checked(opened, metadata.fingerprint, path))
    return with_delta(checked, state, dtypes, functools.partial(_read_delta, state, metadata))


def _open_base(path: Path, base: str | os.PathLike[str] | None) -> Source:
    """The base model at the run's cut."""
    recipe = read_json(path / RECIPE)
    if not {"model", "config"} <= recipe.keys():
        raise CheckpointError(
            f"{path / RECIPE}: not written by a training run: it has no model and config"
        )
    recorded: dict[str, Any] = recipe["config"]
    where = Path(base or recipe["model"])
    if not where.exists():
        said = f"`base`={where}"
        if base is None:
            said = f"{path / RECIPE} names {where} as the base model"
        raise CheckpointError(f"{said}: no such directory here; give its directory as `base`")
    heads = recorded.get("shared_kv_heads")
    config = dataclasses.replace(
        open_any(where).config,
        shared_kv_heads=None if heads is None else tuple(map(tuple, heads)),
        **{name: recorded.get(name, getattr(Config, name)) for name in CUT_FIELDS},
    )
    if different := config_differences(recorded, config):
        raise CheckpointError(
            f"{where}: not the base model of {path}: {'; '.join(different)}; give that "
            f"one's directory as `base`"
        )
    return open_any(where, config)


def config_differences(recorded: dict[str, Any], config: Config) -> list[str]:
    """How `config` differs from one that was written as JSON, field by field."""
    found = json.loads(json.dumps(dataclasses.asdict(config)))
    return [
        f"{name} {found.get(name)}, not {value}"
        for name, value in recorded.items()
        if found.get(name) != value
    ]


def _newest_intact(path: Path, config: Config) -> int:
    """The newest step whose delta is what was saved. Reads it, with its moments."""
    damage: list[DamagedError] = []
    where = shardings(config, None)
    for step in reversed(run_steps(path)):
        state = path / FOLDER / str(step)
        try:
            metadata = read_metadata(state)
            for leaf in _delta(config):
                _read_delta(state, metadata, leaf, np.dtype(np.float32), where[leaf.name])
        except DamagedError as error:
            damage.append(error)
            continue
        for error in damage:
            logger.warning("%s; using step %d instead", error, step)
        return step
    if damage:
        raise CheckpointError(f"{damage[0]}; no other checkpoint of this run is intact")
    raise CheckpointError(f"{path}: no checkpoint in {path / FOLDER} yet")


def _delta(config: Config) -> tuple[MappedLeaf, ...]:
    return tuple(leaf for leaf in leaves(config) if leaf.is_delta)


def _read_delta(
    state: Path, metadata: Metadata, leaf: MappedLeaf, dtype: np.dtype, sharding: Sharding
) -> jax.Array:
    """One leaf of the delta in a training state: the float32 master copy, checked."""
    name = f"delta.{leaf.name.removeprefix('swiftkv.')}"
    if name not in metadata.digests:
        raise CheckpointError(f"{state}: has no {name}, which the run's {RECIPE} calls for")
    stored = jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=sharding)
    return read_leaf(state, name, stored, metadata.digests[name]).astype(dtype)


def _checked(base: Source, fingerprint: dict[str, Any], run: Path) -> Reader:
    """A reader of the frozen weights of `base`, which are compared as a whole with those that `run`
    was trained on before the first leaf is given out."""

    @functools.cache
    def check() -> None:
        where = shardings(base.config, None)
        frozen = (
            base.read(leaf, jnp.dtype(fingerprint["dtype"]), where[leaf.name])
            for leaf in base.leaves
            if not leaf.is_delta
        )
        found = digest_all(frozen)
        if found != (expected := fingerprint["base_model"]):
            raise CheckpointError(
                f"{base.path}: not the weights that {run} was trained on (digest {found}, not "
                f"{expected}); give those as `base`"
            )

    def read(leaf: MappedLeaf, dtype: np.dtype, sharding: Sharding) -> jax.Array:
        check()
        return base.read(leaf, dtype, sharding)

    return read


def _there(path: Path) -> str:
    return listed(run_steps(path))


def listed(steps: Iterable[int]) -> str:
    """The steps of checkpoints, for an error."""
    numbers = ", ".join(map(str, steps))
    if not numbers:
        return "there is none"
    return f"there are {numbers}"
