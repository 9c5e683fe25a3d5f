"""Result files of real models: one for each model, cell after cell."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax

from swiftkv_jax.errors import UsageError
from swiftkv_jax.model.model import Model

from .. import report
from .cells import Cell
from .measure import Settings

NAME = "real"
CELLS = "cells"
TEACHER = "teacher"
_OF_CELL = "date", "command", "commit", "sources_sha256"
"""What each cell says of how it was measured: several commands write to a file."""


class Results:
    """A result file. Cells are added as they are measured, by several processes in turn too."""

    def __init__(self, path: Path, document: dict[str, Any], measured: dict[str, Any]):
        """`measured` says how the cells that will be added are measured."""
        self.path = path
        self.document = document
        self._measured = measured

    @classmethod
    def open(cls, name: str, model: Model, settings: Settings, output: Path | None) -> Results:
        """The file `output`, or the newest of a model with the same settings on such a device, or a
        new one. Raises `UsageError` if it cannot be written, or holds another model or
        settings."""
        facts = report.environment(seed=settings.seed)
        document = facts | {
            "benchmark": NAME,
            "model": {
                "name": name,
                "layers": model.config.num_layers,
                "parameters": sum(leaf.size for leaf in jax.tree.leaves(model.llama)),
            },
            "settings": dataclasses.asdict(settings),
            TEACHER: {},
            CELLS: [],
        }
        kind = facts["device"]["kind"]
        measured = {part: facts[part] for part in _OF_CELL}
        path = output or report.default_path(f"{NAME}-{name}", kind, facts["date"])
        pattern = path.name if output else f"{path.name[:-20]}2*.json"
        for found in sorted(path.parent.glob(pattern), reverse=True):
            before = json.loads(found.read_text(encoding="utf-8"))
            if all(before[part] == document[part] for part in ("model", "settings")):
                return cls(found, before, measured)
            if output:
                raise UsageError(
                    f"`output`={output}: it holds another model or was measured with other settings"
                )
        report.check_writable(path)
        return cls(path, document, measured)

    def find(self, cell: Cell) -> dict[str, Any] | None:
        """A cell's figures, if they were measured."""
        return next((one for one in self._stored()[CELLS] if is_of(one, cell)), None)

    def add(self, cell: Cell, figures: dict[str, Any]) -> None:
        """Write a cell in place of the one that was there."""
        self.document = self._stored()
        others = [one for one in self.document[CELLS] if not is_of(one, cell)]
        self.document[CELLS] = [*others, cell.key | figures | {"measured": self._measured}]
        report.write_json(self.path, self.document)

    def note(self, name: str, value: Any) -> None:
        """Write a figure of the teacher."""
        self.document = self._stored()
        self.document[TEACHER][name] = value
        report.write_json(self.path, self.document)

    def _stored(self) -> dict[str, Any]:
        """What the file holds now: another process may have written to it."""
        if self.path.exists():
            return json.loads(self.path.read_text(encoding="utf-8"))
        return self.document


def is_of(stored: dict[str, Any], cell: Cell) -> bool:
    return all(stored.get(name, 0) == value for name, value in cell.key.items())
