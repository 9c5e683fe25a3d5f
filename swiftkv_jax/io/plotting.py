"""How this package draws, by matplotlib, which is imported when something is drawn. Nothing here
needs a display."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

COLORS = ("#1f5fa8", "#c8553d", "#3d8b5f", "#8a6bbe", "#7a7a7a")
"""Blue, red, green, violet, grey: apart also for colour-blind eyes in this order."""
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
    """What to do where matplotlib is not installed; None where it is."""
    if importlib.util.find_spec("matplotlib") is None:
        return "it needs matplotlib: pip install 'swiftkv-jax[report]'"
    return None


@contextmanager
def figure(width: float, height: float, rows: int, columns: int) -> Iterator[tuple[Any, list[Any]]]:
    """(figure, axes row by row) of that size in inches, in this package's style, without changing
    matplotlib's own."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        picture = Figure(figsize=(width, height), layout="constrained")
        yield picture, list(picture.subplots(rows, columns, squeeze=False).flat)
