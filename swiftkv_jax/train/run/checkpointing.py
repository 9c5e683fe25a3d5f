"""Checkpoints of a run: saved in the background, atomic, checked when read, and refused if they
belong to another run."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from ...checkpoints.digest import digest
from ...checkpoints.states import (
    FOLDER,
    STATE,
    DamagedError,
    Metadata,
    list_steps,
    quiet_orbax,
    read_leaf,
    read_metadata,
)
from ...checkpoints.training_run import EXPORT, listed
from ...errors import CheckpointError, UsageError
from ...process.distributed import barrier, is_main_process
from ..recipe import Resume
from .step import TrainState

logger = logging.getLogger(__name__)

DAMAGED = "checkpoints-damaged"
REPLACED = "checkpoints-replaced"
"""Folders beside `checkpoints` for states that are damaged, and for states after the step that
`resume` names."""


class RunCheckpoints:
    """Training states of the run in `folder`, one per saved step: the newest `keep`, and the one
    with the best score.

    Each carries the run's `fingerprint` (base weights, data, and the settings that steer the
    optimisation), a digest per leaf, and its score. The mesh is not part of it: a run may continue
    on another. Call `restore` before anything is saved. With several processes, all of them make
    every call.

    Raises `UsageError` if what is there is not what `resume` asks for.
    """

    def __init__(self, folder: Path, fingerprint: dict[str, Any], *, keep: int, resume: Resume):
        self._output, self._folder = folder.absolute(), folder.absolute() / FOLDER
        self._fingerprint = json.loads(json.dumps(fingerprint))  # as read back: lists for tuples
        self._resume = resume
        self._policy = _NewestAndBest(keep, {})
        self._checkpointer: ocp.training.Checkpointer | None = None
        # The step that is being saved, and Orbax's handle of it.
        self._pending: tuple[int, Any] | None = None
        self._quiet = contextlib.ExitStack()
        check_resume(folder, resume)

    def restore(self, shapes: TrainState, shardings: TrainState) -> TrainState | None:
        """The state to continue from, on the given shardings; None to start from the beginning.

        Damaged states are moved to `checkpoints-damaged`, with a warning, if an older one is
        intact; those after the step that `resume` names go to `checkpoints-replaced`. Raises
        `CheckpointError` if the run has another fingerprint, if no state is intact, or if the one
        that `resume` names is not.
        """
        if isinstance(self._resume, int):
            state = self.load(self._resume, shapes, shardings)
            for step in list_steps(self._folder):
                if step > self._resume:
                    self._move(step, REPLACED)
        else:
            state = self._newest_intact(shapes, shardings)
        self._open()
        return state

    def _newest_intact(self, shapes: TrainState, shardings: TrainState) -> TrainState | None:
        damage: dict[int, DamagedError] = {}
        for step in reversed(list_steps(self._folder)):
            try:
                state = self.load(step, shapes, shardings)
            except DamagedError as error:
                damage[step] = error
                continue
            for damaged, error in damage.items():
                target = self._move(damaged, DAMAGED)
                logger.warning("%s; moved to %s, using step %d instead", error, target, step)
            return state
        if damage:
            newest = next(iter(damage.values()))
            raise CheckpointError(
                f"{newest}; no other checkpoint of this run is intact: name another "
                f"`output_dir` to start again"
            )
        return None

    def _move(self, step: int, kind: str) -> Path:
        """Move a state to a folder of that kind, under a free name: nothing is deleted."""
        names = (str(step) if i == 1 else f"{step}-{i}" for i in itertools.count(1))
        target = next(
            path for path in (self._output / kind / name for name in names) if not path.exists()
        )
        barrier("checkpoint target chosen")
        if is_main_process():
            target.parent.mkdir(exist_ok=True)
            (self._folder / str(step)).rename(target)
        barrier("checkpoint moved")
        return target

    def _open(self) -> None:
        """Make the folder ready for saving."""
        for step in list_steps(self._folder):
            # An older damaged state is not needed now. `load` would report it.
            with contextlib.suppress(DamagedError):
                self._policy.add_score(step, read_metadata(self._folder / str(step)).score)
        if is_main_process():
            # Orbax would do it in the background, and fail a save if files vanish meanwhile.
            for unfinished in self._folder.glob("*.orbax-checkpoint-tmp"):
                _remove(unfinished)
        barrier("checkpoints cleaned")
        self._quiet.enter_context(quiet_orbax())
        policy: Any = self._policy
        self._checkpointer = ocp.training.Checkpointer(
            str(self._folder), preservation_policy=policy
        )

    def load(self, step: int, shapes: TrainState, shardings: TrainState) -> TrainState:
        """The state of one step. Raises `CheckpointError` if it is another run's, or not what was
        saved."""
        self._finish()
        path = self._folder / str(step)
        metadata = read_metadata(path)
        self._check_run(metadata, _by_path(shapes), path)
        abstract = jax.tree.map(
            lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
            shapes,
            shardings,
        )
        leaves = [
            read_leaf(path, name, leaf, metadata.digests[name])
            for name, leaf in _by_path(abstract).items()
        ]
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    def _check_run(self, found: Metadata, wanted: dict[str, Any], path: Path) -> None:
        then = found.fingerprint
        now = self._fingerprint
        names = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
        if names:
            different = "; ".join(
                f"{name} was {then.get(name)} and is now {now.get(name)}" for name in names
            )
            raise CheckpointError(
                f"{path} belongs to another run ({different}); name another `output_dir`"
            )
        if unlike := sorted(found.digests.keys() ^ wanted.keys()):
            raise CheckpointError(
                f"{path} was written by another version of this program (it differs in "
                f"{', '.join(unlike)})"
            )

    def save(self, state: TrainState, *, score: float | None = None) -> None:
        """Start saving; returns before it is done. `score`: finite, lower is better. Saving a step
        twice does nothing.

        Raises `OSError` if this save cannot start or the one before has failed.
        """
        assert self._checkpointer is not None, "restore comes first"
        self._finish()
        step = int(state.step)
        if any(saved.step == step for saved in self._checkpointer.checkpoints):
            return
        leaves = _by_path(state)
        metadata: Any = dataclasses.asdict(
            Metadata(
                self._fingerprint, {name: digest(leaf) for name, leaf in leaves.items()}, score
            )
        )
        self._policy.add_score(step, score)
        try:
            # Forced, because Orbax would otherwise leave out a step that comes while the one before
            # is still being written.
            handle = self._checkpointer.save_checkpointables_async(
                step, {STATE: leaves}, custom_metadata=metadata, force=True
            )
        except Exception as error:
            raise self._save_error(step, error) from error
        self._pending = step, handle

    def add_scores(self, scores: Mapping[int, float]) -> None:
        """Step -> score of states that may have been saved before they were evaluated."""
        for step, score in scores.items():
            self._policy.add_score(step, score)

    def newest_step(self) -> int | None:
        """The newest step that is saved to the end, after waiting for the save under way; None if
        there is none. Raises `OSError` if that save has failed."""
        self._finish()
        return max(list_steps(self._folder), default=None)

    def best_step(self) -> int | None:
        """The saved step with the lowest score, the newest of equals; None if no saved step has a
        score."""
        assert self._checkpointer is not None, "restore comes first"
        return self._policy.best([saved.step for saved in self._checkpointer.checkpoints])

    def close(self) -> None:
        """Wait until everything is on disk. Raises `OSError` if the last save has failed."""
        try:
            self._finish()
        finally:
            if self._checkpointer is not None:
                # A failed save raises again here, but has been reported already.
                with contextlib.suppress(Exception):
                    self._checkpointer.close()
            self._quiet.close()

    def _finish(self) -> None:
        """Wait for the save under way."""
        if self._pending is None:
            return
        (step, handle), self._pending = self._pending, None
        try:
            handle.result()
        except Exception as error:
            raise self._save_error(step, error) from error

    def _save_error(self, step: int, error: Exception) -> OSError:
        steps = list_steps(self._folder)
        newest = f"the newest complete one is {steps[-1]}" if steps else "there is no older one"
        reason = str(error).strip().partition("\n")[0]
        return OSError(
            f"checkpoint {self._folder / str(step)} could not be saved ({reason}); {newest}"
        )


def check_resume(output: Path, resume: Resume) -> None:
    """Raise `UsageError` if what is in a run's output folder is not what `resume` asks for."""
    folder = output.absolute() / FOLDER
    steps = list_steps(folder)
    if resume == "must" and not steps:
        raise UsageError(f"`resume`=must: no checkpoint in {folder}")
    if resume == "never" and steps:
        raise UsageError(
            f"`resume`=never: {folder} holds checkpoints; name another `output_dir`, or delete it"
        )
    if isinstance(resume, int):
        if resume not in steps:
            raise UsageError(
                f"`resume`={resume}: no checkpoint of that step in {folder}; {listed(steps)}"
            )
        if (exported := output / EXPORT).exists():
            raise UsageError(
                f"`resume`={resume}: {output} holds the model of a finished run; remove {exported} "
                f"to train from step {resume} on"
            )


@dataclasses.dataclass(frozen=True)
class _NewestAndBest:
    """Orbax's preservation policy of a run. Scores are kept here, because a damaged metrics file
    keeps Orbax from opening a folder."""

    keep: int
    scores: dict[int, float]

    def add_score(self, step: int, score: float | None) -> None:
        if score is not None:
            self.scores[step] = score

    def best(self, steps: Sequence[int]) -> int | None:
        return min(
            (step for step in steps if step in self.scores),
            key=lambda step: (self.scores[step], -step),
            default=None,
        )

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """One answer per checkpoint; they come in ascending order of steps."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = {*steps[-self.keep :], self.best(steps)}
        return [step in kept for step in steps]


def _by_path(state: TrainState) -> dict[str, Any]:
    """Leaves by path, in the order of the tree: what Orbax stores reads the same in every version
    of the dataclass."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _remove(folder: Path) -> None:
    """Remove an unfinished save, to which threads of one that failed in this process may still
    write. Raises `OSError`, after ten seconds for a folder that does not stay empty."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return shutil.rmtree(folder)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or time.monotonic() > deadline:
                raise
        time.sleep(0.05)
