"""Pictures of results: perplexity and the loss on far tokens over K."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swiftkv_jax.process.plotting import COLORS, figure

from .verdict import MAX_FAR_LOSS, Row, key

STEPS = 64
GROUPS = {1: ("o", 5), 2: ("D", 5), 4: ("s", 10), None: ("^", 6)}
"""Group sizes that have a line each, with marker and its size; None is all upper layers."""
MARKERS = ("o", 5), ("D", 5), ("^", 6)
"""Of teachers."""
_STARTS = (("closed-form", "closed form"), ("authors", "authors' recipe"))


@dataclasses.dataclass(frozen=True)
class _Line:
    """Students of a line, those with more lower layers first."""

    rows: Sequence[Row]
    label: str
    color: str
    marker: tuple[str, int]
    is_dashed: bool


def draw(document: dict[str, Any], path: Path) -> None:
    """Write the picture of a teacher's students after `STEPS` steps, served without own keys and
    values."""
    layers: int = document["layers"]
    lines = [
        _Line(
            rows_of(document["rows"], layers, group, start),
            f"g = {'all' if group is None else group}, {words}",
            color,
            marker,
            start == "authors",
        )
        for (group, marker), color in zip(GROUPS.items(), COLORS, strict=False)
        for start, words in _STARTS
    ]
    _draw(lines, f"K of {layers} layers, %", path)


def draw_teachers(documents: Mapping[str, dict[str, Any]], path: Path) -> None:
    """Write the picture of all teachers' students from the closed form without groups, untrained
    and after `STEPS` steps."""
    lines = [
        _Line(
            rows_of(document["rows"], document["layers"], 1, "closed-form", steps),
            f"{teacher}, {document['layers']} layers, {words}",
            color,
            marker,
            steps > 0,
        )
        for (teacher, document), color, marker in zip(
            documents.items(), COLORS, MARKERS, strict=False
        )
        for steps, words in ((0, "untrained"), (STEPS, f"{STEPS} steps"))
    ]
    _draw(lines, "K, % of the layers", path)


def _draw(lines: Sequence[_Line], label: str, path: Path) -> None:
    with figure(9, 4.2, 1, 2) as (picture, (above, far)):
        for line in lines:
            marker, size = line.marker
            settings: Any = {"color": line.color, "label": line.label, "zorder": 3 - size / 100}
            settings |= {"linestyle": "--" if line.is_dashed else "-"}
            settings |= {"marker": marker, "markersize": size}
            settings |= {"markerfacecolor": "white" if line.is_dashed else line.color}
            shares = [100 * row["share"] for row in line.rows]
            excess = [100 * row["all"]["above"]["value"] for row in line.rows]
            above.plot(shares, excess, **settings)
            lost = [row["far"]["difference"]["value"] for row in line.rows]
            far.plot(shares, lost, **settings)
        above.set(title="Perplexity above the teacher, %, log scale", yscale="log")
        above.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        far.set(title="Nats lost on far tokens")
        far.axhline(MAX_FAR_LOSS, color=COLORS[-1], linestyle=":")
        far.annotate(
            "refused above",
            (0.99, MAX_FAR_LOSS),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            color=COLORS[-1],
        )
        for axes in above, far:
            axes.set_xlabel(label)
            axes.set_xticks(sorted({100 * row["share"] for line in lines for row in line.rows}))
            axes.invert_xaxis()
        picture.legend(
            *above.get_legend_handles_labels(),
            loc="outside lower center",
            ncols=len({line.color for line in lines}),
        )
        picture.savefig(path, dpi=100)


def rows_of(
    rows: Sequence[Row], layers: int, group: int | None, start: str, steps: int = STEPS
) -> list[Row]:
    """The students of a line, those with more lower layers first."""
    found = [
        row
        for row in rows
        if key(row)[2:] == (start, steps, "boundary", "boundary", "distillation")
        and row["key_value_group_size"] == (group or layers - row["num_key_value_layers"])
    ]
    return sorted(found, key=lambda row: -row["share"])
