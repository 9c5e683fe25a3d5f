"""A prediction as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swiftkv_jax.infer.bench import summary

from .. import report
from ..kernels.shapes import required
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
    return "; ".join(bound + ("" if met else ", missed") for bound, met in required(row))


def targets(document: Mapping[str, Any]) -> str:
    return table(("figure", "release", "best", "predicted"), judge(document["parts"]))
