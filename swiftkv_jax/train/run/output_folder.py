"""The output folder of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ...checkpoints.states import FOLDER
from ...checkpoints.training_run import CALIBRATION, EXPORT, RECIPE
from ...errors import UsageError
from ...process.distributed import run_on_process_0
from ...process.files import locked
from ..report.report import REPORT
from .checkpointing import DAMAGED, REPLACED
from .metrics import METRICS
from .setup import DATA
from .start import START

_OF_A_RUN = {RECIPE, START, CALIBRATION, METRICS, REPORT, EXPORT, DATA, FOLDER, DAMAGED} | {
    REPLACED,
    "analysis",
    "profile",
    "tensorboard",
    "wandb",
    "wandb_id",
}
_LOGS = (".log", ".out", ".err")  # users put the output of the run beside it


def prepare_folder(folder: Path, model: str) -> None:
    """Make the output folder of a run on the base model `model`.

    Raises `UsageError` if the path is a file, cannot be written, is the model's own folder, or is a
    folder with other files than a run's.
    """
    if folder.exists() and Path(model).exists() and folder.samefile(model):
        raise UsageError(f"`output_dir`={folder}: it is the folder of the model; name another")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise UsageError(f"`output_dir`={folder}: {error.strerror}") from None
    other = sorted(name for name in names - _OF_A_RUN if not name.endswith(_LOGS))
    if other and not names & {RECIPE, METRICS, FOLDER}:
        raise UsageError(
            f"`output_dir`={folder}: it holds other files than a run's ({other[0]}"
            f"{f' and {len(other) - 1} more' if other[1:] else ''}); name another"
        )


@contextlib.contextmanager
def held_folder(folder: Path, model: str) -> Iterator[None]:
    """Make the output folder of a run on `model`, and keep other runs out of it during the block.
    If that fails, what was made is removed as far as it is empty.

    With several processes all of them enter, and process 0 holds the folder. Raises `UsageError` if
    another run uses it, and as `prepare_folder`.
    """
    with _removed_if_empty(folder), contextlib.ExitStack() as held:
        prepare_folder(folder, model)
        if not run_on_process_0(lambda: held.enter_context(locked(folder / ".lock")), False):
            raise UsageError(f"`output_dir`={folder}: another run is using this folder")
        yield


@contextlib.contextmanager
def _removed_if_empty(folder: Path) -> Iterator[None]:
    """Remove `folder`, its folder of prepared data and its parents if the block fails, as far as it
    made them and they are empty."""
    new = [each for each in (folder / DATA, folder, *folder.parents) if not each.exists()]
    try:
        yield
    except BaseException:
        for each in new:
            with contextlib.suppress(OSError):  # not empty, or not made
                each.rmdir()
        raise
