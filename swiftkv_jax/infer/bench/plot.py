"""A figure of one run: SwiftKV and its teacher over the input length or the number of rows, with
the measured roofline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...io.plotting import COLORS, figure, matplotlib_missing
from .cells import Mode
from .summary import SWIFTKV, TEACHER

# Panels of each mode: title, key, factor, and the share of the roofline that limits it, if one
# does.
_PANELS: dict[Mode, tuple[tuple[str, str, float, str | None], ...]] = {
    "prefill": (
        ("Prefill, tokens/s", "tokens_per_s", 1, "flops_share"),
        ("Time to first token, ms", "ttft", 1e3, None),
    ),
    "decode": (
        ("Decoding, tokens/s", "tokens_per_s", 1, "bandwidth_share"),
        ("Time per output token, ms", "seconds_per_output_token", 1e3, None),
    ),
    "offline": (
        ("All tokens/s", "tokens_per_s", 1, None),
        ("Output tokens/s", "output_tokens_per_s", 1, None),
    ),
    "latency": (
        ("Time to first token, median ms", "ttft_p50", 1e3, None),
        ("End to end, median ms", "e2e_p50", 1e3, None),
    ),
}
# What the points of a line differ in, and what the lines differ in, with the words for both.
_AXES: dict[Mode, tuple[str, str, str, str]] = {
    "prefill": ("input_len", "tokens of the prompt", "prompts", "{} prompts"),
    "decode": ("prompts", "rows", "input_len", "{} tokens of context"),
    "offline": ("input_len", "tokens of the prompt", "prompts", "{} prompts"),
    "latency": ("input_len", "tokens of the prompt", "request_rate", "{} a second"),
}


def check_plot(path: Path | None) -> None:
    """Raise `UsageError` if there is a `path` and matplotlib is missing."""
    if path is not None and (missing := matplotlib_missing()):
        raise UsageError(f"`plot`={path}: {missing}")


def draw(mode: Mode, rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG. Decoding is drawn over the number of rows, everything else over the input
    length, with a line for each variant and each other setting."""
    over, xlabel, each, what = _AXES[mode]
    with figure(9, 3.6, 1, 2) as (picture, panels):
        for axes, (title, key, scale, share) in zip(panels, _PANELS[mode], strict=True):
            for index, kind in enumerate(dict.fromkeys(row["cell"][each] for row in rows)):
                for name, color in zip((SWIFTKV, TEACHER), COLORS, strict=False):
                    points = [
                        row for row in rows if row["variant"] == name and row["cell"][each] == kind
                    ]
                    if not points:
                        continue
                    x, y = (
                        [row["cell"][over] for row in points],
                        [scale * row[key] for row in points],
                    )
                    style = {"color": color, "linestyle": ("-", "--", "-.")[index % 3]}
                    axes.plot(
                        x,
                        y,
                        marker="o",
                        markersize=4,
                        label=f"{name}, {what.format(kind)}",
                        **style,
                    )
                    if share is not None:  # at all of the roofline instead of a share
                        limit = [value / row[share] for value, row in zip(y, points, strict=True)]
                        axes.plot(
                            x,
                            limit,
                            color=color,
                            alpha=0.35,
                            linewidth=1,
                            label=f"{name}, measured roofline" if not index else None,
                        )
            axes.set(title=title, xlabel=xlabel)
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
            axes.set_ylim(bottom=0)
        picture.axes[0].legend()
        picture.savefig(path, dpi=150)
