"""Open the output folder of a training run as a model: its base model, and the delta of one of its
checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from ..cli.exit import log
from ..config import Config
from ..errors import CheckpointError, UsageError
from . import open_any
from .auxiliary import read_json
from .digest import digest_all
from .source import Source, placements, with_delta
from .states import FOLDER, DamagedError, Metadata, list_steps, read_leaf, read_metadata
from .tensor_map import Leaf, leaves

RECIPE = "recipe.json"
"""The settings of the run: `model`, the path of its base model, and `config`, the model's
architecture and cut."""


def is_run(path: str | os.PathLike[str]) -> bool:
    """Whether a directory is the output folder of a training run."""
    return (Path(path) / RECIPE).is_file()


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
            f"--step {step}: no checkpoint of that step in {path / FOLDER}; {_there(path)}"
        )
    state = path / FOLDER / str(step)
    metadata = read_metadata(state)
    delta_dtype = opened.dtypes["embed"]

    def read_delta(leaf: Leaf, dtype: np.dtype | None, sharding: Sharding) -> jax.Array:
        return _read_delta(state, metadata, leaf, sharding).astype(
            delta_dtype if dtype is None else dtype
        )

    dtypes = {leaf.name: delta_dtype for leaf in _delta(opened.config)}
    return with_delta(_checked(opened, metadata.fingerprint, path), state, dtypes, read_delta)


def _open_base(path: Path, base: str | os.PathLike[str] | None) -> Source:
    """The base model at the run's cut."""
    recipe = read_json(path / RECIPE)
    if not {"model", "config"} <= recipe.keys():
        raise CheckpointError(
            f"{path / RECIPE}: not written by a training run: it has no model and config"
        )
    recorded: dict[str, Any] = recipe["config"]
    where = Path(recipe["model"] if base is None else base)
    if not where.exists():
        said = (
            f"{path / RECIPE} names {where} as the base model"
            if base is None
            else f"--base {where}"
        )
        raise CheckpointError(f"{said}: no such directory here; say where it is with --base DIR")
    config = open_any(where).config.cut(
        recorded["num_key_value_layers"], recorded["key_value_group_size"]
    )
    found = json.loads(json.dumps(dataclasses.asdict(config)))
    if different := [
        f"{name} {found.get(name)}, not {value}"
        for name, value in recorded.items()
        if found.get(name) != value
    ]:
        raise CheckpointError(
            f"{where}: not the base model of {path}: {'; '.join(different)}; say where that is "
            f"with --base DIR"
        )
    return open_any(where, config)


def _newest_intact(path: Path, config: Config) -> int:
    """The newest step whose delta is what was saved. Reads it: five percent of the model,
    typically."""
    damage: list[DamagedError] = []
    where = placements(config, None)
    for step in reversed(run_steps(path)):
        state = path / FOLDER / str(step)
        try:
            metadata = read_metadata(state)
            for leaf in _delta(config):
                _read_delta(state, metadata, leaf, where[leaf.name])
        except DamagedError as error:
            damage.append(error)
            continue
        for error in damage:
            log(f"warning: {error}; using step {step} instead")
        return step
    if damage:
        raise CheckpointError(f"{damage[0]}; no other checkpoint of this run is intact")
    raise CheckpointError(f"{path}: no checkpoint in {path / FOLDER} yet")


def _delta(config: Config) -> tuple[Leaf, ...]:
    return tuple(leaf for leaf in leaves(config) if leaf.is_delta)


def _read_delta(state: Path, metadata: Metadata, leaf: Leaf, sharding: Sharding) -> jax.Array:
    """A leaf of the float32 master copy, checked."""
    name = f"delta.{leaf.name.removeprefix('swiftkv.')}"
    if name not in metadata.digests:
        raise CheckpointError(f"{state}: has no {name}, which the run's {RECIPE} calls for")
    return read_leaf(
        state,
        name,
        jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=sharding),
        metadata.digests[name],
    )


def _checked(base: Source, fingerprint: dict[str, Any], path: Path) -> Source:
    """`base`, compared as a whole with the weights that the run was trained on before the first
    leaf of it is given out."""
    where = placements(base.config, None)

    @functools.cache
    def check() -> None:
        frozen = (
            base.read(leaf, jnp.dtype(fingerprint["dtype"]), where[leaf.name])
            for leaf in base.leaves
            if not leaf.is_delta
        )
        found, expected = digest_all(frozen), fingerprint["base_model"]
        if found != expected:
            raise CheckpointError(
                f"{base.path}: not the weights that {path} was trained on (digest {found}, not "
                f"{expected}); give those with --base DIR"
            )

    def read(leaf: Leaf, dtype: np.dtype | None, sharding: Sharding) -> jax.Array:
        check()
        return base.read(leaf, dtype, sharding)

    return dataclasses.replace(base, read=read)


def _there(path: Path) -> str:
    steps = run_steps(path)
    return f"there are {', '.join(map(str, steps))}" if steps else "there is none"
