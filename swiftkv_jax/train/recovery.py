"""Checkpoints of a run: saved in the background, atomic, and refused when they belong to another run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from ..checkpoints.digest import digest
from ..errors import CheckpointError, UsageError
from .recipe import Recipe
from .step import TrainState

_STATE = "state"


class RunCheckpoints:
    """The newest `save_total_limit` training states under `output_dir/checkpoints`.

    Each carries the run's fingerprint (base weights, data, and the settings that steer the optimisation) and a digest per
    leaf. The mesh is not part of it: a run may continue on another.
    """

    def __init__(self, recipe: Recipe, fingerprint: dict[str, Any]):
        self._fingerprint = fingerprint
        self._folder = (recipe.output_dir / "checkpoints").absolute()
        newest: Any = ocp.training.preservation_policies.LatestN(recipe.save_total_limit)
        self._checkpointer = ocp.training.Checkpointer(str(self._folder), preservation_policy=newest, cleanup_tmp_directories=True)
        found = self._checkpointer.latest is not None
        if recipe.resume == "must" and not found:
            raise UsageError(f"--resume must: no checkpoint in {self._folder}")
        if recipe.resume == "never" and found:
            raise UsageError(f"--resume never: {self._folder} holds checkpoints; name another --output-dir, or delete it")

    def restore(self, shapes: TrainState, shardings: TrainState) -> TrainState | None:
        """The newest state, on the given shardings; None if there is none.

        Raises `CheckpointError` if it was made by a run with another fingerprint, or if a leaf is not what was saved.
        """
        latest = self._checkpointer.latest
        if latest is None:
            return None
        where = f"{self._folder / str(latest.step)}"
        metadata: Any = self._checkpointer.metadata(latest).custom_metadata
        self._check_fingerprint(metadata["fingerprint"], where)
        abstract = jax.tree.map(lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes, shardings)
        try:
            state = self._checkpointer.load_checkpointables(latest, {_STATE: _as_dict(abstract)})[_STATE]
        except Exception as error:  # Orbax wraps the true reason; whatever it is, this checkpoint cannot be read
            reason = str(error.__cause__ or error).splitlines()[0]
            raise CheckpointError(f"{where}: cannot be read ({reason}); delete it to continue from the one before") from error
        for name, leaf in state.items():
            if digest(leaf) != metadata["digests"][name]:
                raise CheckpointError(f"{where}: {name} is damaged; delete that folder to continue from the one before")
        return jax.tree.unflatten(jax.tree.structure(shapes), [state[name] for name in _as_dict(shapes)])

    def save(self, state: TrainState) -> None:
        """Start saving; returns before it is done. Saving a step twice does nothing."""
        step = int(state.step)
        if self._checkpointer.latest is not None and self._checkpointer.latest.step == step:
            return
        leaves = _as_dict(state)
        metadata = {"fingerprint": self._fingerprint, "digests": {name: digest(leaf) for name, leaf in leaves.items()}}
        # Forced, because Orbax would otherwise leave out a step that comes while the one before is still being written.
        self._checkpointer.save_checkpointables_async(step, {_STATE: leaves}, custom_metadata=metadata, force=True)

    def close(self) -> None:
        """Wait until everything is on disk."""
        self._checkpointer.close()

    def _check_fingerprint(self, found: dict[str, Any], where: str) -> None:
        wanted = self._fingerprint
        names = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
        different = [f"{name} was {found.get(name)} and is now {wanted.get(name)}" for name in names]
        if different:
            raise CheckpointError(f"{where} belongs to another run ({'; '.join(different)}); name another --output-dir")


def _as_dict(state: TrainState) -> dict[str, Any]:
    """Leaves by path, in the order of the tree: what Orbax stores reads the same in every version of the dataclass."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def prepare_folder(folder: Path) -> None:
    """Make the output folder. Raises `UsageError` if the path is a file or cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise UsageError(f"--output-dir {folder}: {error.strerror}") from None
