"""A figure of one run: SwiftKV and its teacher over the input length or the number of rows, with
the measured roofline, and the speed-up of prefill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...process.plotting import COLORS, figure, matplotlib_missing
from .cells import STUDENT, TEACHER, Mode

# Panels of each mode: title, key, factor, and the share of the roofline that limits it, if one
# does.
_PANELS: dict[Mode, tuple[tuple[str, str, float, str | None], ...]] = {
    "prefill": (
        ("Prefill, tokens/s", "tokens_per_s", 1, "flops_share"),
        ("Speed-up of prefill (teacher / SwiftKV)", "speed_up", 1, None),
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
    "prefill": ("input_len", "tokens of the prompt", "prompts", "{} prompt{s}"),
    "decode": ("prompts", "rows", "input_len", "{} token{s} of context"),
    "offline": ("input_len", "tokens of the prompt", "prompts", "{} prompt{s}"),
    "latency": ("input_len", "tokens of the prompt", "request_rate", "{} a second"),
}

_STYLES = ("-", "--", "-.")
# Ratios in the panel of the speed-up, and their names.
_RATIOS = {
    "speed_up": "by the clock",
    "speed_up_in_cpu_time": "by processor time",
    "teacher_flops_over_own": "by operations",
}
_RATIO_COLORS = (COLORS[0], COLORS[2], COLORS[4])


def check_plot(path: Path | None) -> None:
    """Raise `UsageError` if there is a `path` and matplotlib is missing."""
    if path is not None and (missing := matplotlib_missing()):
        raise UsageError(f"`plot`={path}: {missing}")


def draw(mode: Mode, rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG. Decoding is drawn over the number of rows, everything else over the input
    length, with a line for each variant and each other setting; prefill also as a speed-up, where
    both variants were measured."""
    panels = [panel for panel in _PANELS[mode] if any(panel[1] in row for row in rows)]
    with figure(4.5 * len(panels), 3.6, 1, len(panels)) as (picture, places):
        for axes, (title, key, scale, share) in zip(places, panels, strict=True):
            if key == "speed_up":
                _draw_speed_up(axes, mode, rows)
            else:
                _draw_variants(axes, mode, rows, key, scale, share)
            _set_axes(axes, mode, rows, title)
        handles = picture.axes[0].get_legend_handles_labels()
        picture.legend(*handles, loc="outside lower center", ncols=4)
        picture.savefig(path, dpi=150)


def _draw_variants(
    axes: Any,
    mode: Mode,
    rows: Sequence[dict[str, Any]],
    key: str,
    scale: float,
    share: str | None,
) -> None:
    """A line for each variant and setting, and what all of the roofline would give if `share` names
    the share of it."""
    for setting, style, suffix in _settings(mode, rows):
        for name, color in zip((STUDENT, TEACHER), COLORS, strict=False):
            points = [row for row in setting if row["variant"] == name]
            if not points:
                continue
            x, y = _lengths(mode, points), [scale * row[key] for row in points]
            label = f"{name}, {suffix}"
            axes.plot(x, y, marker="o", markersize=4, color=color, linestyle=style, label=label)
            if share is not None:
                limit = [value / row[share] for value, row in zip(y, points, strict=True)]
                label = f"{name}, measured roofline" if style == _STYLES[0] else None
                axes.plot(x, limit, color=color, alpha=0.35, linewidth=1, label=label)


def _draw_speed_up(axes: Any, mode: Mode, rows: Sequence[dict[str, Any]]) -> None:
    """Ratios of the teacher's time and operations to SwiftKV's: a colour for each ratio."""
    for setting, style, suffix in _settings(mode, rows):
        points = [row for row in setting if "speed_up" in row]
        for (key, what), color in zip(_RATIOS.items(), _RATIO_COLORS, strict=True):
            measured = [row for row in points if key in row]
            if measured:
                y = [row[key] for row in measured]
                marker = "o" if key != "teacher_flops_over_own" else None
                axes.plot(
                    _lengths(mode, measured), y, marker=marker, markersize=4, color=color,
                    linestyle=style, label=f"{what}, {suffix}",
                )  # fmt: skip
    axes.axhline(1, color="#aaa", linewidth=1)
    axes.legend(loc="lower right")


def _settings(
    mode: Mode, rows: Sequence[dict[str, Any]]
) -> Iterator[tuple[list[dict[str, Any]], str, str]]:
    """The rows of each line, its style, and what its label says of the setting."""
    _, _, each, what = _AXES[mode]
    for index, value in enumerate(dict.fromkeys(row["cell"][each] for row in rows)):
        setting = [row for row in rows if row["cell"][each] == value]
        suffix = what.format(value, s="" if value == 1 else "s")
        yield setting, _STYLES[index % len(_STYLES)], suffix


def _lengths(mode: Mode, rows: Sequence[dict[str, Any]]) -> list[int]:
    """What the x axis shows of each row."""
    return [row["cell"][_AXES[mode][0]] for row in rows]


def _set_axes(axes: Any, mode: Mode, rows: Sequence[dict[str, Any]], title: str) -> None:
    """A logarithmic x axis with a tick at every measured value, and a y axis from 0."""
    axes.set(title=title, xlabel=_AXES[mode][1])
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(set(_lengths(mode, rows))))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
