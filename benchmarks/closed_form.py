"""What limits a student in closed form: the number of calibration tokens, or the linear fit.

    python -m benchmarks.closed_form                        five minutes on two cores
    python -m benchmarks.closed_form --teacher build/t2     of a teacher by `benchmarks.teachers`

A teacher with half of its layers cut and no groups, without training, on the held-out text of
`python -m benchmarks.quality`: fitted to more and more tokens; and with the teacher's keys, or
values, of every token in place of the fitted ones, which no engine could serve.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import math
import operator
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from swiftkv_jax import cli
from swiftkv_jax.checkpoints import open_any
from swiftkv_jax.model.attention import Attention
from swiftkv_jax.model.batch import Batch
from swiftkv_jax.model.boundary import project_kv
from swiftkv_jax.model.config import Config
from swiftkv_jax.model.decoder_layers import delta_queries, self_layer, with_queries
from swiftkv_jax.model.mesh import emulate_cpu_devices, make_mesh, parse_mesh
from swiftkv_jax.model.model import Model
from swiftkv_jax.model.packed_attention import head_major
from swiftkv_jax.model.params import Llama, SwiftKV, require_teacher
from swiftkv_jax.model.rope import group_table, rope_tables
from swiftkv_jax.train.data.loader import DatasetMixture
from swiftkv_jax.train.data.prepare import prepare
from swiftkv_jax.train.recipe import DEMO, Recipe
from swiftkv_jax.train.run.setup import cut_model, load_model, open_tokenizer
from swiftkv_jax.train.run.start import initialize_delta

from . import report
from .markdown import section, table
from .quality.held_out import held_out_rows
from .quality.scores import MODES, Scores, Teacher, compare, run_teacher, score_student
from .teachers.files import TeacherFiles

logger = logging.getLogger("swiftkv_jax.benchmarks")

TOKENS = (2**13, 2**15, 2**17, 2**20)
"""Calibration tokens; the second is the default of so narrow a model."""
EXACT = ("nothing", "keys", "values")
MESH = "4x1"


def main(argv: list[str] | None = None) -> int:
    arguments = cli.ArgumentParser(
        prog="python -m benchmarks.closed_form",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flag = arguments.add_argument
    flag(
        "--teacher",
        type=Path,
        metavar="FOLDER",
        help="of `python -m benchmarks.teachers` (default: the demo model and its text)",
    )
    flag("--rows", type=int, help="held-out rows (default: all of `benchmarks.quality`)")
    flag("--tokens", type=_counts, default=TOKENS, metavar="N,...", help="of calibration")
    flag("--folder", type=Path, default=Path("runs/closed-form"), help="packed training rows")
    flag("--output", type=Path, metavar="FILE", help="(default: new, in benchmarks/results)")
    args = arguments.parse_args(argv)
    return cli.run(lambda: measure(args), arguments)


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be whole numbers, got {text!r}") from None


def measure(args: argparse.Namespace) -> int:
    emulate_cpu_devices(math.prod(parse_mesh(MESH)))
    facts, mesh = report.environment(seed=0), make_mesh(parse_mesh(MESH))
    kind, date = facts["device"]["kind"], facts["date"]
    files = TeacherFiles.demo() if args.teacher is None else TeacherFiles.of(args.teacher)
    files.check()
    subject = "closed-form" if args.teacher is None else f"closed-form-{files.name}"
    output = args.output or report.default_path(subject, kind, date)
    report.check_writable(output)
    recipe, data, teacher = open_teacher(files, args.folder, mesh, args.rows)
    document: dict[str, Any] = facts | {"teacher": files.description, "cells": []}
    cells = document["cells"]
    for tokens in args.tokens:
        student, r2 = _fitted(recipe, data, mesh, tokens)
        own = score_student(student, teacher, mesh, MODES[1])
        cells.append(
            {"tokens": tokens, "exact": "nothing", "r2_k": r2[0], "r2_v": r2[1]}
            | compared(teacher, score_student(student, teacher, mesh, MODES[0]), "all")
            | {"own": compared(teacher, own, "answers")}
        )
        logger.info("%s", cells[-1])
        if tokens != args.tokens[min(1, len(args.tokens) - 1)]:
            continue
        for exact in EXACT[1:]:
            found = _with_exact(student, teacher, mesh, exact)
            cells.append({"tokens": tokens, "exact": exact} | compared(teacher, found, "all"))
            logger.info("%s", cells[-1])
    report.write_json(output, document)
    print(limits(document))
    logger.info("written to %s", output)
    return cli.OK


def open_teacher(
    files: TeacherFiles, folder: Path, mesh: Mesh, rows: int | None
) -> tuple[Recipe, DatasetMixture, Teacher]:
    """A teacher's recipe, its training rows, packed in `folder`, and the teacher on `rows` held-out
    rows, with the states that enter its second half."""
    recipe = dataclasses.replace(DEMO, model=str(files.model), dtype="float32")
    tokenizer, texts = open_tokenizer(recipe), list(files.held_out_texts())
    training = prepare(files.train, tokenizer, recipe.max_length, folder / "data")
    size = recipe.batch_size
    rows_of = held_out_rows(texts, tokenizer, batch_size=size, limit=rows)
    config = open_any(recipe.model).config
    whole, half = config.cut(config.num_layers), config.num_layers // 2
    llama = load_model(recipe, whole, mesh).llama
    teacher = run_teacher(whole, llama, rows_of, mesh, batch_size=size, layers=[half])
    return recipe, DatasetMixture((training,), (1.0,)), teacher


def _fitted(
    recipe: Recipe, data: DatasetMixture, mesh: Mesh, tokens: int
) -> tuple[Model, tuple[list[float], list[float]]]:
    """The student, and the R² of each layer's keys and values."""
    recipe = dataclasses.replace(recipe, calibration_tokens=tokens)
    config = cut_model(recipe, open_any(recipe.model).config)
    model, layers = initialize_delta(recipe, load_model(recipe, config, mesh), data, mesh)
    return model, ([one.r2_k for one in layers], [one.r2_v for one in layers])


def _with_exact(student: Model, teacher: Teacher, mesh: Mesh, exact: str) -> Scores:
    """Scores with the teacher's keys, or values, of all tokens in every upper layer."""
    config, attention = student.config, Attention(mesh)

    @functools.partial(jax.jit, static_argnums=0)
    def scores(config: Config, llama: Llama, delta: SwiftKV, batch: Batch, x, last):
        table = group_table(config, rope_tables(config, batch.positions))
        shared = zip(*project_kv(config, delta, x, table), strict=True)
        upper = llama.upper, require_teacher(llama, "measure"), delta_queries(delta)
        for layer, kv in enumerate(shared):
            block, qkv, queries = jax.tree.map(operator.itemgetter(layer), upper)

            def attend(q, k, v, kv=kv):
                k = head_major(k) if exact == "keys" else kv[0]
                v = head_major(v) if exact == "values" else kv[1]
                return attention.prefill(q, k, v, segment_ids=batch.segment_ids), None

            qkv = with_queries(qkv, queries)
            x, _ = self_layer(config, block, qkv, x, table, attend, attention)
        return compare(config, llama, x, last, batch.tokens)

    states = teacher.states[config.num_key_value_layers]
    found = [
        jax.tree.map(np.asarray, scores(config, student.llama, student.swiftkv, batch, x, last))
        for batch, x, last in zip(teacher.batches, states, teacher.last, strict=True)
    ]
    return jax.tree.map(lambda *parts: np.concatenate(parts), *found)


def compared(teacher: Teacher, found: Scores, mask: str) -> dict[str, float]:
    """How far the student's perplexity is above the teacher's on the predictions of a mask, and the
    nats that it loses on far tokens."""
    nats, far = (
        [
            float(scores.nll[teacher.masks[name]].mean(dtype=np.float64))
            for scores in (found, teacher.scores)
        ]
        for name in (mask, "far")
    )
    return {
        "above": math.expm1(nats[0] - nats[1]),
        "teacher_perplexity": math.exp(nats[1]),
        "far": far[0] - far[1],
    }


def limits(document: dict[str, Any], *others: dict[str, Any]) -> str:
    """The section of the page of measurements: of a teacher, and a short table of others."""
    return section(
        "What limits the closed form",
        "The demo model with half of its layers as lower ones, no groups and no training, on the "
        "same files as in the table above; `python -m benchmarks.closed_form`. R² is that of the "
        "keys and values of each upper layer; those of the first are exact. The rows with exact "
        "keys or values use the teacher's for all tokens instead of the fitted ones. No engine "
        "could serve that; it separates the two parts of the loss. `far` are the nats lost on far "
        "tokens; the last two columns are for serving the same students, fitted to `boundary`, "
        "with `own`.",
        table(
            "calibration tokens, exact, R² of keys, R² of values, above the teacher, far, "
            "`own`: after the prompt, far".split(", "),
            list(_lines(document["cells"])),
        ),
        *([_OTHERS, table(_OTHERS_HEADER, _lines_of_others(others))] if others else []),
    )


_OTHERS = (
    "The same of larger teachers with the default number of calibration tokens, on 104 rows of "
    "their held-out text (`--rows 104`):"
)
_OTHERS_HEADER = ("teacher", *(f"exact: {name}" for name in EXACT))


def _lines_of_others(documents: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for document in documents:
        found = {cell["exact"]: ", ".join(_lost(cell)) for cell in document["cells"]}
        yield document["teacher"]["name"], *(found[name] for name in EXACT)


def _lines(cells: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for cell in cells:
        r2 = ("r2_k", "r2_v") if "r2_k" in cell else ()
        yield (
            f"{cell['tokens']:,}",
            cell["exact"],
            *(", ".join(f"{value:.2f}" for value in cell[name]) for name in r2),
            *[""] * (2 - len(r2)),
            *_lost(cell),
            *(_lost(cell["own"]) if "own" in cell else ("", "")),
        )


def _lost(found: dict[str, float]) -> tuple[str, str]:
    return f"{found['above']:+.2%}", f"{found['far']:+.3f}"


if __name__ == "__main__":
    sys.exit(main())
