"""A picture of a result: perplexity and the loss on far tokens over K."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swiftkv_jax.io.plotting import COLORS, figure

from .verdict import MAX_FAR_LOSS, Row, key

STEPS = 64
GROUPS = {1: ("o", 5), 2: ("D", 5), 4: ("s", 10), None: ("^", 6)}
"""Group sizes that have a line each, with marker and its size; None is all upper layers."""
_STARTS = (("closed-form", "-", "closed form"), ("authors", "--", "authors' recipe"))


def draw(document: dict[str, Any], path: Path) -> None:
    """Write the picture of students after `STEPS` steps, served without own keys and values."""
    layers: int = document["layers"]
    with figure(9, 4.2, 1, 2) as (picture, (above, far)):
        for (group, (marker, size)), color in zip(GROUPS.items(), COLORS, strict=False):
            for start, style, words in _STARTS:
                rows = rows_of(document["rows"], layers, group, start)
                shares = [100 * row["share"] for row in rows]
                label = f"g = {'all' if group is None else group}, {words}"
                settings: Any = {"color": color, "linestyle": style, "label": label}
                settings |= {"marker": marker, "markersize": size, "zorder": 3 - size / 100}
                settings |= {"markerfacecolor": color if style == "-" else "white"}
                excess = [100 * row["all"]["above"]["value"] for row in rows]
                above.plot(shares, excess, **settings)
                lost = [row["far"]["difference"]["value"] for row in rows]
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
            axes.set_xlabel(f"K of {layers} layers, %")
            axes.set_xticks(sorted({100 * row["share"] for row in document["rows"]}))
            axes.invert_xaxis()
        picture.legend(
            *above.get_legend_handles_labels(), loc="outside lower center", ncols=len(GROUPS)
        )
        picture.savefig(path, dpi=100)


def rows_of(rows: Sequence[Row], layers: int, group: int | None, start: str) -> list[Row]:
    """The students of a line, those with more lower layers first."""
    found = [
        row
        for row in rows
        if key(row)[2:] == (start, STEPS, "boundary", "boundary", "distillation")
        and row["key_value_group_size"] == (group or layers - row["num_key_value_layers"])
    ]
    return sorted(found, key=lambda row: -row["share"])
