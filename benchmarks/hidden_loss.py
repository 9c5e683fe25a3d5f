"""Whether the weight of the hidden state's error matters in distillation.

    python -m benchmarks.hidden_loss        fifteen minutes on two cores

The demo model with half of its layers cut and 2-way sharing, 64 optimiser steps from the closed
form with each weight and seed, on the held-out text of `python -m benchmarks.quality`.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

from swiftkv_jax import cli
from swiftkv_jax.checkpoints import open_any
from swiftkv_jax.model.mesh import emulate_cpu_devices, make_mesh, parse_mesh
from swiftkv_jax.train.run.setup import cut_model, load_model
from swiftkv_jax.train.run.start import initialize_delta

from . import report
from .closed_form import MESH, compared, open_teacher
from .markdown import section, table
from .quality.scores import MODES, score_student
from .quality.students import train
from .teachers.files import TeacherFiles

logger = logging.getLogger("swiftkv_jax.benchmarks")

WEIGHTS = (0.0, 0.1, 0.3, 1.0)
GROUP, STEPS = 2, 64


def main(argv: list[str] | None = None) -> int:
    arguments = cli.ArgumentParser(
        prog="python -m benchmarks.hidden_loss",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flag = arguments.add_argument
    flag("--seeds", type=int, default=3, help="of each weight (default: %(default)s)")
    flag("--steps", type=int, default=STEPS, help="of the optimiser (default: %(default)s)")
    flag("--rows", type=int, help="held-out rows (default: all of `benchmarks.quality`)")
    flag("--folder", type=Path, default=Path("runs/hidden-loss"), help="packed training rows")
    flag("--output", type=Path, metavar="FILE", help="(default: new, in benchmarks/results)")
    args = arguments.parse_args(argv)
    return cli.run(lambda: measure(args), arguments)


def measure(args: argparse.Namespace) -> int:
    emulate_cpu_devices(math.prod(parse_mesh(MESH)))
    facts, mesh = report.environment(seed=0), make_mesh(parse_mesh(MESH))
    kind, date = facts["device"]["kind"], facts["date"]
    output = args.output or report.default_path("hidden-loss", kind, date)
    report.check_writable(output)
    recipe, data, teacher = open_teacher(TeacherFiles.demo(), args.folder, mesh, args.rows)
    recipe = dataclasses.replace(recipe, key_value_group_size=GROUP, max_steps=args.steps)
    model = load_model(recipe, cut_model(recipe, open_any(recipe.model).config), mesh)
    start, _ = initialize_delta(recipe, model, data, mesh)
    document: dict[str, Any] = facts | {"group": GROUP, "steps": args.steps, "cells": []}
    for weight in WEIGHTS:
        cell: dict[str, Any] = {"weight": weight, "above": [], "far": [], "kl": []}
        for seed in range(args.seeds):
            chosen = dataclasses.replace(recipe, hidden_loss_weight=weight, seed=seed)
            found = score_student(train(chosen, start, data, mesh), teacher, mesh, MODES[0])
            lost = compared(teacher, found, "all")
            cell["above"].append(lost["above"])
            cell["far"].append(lost["far"])
            cell["kl"].append(float(found.kl[teacher.masks["all"]].mean(dtype=np.float64)))
        logger.info("%s", cell)
        document["cells"].append(cell)
        report.write_json(output, document)
    print(hidden_loss(document))
    logger.info("written to %s", output)
    return cli.OK


def hidden_loss(document: dict[str, Any]) -> str:
    """The section of the page of measurements."""
    rows = [
        (
            f"{cell['weight']:g}",
            ", ".join(f"{value:+.2%}" for value in cell["above"]),
            f"{statistics.mean(cell['above']):+.2%}",
            f"{statistics.mean(cell['far']):+.3f}",
            f"{statistics.mean(cell['kl']):.4f}",
        )
        for cell in document["cells"]
    ]
    return section(
        "The weight of the hidden state's error",
        f"The demo model with half of its layers as lower ones and {document['group']}-way "
        f"sharing, after {document['steps']} steps from the closed form, on the same files as in "
        f"the table above; `python -m benchmarks.hidden_loss`. The weight is that of `swiftkv "
        f"train --hidden-loss-weight`. The columns are the perplexity above the teacher's for each "
        f"seed, its mean, and the means of the nats lost on far tokens and of the KL. "
        f"Perplexity is lowest at weight {_best(document, 'above'):g}, the loss on far tokens at "
        f"{_best(document, 'far'):g}, KL at {_best(document, 'kl'):g}. Other cuts were not "
        f"measured.",
        table(("weight", "above the teacher", "mean", "far", "KL"), rows),
    )


def _best(document: dict[str, Any], figure: str) -> float:
    """The weight at which the mean of a figure is lowest."""
    return min(document["cells"], key=lambda cell: statistics.mean(cell[figure]))["weight"]


if __name__ == "__main__":
    sys.exit(main())
