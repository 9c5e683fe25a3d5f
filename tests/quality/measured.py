"""The measured students, and how pages print them."""

import functools
from collections.abc import Iterable
from pathlib import Path

from benchmarks import measurements
from benchmarks.quality import table
from benchmarks.quality.sections import by_teacher
from swiftkv_jax.train.loss.far_tokens import MAX_FAR_LOSS

DOCS = Path(__file__).parents[2] / "docs"
ROOT = DOCS.parent
HALF = {"demo": 4, "t2": 8}
"""Half of each teacher's layers."""
LAYERS = {"demo": 8, "t2": 16}


@functools.cache
def rows_of(teacher: str) -> dict[tuple, table.Row]:
    """By `table.key`; not to be changed."""
    rows = by_teacher(measurements.quality_documents())[teacher]["rows"]
    return {table.key(row): row for row in rows}


def far(row: table.Row) -> float:
    return row["far"]["difference"]["value"]


def star(row: table.Row) -> str:
    return " *" if far(row) > MAX_FAR_LOSS else ""


def far_cells(rows: Iterable[table.Row]) -> str:
    """Of a table."""
    return "".join(f" {far(row):+.3f}{star(row)} |" for row in rows)


def above(row: table.Row) -> float:
    return row["answers"]["above"]["value"]


def page(name: str) -> str:
    return " ".join((DOCS / name).read_text(encoding="utf-8").split())


def student(
    teacher: str,
    group: int,
    start: str,
    steps: int,
    serving: str = "boundary",
    lower: int | None = None,
    fitted: str | None = None,
):
    """A student with half of the layers cut, unless `lower` says how many are left, and trained for
    what it is served with unless `fitted` says for what."""
    mode = serving, fitted or serving.split("+")[0], "distillation"
    return rows_of(teacher)[lower or HALF[teacher], group, start, steps, *mode]


def above_all(row: table.Row) -> float:
    return row["all"]["above"]["value"]


def table_line(page: str, name: str) -> str:
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith(f"| {name} |"))
    return line
