"""Figures by matplotlib, which is imported when one is drawn and needs no display."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

COLORS = ("#1f5fa8", "#c8553d", "#3d8b5f", "#8a6bbe", "#7a7a7a")
"""Blue, red, green, violet, grey: in this order also colour-blind eyes tell them apart."""
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "svg.fonttype": "none",
}


def matplotlib_missing() -> str | None:
    """How to install matplotlib where it is missing; None where it is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return "it needs matplotlib: pip install 'swiftkv-jax[report]'"
    return None


@contextmanager
def figure(width: float, height: float, rows: int, columns: int) -> Iterator[tuple[Any, list[Any]]]:
    """A figure of `width` x `height` inches, and its `rows` x `columns` axes row by row, in this
    package's style; matplotlib's own style stays as it is."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        picture = Figure(figsize=(width, height), layout="constrained")
        yield picture, list(picture.subplots(rows, columns, squeeze=False).flat)
