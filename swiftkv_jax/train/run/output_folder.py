"""The output folder of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ...checkpoints.states import FOLDER
from ...checkpoints.training_run import CALIBRATION, EXPORT, RECIPE
from ...errors import UsageError
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
def removed_if_empty(folder: Path) -> Iterator[None]:
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
