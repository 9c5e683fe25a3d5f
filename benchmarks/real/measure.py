"""The figures of one student beside its teacher, on the same rows.

Differences are paired: of each row of text, question or problem the teacher's figure is subtracted
from the student's, and the standard error is that of the mean difference.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from swiftkv_jax.model.config import Config
from swiftkv_jax.model.model import Model
from swiftkv_jax.plan.cost import prefill_flops

from . import corpus, documents, human_eval
from .forward import Reference, Scores, run_student, run_teacher
from .rows import Rows, quiz_rows, text_rows

PREFILL_TOKENS = 2048
"""Tokens of the prompt whose operations are counted."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What decides which rows are measured on. Files with other settings are not continued."""

    rows: int = 16
    """Of English and of code."""
    seed: int = 0
    calibration_tokens: int = 24_576
    documents: int = 1
    """Of each task and length; 0 measures text only."""
    problems: int = 0
    """Of HumanEval."""


class Bench:
    """The teacher on all rows."""

    def __init__(
        self,
        teacher: Model,
        settings: Settings,
        cuts: Sequence[int],
        problems: Sequence[human_eval.Problem] = (),
    ):
        """`cuts` are the K of the students that will be measured."""
        self.teacher, self._problems = teacher, problems
        self._texts = {
            kind: run_teacher(teacher, rows, cuts, far=True)
            for kind, rows in _text_rows(teacher.tokenizer, settings).items()
        }
        self._tasks = {
            length: run_teacher(teacher, rows, cuts, far=False)
            for length, rows in _task_rows(teacher.tokenizer, settings).items()
        }

    def figures(self, student: Model) -> dict[str, Any]:
        """All figures but those of HumanEval."""
        started = time.perf_counter()
        texts = {kind: run_student(student, found) for kind, found in self._texts.items()}
        tasks = {length: run_student(student, found) for length, found in self._tasks.items()}
        return {
            "prefill_share": prefill_share(student.config),
            "texts": {kind: _text(self._texts[kind], found) for kind, found in texts.items()},
            "far": _far([(self._texts[kind], found) for kind, found in texts.items()]),
            "tasks": _of_tasks([(n, self._tasks[n], found) for n, found in tasks.items()]),
            "seconds": round(time.perf_counter() - started, 1),
        }

    def human_eval(self, student: Model, of_teacher: Sequence[bool]) -> dict[str, Any]:
        """How many problems each solves."""
        of_student = human_eval.solved(student, self._problems, swiftkv=True)
        return beside(of_teacher, of_student, "problems")

    def human_eval_of_teacher(self) -> list[bool]:
        return human_eval.solved(self.teacher, self._problems, swiftkv=False)


def _text_rows(tokenizer: Any, settings: Settings) -> dict[str, Rows]:
    return {
        kind: text_rows(
            corpus.in_turn(corpus.held_out_documents(kind), settings.seed), tokenizer, settings.rows
        )
        for kind in corpus.KINDS
    }


def _task_rows(tokenizer: Any, settings: Settings) -> dict[int, Rows]:
    """Length -> the rows of one task after another."""
    if not settings.documents:
        return {}
    return {
        length: quiz_rows(
            [
                quiz
                for task in documents.TASKS
                for quiz in documents.quizzes(
                    task, tokenizer, length, settings.documents, settings.seed
                )
            ],
            tokenizer,
            length,
        )
        for length in documents.QUESTIONS
    }


def prefill_share(config: Config) -> float:
    """Operations of a prefill of `PREFILL_TOKENS`, as a share of the teacher's."""
    length = min(PREFILL_TOKENS, config.max_position_embeddings)
    student, teacher = (prefill_flops(config, length, swiftkv=each) for each in (True, False))
    return student / teacher


# Figures ------------------------------------------------------------------------


def ratio(sums: np.ndarray, counts: np.ndarray) -> dict[str, float]:
    """sum(sums) / sum(counts) and its standard error over the entries."""
    total = counts.sum()
    entries = len(sums)
    value = sums.sum() / total
    residuals = sums - value * counts
    spread = entries / (entries - 1) * np.square(residuals).sum() if entries > 1 else math.nan
    return {"value": float(value), "stderr": float(np.sqrt(spread) / total)}


def beside(
    teacher: ArrayLike, student: ArrayLike, unit: str, clusters: np.ndarray | None = None
) -> dict[str, Any]:
    """Means of both over the same questions, and their difference. Its standard error is over
    `clusters`, the number of each question's document, or over the questions."""
    before, after = (np.asarray(values, np.float64) for values in (teacher, student))
    return {
        unit: len(before),
        "teacher": float(before.mean()),
        "student": float(after.mean()),
        "difference": _clustered(after - before, clusters),
    }


def _clustered(values: np.ndarray, clusters: np.ndarray | None) -> dict[str, float]:
    """The mean and its standard error over clusters; None: over the values."""
    if clusters is None:
        return ratio(values, np.ones(len(values)))
    return ratio(np.bincount(clusters, values), np.bincount(clusters).astype(np.float64))


def _text(reference: Reference, found: Scores) -> dict[str, Any]:
    items = reference.rows.items
    teacher = reference.scores
    counts = np.bincount(items).astype(np.float64)

    def mean(values: np.ndarray) -> dict[str, float]:
        return ratio(np.bincount(items, values), counts)

    lost = mean(found.nll - teacher.nll)
    factor = math.exp(lost["value"])
    before = mean(teacher.nll)["value"]
    return {
        "tokens": len(items),
        "teacher_perplexity": math.exp(before),
        "perplexity": math.exp(before) * factor,
        "above": {"value": factor - 1, "stderr": factor * lost["stderr"]},
        "kl": mean(found.kl),
        "agreement": mean(found.agreement),
        "far": _far([(reference, found)]),
    }


def _far(texts: Sequence[tuple[Reference, Scores]]) -> dict[str, Any]:
    """Nats lost on the far-dependent predictions of some texts, by row."""
    lost = []
    divergence = []
    counts = []
    for reference, found in texts:
        assert reference.far is not None
        items = reference.rows.items[reference.far]
        size = len(reference.rows.tokens)
        difference = (found.nll - reference.scores.nll)[reference.far]
        lost.append(np.bincount(items, difference, size))
        divergence.append(np.bincount(items, found.kl[reference.far], size))
        counts.append(np.bincount(items, minlength=size).astype(np.float64))
    sums, of_kl, count = (np.concatenate(parts) for parts in (lost, divergence, counts))
    if not count.sum():
        return {"tokens": 0}
    return {"tokens": int(count.sum()), "lost": ratio(sums, count), "kl": ratio(of_kl, count)}


def _of_tasks(found: Sequence[tuple[int, Reference, Scores]]) -> dict[str, Any]:
    """For each task how often all tokens of an answer are the likeliest ones, and the nats that
    the student loses on an answer; by length too. Standard errors are over questions, or over
    documents where there are several of each length."""
    return {
        task.name: _of_task(
            [(length, *_answers(length, before, after, number)) for length, before, after in found]
        )
        for number, task in enumerate(documents.TASKS)
        if found
    }


def _answers(
    length: int, reference: Reference, found: Scores, task: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of each question of a task: whether the teacher and the student answer it, the nats that the
    student loses, and the number of its document."""
    items = reference.rows.items
    wrong = [np.bincount(items, 1 - scores.first) for scores in (reference.scores, found)]
    lost = np.bincount(items, found.nll - reference.scores.nll)
    each = len(lost) // len(documents.TASKS)
    chosen = slice(task * each, (task + 1) * each)
    document = np.arange(each) // documents.QUESTIONS[length]
    return wrong[0][chosen] == 0, wrong[1][chosen] == 0, lost[chosen], document


def _of_task(
    by_length: Sequence[tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]],
) -> dict[str, Any]:
    teacher, student, lost = (np.concatenate([each[i] for each in by_length]) for i in (1, 2, 3))
    per_length = [each[4].max() + 1 for each in by_length]
    clusters = None
    if max(per_length) > 1:
        first = np.cumsum([0, *per_length[:-1]])
        clusters = np.concatenate(
            [start + each[4] for start, each in zip(first, by_length, strict=True)]
        )
    return {
        **beside(teacher, student, "questions", clusters),
        "lost": _clustered(lost, clusters),
        "lengths": {
            str(length): {"teacher": float(before.mean()), "student": float(after.mean())}
            for length, before, after, *_ in by_length
        },
    }
