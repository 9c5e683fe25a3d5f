"""Measures students one by one and keeps every one in a folder.

FOLDER/data/             packed training rows
FOLDER/teacher.json      sums of the teacher's scores over each held-out file
FOLDER/cells/NAME.json   those of a student in every mode, and which of its blocks parse
FOLDER/deltas/NAME.npz   what was trained
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from swiftkv_jax.checkpoints import load, open_any
from swiftkv_jax.errors import UsageError
from swiftkv_jax.model.cut import choose_generated_kv
from swiftkv_jax.model.mesh import MeshShape, make_mesh
from swiftkv_jax.model.model import Model
from swiftkv_jax.process import files
from swiftkv_jax.train.data.loader import DatasetMixture
from swiftkv_jax.train.data.prepare import prepare
from swiftkv_jax.train.recipe import DEMO
from swiftkv_jax.train.run.setup import open_tokenizer

from ..teachers.files import TeacherFiles
from . import scores, students, summary
from .generation import Prompt, find_prompts, parsed_blocks
from .held_out import held_out_rows
from .scores import MODES, Mode
from .students import Arm
from .summary import Cell

FORMAT = 1
"""To be counted up where the content of the kept files changes."""

logger = logging.getLogger("swiftkv_jax.benchmarks")


class Bench:
    """The text, the teacher on it, and the folder. The teacher runs when the first student needs
    it."""

    def __init__(
        self,
        folder: Path,
        files: TeacherFiles,
        mesh: MeshShape,
        layers: Sequence[int],
        *,
        rows: int | None,
        num_prompts: int,
        sources: str,
        rates: Sequence[float] = students.AUTHORS_RATES,
        package_rates: Sequence[float] = students.PACKAGE_RATES,
    ):
        """`layers` are the first upper layers of all students, `rows` limits the held-out rows,
        `sources` is the digest of the code that cells are marked with. `rates` are tried with the
        authors' recipe, `package_rates` with this package's, both rising."""
        self._folder, self._mesh = folder, make_mesh(mesh)
        self._layers, self._sources = sorted(set(layers)), sources
        self._rates, self._package_rates = rates, package_rates
        self._recipe = dataclasses.replace(DEMO, model=str(files.model), mesh=mesh, dtype="float32")
        tokenizer, texts = open_tokenizer(self._recipe), list(files.held_out_texts())
        training = prepare(files.train, tokenizer, DEMO.max_length, folder / "data")
        self._data = DatasetMixture((training,), (1.0,))
        self.held_out = held_out_rows(texts, tokenizer, batch_size=DEMO.batch_size, limit=rows)
        self._prompts: list[Prompt] = (
            find_prompts(texts, tokenizer, count=num_prompts) if num_prompts else []
        )
        self._measured_on: dict[str, Any] = {
            "format": FORMAT,
            "model": _digest((files.model / "model.safetensors").read_bytes()),
            "text": _digest(self.held_out.tokens.tobytes() + self.held_out.document.tobytes()),
        }

    def cells_of(self, arm: Arm, seeds: int) -> Iterator[tuple[list[Cell], list[Cell]]]:
        """(cells that count, cells of all learning rates) after each cell: the best rate of the
        first seed, then the other seeds at that rate. What diverged does not count."""
        loss = functools.partial(summary.loss, mode=arm.generated_kv)
        tried, cells = list[Cell](), list[Cell]()
        for rate in self._rates_of(arm):
            tried.append(self._cell(arm, rate, 0))
            cells = [cell for cell in sorted(tried, key=loss)[:1] if math.isfinite(loss(cell))]
            yield cells, tried
            if len(tried) > 1 and loss(tried[-1]) > loss(tried[-2]):
                break
        for seed in range(1, seeds if arm.steps and cells else 1):
            cell = self._cell(arm, cells[0]["learning_rate"], seed)
            cells = cells + [cell] * math.isfinite(loss(cell))
            yield cells, tried

    def _rates_of(self, arm: Arm) -> Sequence[float]:
        """The learning rates to try, rising; nothing depends on the one of an untrained student."""
        if not arm.steps:
            return (self._recipe.learning_rate,)
        return self._rates if arm.uses_authors_recipe else self._package_rates

    def _cell(self, arm: Arm, rate: float, seed: int) -> Cell:
        name = arm.name(rate, seed)
        recipe = arm.recipe(self._recipe, rate, seed)
        prompts = self._prompts if seed == 0 else []  # generation is not repeated for other seeds
        identity = self._identity(prompts) | {"student": students.describe(recipe, self._data)}
        file = self._folder / "cells" / f"{name}.json"
        if kept := _kept(file, identity):
            logger.info("%s: measured before", name)
            return kept
        _ = self._teacher  # not in this student's seconds
        start, cpu = time.perf_counter(), time.process_time()
        delta_file = self._folder / "deltas" / f"{name}.npz"
        model = students.make(arm, recipe, self._data, self._mesh, delta_file)
        made = time.perf_counter()
        cell: Cell = {
            "name": name,
            "learning_rate": rate,
            "seed": seed,
            "sources": self._sources,
            "modes": {},
            "blocks": {},
        }
        if students.is_finite(model):
            self._measure(cell, model, prompts)
        seconds = {
            "making": made - start,
            "measuring": time.perf_counter() - made,
            "processors": time.process_time() - cpu,
        }
        cell["seconds"] = {part: round(value, 1) for part, value in seconds.items()}
        cell["identity"] = identity
        _keep(file, cell)
        logger.info("%s: loss %.4f, %s", name, summary.loss(cell), cell["seconds"])
        return cell

    def _measure(self, cell: Cell, model: Model, prompts: list[Prompt]) -> None:
        """Add the sums of every mode, and the blocks that parse."""
        teacher = self._teacher
        for mode in MODES:
            found = scores.score_student(model, teacher, self._mesh, mode)
            masks = dict(teacher.masks)
            if mode.exact_tail is not None:
                del masks["all"]
            cell["modes"][mode.name] = scores.sums(found, masks, self.held_out.per_document)
        if prompts:
            served = students.on_one_device(model)
            cell["blocks"] = {
                mode.name: parsed_blocks(served, prompts, mode) for mode in served_modes(model)
            }

    def teacher_cell(self) -> Cell:
        """The teacher's sums, with the number of predictions of each set as `count`."""
        return self._teacher_cell

    @functools.cached_property
    def _teacher_cell(self) -> Cell:
        identity, file = self._identity(self._prompts), self._folder / "teacher.json"
        if kept := _kept(file, identity):
            return kept
        teacher, sum_over = self._teacher, self.held_out.per_document
        found = scores.sums(teacher.scores, teacher.masks, sum_over)
        for name, mask in teacher.masks.items():
            found[name]["count"] = sum_over(np.ones(mask.shape), mask)
        blocks = None
        if self._prompts:
            blocks = parsed_blocks(load(self._recipe.model, dtype="float32"), self._prompts, None)
        layers = open_any(self._recipe.model).config.num_layers
        cell = {"identity": identity, "layers": layers, "sums": found, "blocks": blocks}
        _keep(file, cell)
        return cell

    @functools.cached_property
    def _teacher(self) -> scores.Teacher:
        config = open_any(self._recipe.model).config
        config = config.cut(config.num_layers)
        model = load(self._recipe.model, dtype="float32", mesh=self._mesh, config=config)
        logger.info("running the teacher on %d rows", len(self.held_out.tokens))
        return scores.run_teacher(
            config,
            model.llama,
            self.held_out,
            self._mesh,
            batch_size=DEMO.batch_size,
            layers=self._layers,
        )

    def _identity(self, prompts: list[Prompt]) -> dict[str, Any]:
        """What figures follow from, as JSON holds it."""
        return self._measured_on | {"prompts": _digest(json.dumps(prompts).encode())}


def served_modes(model: Model) -> tuple[Mode, ...]:
    """Those that the engine has for this architecture."""
    try:
        choose_generated_kv(model.config, "own")
    except UsageError:  # groups of layers with a sliding window
        return MODES[:1]
    return MODES


def _kept(file: Path, identity: dict[str, Any]) -> Cell | None:
    """The cell in a file, if it is there and of the same text, models and recipe."""
    if not file.exists():
        return None
    cell = json.loads(file.read_text(encoding="utf-8"))
    return cell if cell["identity"] == json.loads(json.dumps(identity)) else None


def _keep(file: Path, cell: Cell) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(file, cell)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
