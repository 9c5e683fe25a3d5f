"""The pictures of an analysis and of a run, by matplotlib. Nothing here needs a display."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from ...process.plotting import COLORS, figure
from ..analysis.analysis_table import by_k
from ..analysis.cut_search import dips
from ..analysis.recommendation import Recommendation
from ..analysis.sweep import Analysis, CutResult
from ..loss.quality import describe_count


def _set_log(axes: Any) -> None:
    """A logarithmic y axis labelled at 1, 2 and 5 of every decade."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def draw_analysis(
    analysis: Analysis, path: Path, recommendation: Recommendation | None = None
) -> None:
    """Four panels: the students' losses of perplexity and on far tokens against the FLOPs of
    prefill, with the budget and the recommended one; R2 of keys per layer, with the layers that dip
    marked; and the similarity of the layers' inputs."""
    with figure(11, 8.4, 2, 2) as (picture, (first, second, third, fourth)):
        perplexity = {"lost": lambda cut: 100 * cut.perplexity_loss, "limit": None}
        far = {"lost": lambda cut: cut.far_nats, "limit": None}
        if recommendation is not None:
            if recommendation.max_perplexity_loss is not None:
                perplexity["limit"] = 100 * recommendation.max_perplexity_loss
            far["limit"] = recommendation.max_far_loss
        _draw_cuts(first, analysis, recommendation, **perplexity)
        first.set(ylabel="perplexity above the teacher's, %")
        _draw_cuts(second, analysis, recommendation, **far)
        second.set(ylabel="lost on far tokens, nats")
        _draw_keys(third, analysis)
        _draw_similarity(picture, fourth, analysis)
        picture.savefig(path, dpi=150)


def _draw_cuts(
    axes: Any,
    analysis: Analysis,
    recommendation: Recommendation | None,
    *,
    lost: Callable[[CutResult], float | None],
    limit: float | None,
) -> None:
    """One line for each g and `generated_kv`, with K at the points of the first, and students with
    a tap or prompt layers as crosses."""
    kinds = sorted({(cut.key_value_group_size, cut.generated_kv) for cut in analysis.cuts})
    for kind, color in zip(kinds, itertools.cycle(COLORS)):
        cuts = [
            cut
            for cut in analysis.cuts
            if (cut.key_value_group_size, cut.generated_kv) == kind
            and (lost(cut) or 0) > 1e-4  # K = L-1 would be at 0
        ]
        label = f"g = {kind[0]}, {kind[1]}"
        for improved, style in ((False, {"marker": "o"}), (True, {"marker": "x", "ls": ""})):
            chosen = [cut for cut in cuts if (cut.exact_head > 0) == improved]
            x = [100 * cut.prefill_flops_share for cut in chosen]
            y = [lost(cut) for cut in chosen]
            label = None if improved else label
            axes.plot(x, y, markersize=5, color=color, label=label, **style)
        if kind == kinds[0]:
            for cut in cuts:
                at = 100 * cut.prefill_flops_share, lost(cut)
                where = {
                    "xytext": (-4, -4),
                    "textcoords": "offset points",
                    "ha": "right",
                    "va": "top",
                }
                axes.annotate(str(cut.num_key_value_layers), at, color="#555", **where)
    if limit is not None:
        axes.axhline(limit, color="#555", linestyle="--", linewidth=1, label="budget")
    chosen = [cut for cut in analysis.cuts if recommendation and recommendation.is_of(cut)]
    for cut in chosen:
        if (loss := lost(cut) or 0) > 0:
            at = 100 * cut.prefill_flops_share, loss
            axes.plot(*at, marker="o", markersize=12, color="#222", fillstyle="none", ls="")
            axes.annotate(f"K={cut.num_key_value_layers}", at, (8, 6), textcoords="offset points")
    axes.set(xlabel="prefill FLOPs, % of the teacher's (numbers: K)")
    if any((lost(cut) or 0) > 1e-4 for cut in analysis.cuts):
        _set_log(axes)
    axes.set_title(f"Before distillation ({analysis.init})")
    axes.margins(x=0.12, y=0.15)
    axes.legend()


def _draw_keys(axes: Any, analysis: Analysis) -> None:
    """R2 of keys per layer: one line for each K, the layers that dip marked, and dashed what a tap
    or prompt layers make of them."""
    from matplotlib import colormaps

    drawn = by_k(analysis.cuts)
    colors = colormaps["viridis"](np.linspace(0, 0.9, len(drawn)))
    for (k, (base, *improved)), color in zip(drawn.items(), colors, strict=True):
        fits = {each.layer: each.r2_k for each in base.r2}
        axes.plot(fits.keys(), fits.values(), color=color, label=f"K={k}")
        low = [fit.layer for fit in dips(base.layers)]
        axes.plot(low, [fits[layer] for layer in low], "v", color=color)
        for cut in improved:
            fits = {each.layer: each.r2_k for each in cut.r2}
            axes.plot(fits.keys(), fits.values(), color=color, linestyle="--", linewidth=1)
    axes.set(xlabel="layer", ylabel="R² of keys")
    axes.set_title("Keys that follow from the boundary state")
    axes.xaxis.get_major_locator().set_params(integer=True)
    if drawn:
        axes.legend()


def _draw_similarity(picture: Any, axes: Any, analysis: Analysis) -> None:
    image = axes.imshow(analysis.similarity, cmap="viridis", vmax=1, origin="lower")
    axes.grid(False)
    axes.set(xlabel="layer", ylabel="layer")
    axes.set_title("Cosine between the hidden states that enter two layers")
    picture.colorbar(image, ax=axes, shrink=0.9)


# Runs -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Panel:
    """One plot against the step."""

    title: str
    unit: str
    curves: tuple[tuple[str, str], ...]
    """(name in the metrics, label). Names of held-out numbers, which are few, begin with
    `eval_`."""
    scale: float = 1.0
    log: bool = False
    from_zero: bool = False
    count: str | None = None
    """Name of the number of far tokens that the curve is a mean over, for the title."""


_PANELS = (
    Panel("Loss", "loss", (("loss", "training"), ("eval_loss", "held-out"))),
    Panel(
        "The two parts of the loss",
        "per token",
        (("logits_loss", "distillation loss"), ("hidden_loss", "hidden loss")),
        log=True,
    ),
    Panel(
        "KL(teacher ‖ student)",
        "nats per token",
        (("kl", "training"), ("eval_kl", "held-out")),
        log=True,
    ),
    Panel(
        "Held-out perplexity",
        "perplexity",
        (("eval_student_perplexity", "student"), ("eval_teacher_perplexity", "teacher")),
    ),
    Panel(
        "Next token agrees with the teacher",
        "% of positions",
        (("agreement", "training"), ("eval_agreement", "held-out")),
        scale=100,
    ),
    Panel(
        "Lost on held-out far tokens",
        "nats per token",
        (("eval_far_nats", "lost"), ("eval_far_kl", "KL")),
        count="eval_far_tokens",
    ),
    Panel("Gradient norm, before clipping", "norm", (("grad_norm", ""),), log=True),
    Panel("Learning rate", "rate", (("learning_rate", ""),)),
    Panel(
        "Speed",
        "tokens per second",
        (("tokens_per_second", "all"), ("useful_tokens_per_second", "without padding")),
        from_zero=True,
    ),
    Panel(
        "MFU, of the ceiling that the recipe names", "%", (("mfu", ""),), scale=100, from_zero=True
    ),
)


def draw_run(rows: Sequence[dict[str, Any]]) -> str:
    """The curves of a run as one SVG element; a panel without numbers is left out. Text stays
    text."""
    panels = [
        panel for panel in _PANELS if any(name in row for row in rows for name, _ in panel.curves)
    ]
    height = (len(panels) + 1) // 2
    svg = StringIO()
    with figure(10, 2.6 * height, height, 2) as (picture, axes):
        for panel, axis in zip(panels, axes, strict=False):
            _draw_panel(axis, panel, rows)
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        picture.savefig(svg, format="svg", metadata={"Date": None})
    text = svg.getvalue()
    return text[text.index("<svg") :]


def _draw_panel(axes: Any, panel: Panel, rows: Sequence[dict[str, Any]]) -> None:
    for (name, label), color in zip(panel.curves, COLORS, strict=False):
        points = [(row["step"], panel.scale * row[name]) for row in rows if name in row]
        if points:
            marker = "o" if name.startswith("eval_") or len(points) == 1 else None
            axes.plot(
                *zip(*points, strict=True), color=color, label=label, marker=marker, markersize=4
            )
    counts = [row[panel.count] for row in rows if panel.count in row]
    title = f"{panel.title}: {describe_count(counts[-1])}" if counts else panel.title
    axes.set(xlabel="step", ylabel=panel.unit, title=title)
    axes.set_xlim(left=-0.02 * rows[-1]["step"])
    axes.xaxis.get_major_locator().set_params(integer=True)
    if panel.from_zero:
        axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
    if panel.log:
        _set_log(axes)
    else:
        axes.ticklabel_format(axis="y", scilimits=(-3, 6), useMathText=True)
    if len(panel.curves) > 1:
        axes.legend()
