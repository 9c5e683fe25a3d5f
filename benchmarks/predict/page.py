"""A prediction as Markdown, for the terminal and for `docs/measurements.md`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swiftkv_jax.infer.bench import summary

from .. import report
from ..kernels.shapes import TARGETS
from ..markdown import section, table
from ..serve_targets import judge


def page(document: Mapping[str, Any]) -> str:
    """All of it: attention, each part of serving, targets."""
    name = f"an {document['predicted_for'].upper()}, predicted"
    sections = []
    if document["rows"]:
        sections.append(section(f"Attention on {name}", attention(document)))
    for part, found in document["parts"].items():
        figures = summary.table(found["mode"], found["rows"])
        sections.append(section(f"Serving on {name}: {part}", figures))
    if judge(document["parts"]):
        sections.append(section(f"Targets of serving on {name}", targets(document)))
    return "\n\n".join(sections)


def summarised(document: Mapping[str, Any]) -> str:
    """One section: attention and the targets."""
    return section(
        f"Attention and serving on an {document['predicted_for'].upper()}, predicted",
        "From counts of bytes, products and launches, **not measured**: `python -m "
        "benchmarks.predict`, which has the parameters and their sources. How near "
        "they come is not known; nearest, by their making, at head dim 128. Rows, and what a "
        "release requires of them, are those of `python -m benchmarks.kernels`; what it requires "
        "beside cuDNN is not predicted.",
        attention(document),
        "Llama-3.1-8B, K = 16, bfloat16, against the targets of `python -m benchmarks.serve`; the "
        "host takes no time in them.",
        targets(document),
    )


def attention(document: Mapping[str, Any]) -> str:
    rows = [
        (
            row["name"],
            report.duration(row["seconds"]),
            f"{row['rate']:.4g} {row['unit']}",
            f"{row['share_of_roofline']:.0%}",
            _required(row),
        )
        for row in document["rows"]
    ]
    return table(("row", "time", "rate", "of roofline", "release"), rows)


def _required(row: Mapping[str, Any]) -> str:
    """What a release requires of the row, where that is predicted."""
    cells = []
    for target in TARGETS:
        if target.row == row["name"] and target.measure in row:
            is_rate = target.measure == "rate"
            bound = f"{target.value:g} {row['unit']}" if is_rate else f"{target.value:.0%}"
            missed = "" if row[target.measure] >= target.value else ", missed by this"
            cells.append(f"≥ {bound}{missed}")
    return "; ".join(cells)


def targets(document: Mapping[str, Any]) -> str:
    return table(("figure", "release", "best", "predicted"), judge(document["parts"]))
