"""A prediction as Markdown, for the terminal and for `docs/measurements.md`."""

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


def summarised(document: Mapping[str, Any], page: str) -> str:
    """The section of the page of measurements, which refers to another `page` for the tables."""
    bounds = {row["name"]: _required(row) for row in document["rows"]}
    missed = [name for name, words in bounds.items() if "missed" in words]
    met = sum(map(bool, bounds.values())) - len(missed)
    return section(
        title(document),
        f"{ORIGIN} Of the rows for which a release requires a rate, {met} are predicted to meet "
        f"it and {len(missed)} to miss it: {', '.join(missed)}. [All predictions]({page}).",
    )


ORIGIN = (
    "**Not measured**: nothing has run on an H200. The times follow from counts of bytes, products "
    "and launches (`python -m benchmarks.predict`, which has the parameters and their sources). On "
    "an H100, times of attention were 0.95 to 1.33 (those of decoding with a plan that the model "
    "leaves out) and times of serving 0.88 to 1.11 of what it predicts there. It was calibrated "
    "for head dim 128 and is least uncertain there."
)


def title(document: Mapping[str, Any]) -> str:
    return f"Attention and serving on an {document['predicted_for'].upper()}, predicted"


def full_page(document: Mapping[str, Any]) -> str:
    """A page of its own: attention and the targets of serving."""
    return "\n\n".join(
        [
            f"# {title(document)}",
            ORIGIN,
            section(
                "Attention",
                "The rows, and what a release requires of them, are those of `python -m "
                "benchmarks.kernels`. Requirements that compare with cuDNN are not predicted.",
                attention(document),
            ),
            section(
                "Serving",
                "Llama-3.1-8B, K = 16, bfloat16, against the targets of `python -m "
                "benchmarks.serve`. The host takes no time in these figures.",
                targets(document),
            ),
        ]
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
    return "; ".join(bound + ("" if met else ", missed") for bound, met in required(row))


def targets(document: Mapping[str, Any]) -> str:
    return table(("figure", "release", "best", "predicted"), judge(document["parts"]))
