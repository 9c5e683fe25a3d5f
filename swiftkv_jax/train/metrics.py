"""What a run records: one row of numbers per logged step and per evaluation.

`metrics.jsonl` is the truth and always written. TensorBoard and Weights & Biases get the same rows
when asked for. Rows may hold device scalars; writing one waits for it, so a loop that must not wait
hands over the scalars of the step before.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from ..errors import UsageError
from ..io.files import write_atomic

METRICS = "metrics.jsonl"

_PACKAGES = {  # what a name of --report-to needs: module, and how to get it
    "jsonl": None,
    "tensorboard": ("tensorboardX", "pip install 'swiftkv-jax[report]'"),
    "wandb": ("wandb", "pip install wandb"),
}


def parse_report_to(text: str) -> tuple[str, ...]:
    """`"tensorboard,wandb"` -> ("jsonl", "tensorboard", "wandb"): JSON lines are always written.

    Raises `UsageError` for an unknown name, and for one whose package is not installed.
    """
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in _PACKAGES]:
        raise UsageError(
            f"--report-to {text!r}: {unknown[0]!r} is unknown; choose from {', '.join(_PACKAGES)}"
        )
    for name in names:
        _package(name)
    return tuple(dict.fromkeys(["jsonl", *names]))


def _package(name: str) -> Any:
    if _PACKAGES[name] is None:
        return None
    module, command = _PACKAGES[name]
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UsageError(f"--report-to {name} needs {module}: {command}") from None


class MetricsLog:
    """The rows of a run, in every place that was asked for. Only process 0 of several writes.

    A resumed run goes on after `first_step`: what an earlier attempt wrote of later steps is cut
    away, so that every step stands there once.
    """

    def __init__(self, folder: Path, *, first_step: int, report_to: Sequence[str]):
        self._sinks: list[_JsonLines | _TensorBoard | _WeightsAndBiases] = []
        if jax.process_index() == 0:
            self._sinks.append(_JsonLines(folder / METRICS, first_step))
            if "tensorboard" in report_to:
                self._sinks.append(_TensorBoard(folder / "tensorboard", first_step))
            if "wandb" in report_to:
                self._sinks.append(_WeightsAndBiases(folder))

    def write(self, row: dict[str, Any]) -> None:
        """A row with its "step". Names of held-out numbers begin with `eval_`."""
        if self._sinks:
            row = {
                name: value if isinstance(value, int | str) else float(value)
                for name, value in row.items()
            }
        for sink in self._sinks:
            sink.write(row)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`, in order. A last line that is still being written is left
    out."""
    return [row for _, row in _whole_rows(path)]


def _whole_rows(path: Path) -> Iterable[tuple[str, dict[str, Any]]]:
    for line in path.read_text().splitlines(keepends=True):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if line.endswith("\n") and isinstance(row, dict) and isinstance(row.get("step"), int):
            yield line, row


class _JsonLines:
    """Cut back to the step a resumed run starts from, which was evaluated before it was saved."""

    def __init__(self, path: Path, first_step: int):
        kept = []
        if path.exists():
            kept = [line for line, row in _whole_rows(path) if _stays(row, first_step)]
        write_atomic(path, "".join(kept).encode())
        self._file = path.open("a")

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _stays(row: dict[str, Any], first_step: int) -> bool:
    return 0 < first_step and row["step"] <= first_step


class _TensorBoard:
    """Event files under one folder, one more for each resumption; TensorBoard skips what comes
    after `purge_step` in older ones."""

    def __init__(self, folder: Path, first_step: int):
        purge_step = first_step + 1 if first_step else 0
        suffix = f".{first_step}"  # two attempts in one second would otherwise share a file
        self._writer = _package("tensorboard").SummaryWriter(
            str(folder), purge_step=purge_step, filename_suffix=suffix
        )

    def write(self, row: dict[str, Any]) -> None:
        for name, value in _grouped(row).items():
            self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()  # a killed run may not lose rows that the JSON lines have

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """One W&B run for all attempts: its id is kept in the run's folder. Steps it has already seen,
    W&B leaves out."""

    def __init__(self, folder: Path):
        wandb, kept_id = _package("wandb"), folder / "wandb_id"
        known = kept_id.read_text().strip() if kept_id.exists() else None
        self._run = wandb.init(
            project="swiftkv-jax", name=folder.name, dir=str(folder), id=known, resume="allow"
        )
        kept_id.write_text(self._run.id + "\n")

    def write(self, row: dict[str, Any]) -> None:
        self._run.log(_grouped(row), step=row["step"])

    def close(self) -> None:
        self._run.finish()


def _grouped(row: dict[str, Any]) -> dict[str, Any]:
    """Names as both boards group them: `train/loss`, `eval/agreement`."""
    values = {name: value for name, value in row.items() if name != "step"}
    return {
        f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}": v
        for name, v in values.items()
    }
