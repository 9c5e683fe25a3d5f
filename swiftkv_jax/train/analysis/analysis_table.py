"""An analysis as text: a table, what its keys and heads say, and the recommendation."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from ...calibration import LayerFit
from ..loss.far_tokens import FAR_NATS
from ..loss.quality import MAX_FAR_LOSS, MIN_FAR_TOKENS, FarLoss, plus_minus
from .cut_search import dips
from .heads import cut_off, describe_heads
from .recommendation import Budget, Recommendation, as_counted
from .sweep import Analysis, CutResult

UNIFORM = {"g": "1", "M": "0", "neurons": "0", "taps": "0", "head": "0", "KV cache": "100.0%"}
"""Cells of columns that are left out where all students have them."""
WIDTH = 120
"""Characters of a line of R2 by layer."""


def table(
    analysis: Analysis, num_layers: int, budget: Budget, recommendation: Recommendation | None
) -> str:
    """One line per student, sorted by K, then g; below it notes on far tokens, keys and heads."""
    far = analysis.far_tokens
    columns: dict[str, Callable[[CutResult], str]] = {
        "K": lambda cut: str(cut.num_key_value_layers),
        "of layers": lambda cut: f"{cut.num_key_value_layers / num_layers:.1%}",
        "g": lambda cut: str(cut.key_value_group_size),
        "M": lambda cut: str(cut.prompt_attention_layers),
        "neurons": lambda cut: str(cut.prompt_mlp_neurons),
        "taps": lambda cut: str(cut.boundary_taps),
        "head": lambda cut: str(cut.exact_head),
        "generated": _generated,
        "KL": lambda cut: f"{cut.kl:.4f}",
        "agreement": lambda cut: f"{cut.agreement:.1%}",
        "perplexity": lambda cut: (
            f"{cut.perplexity_loss:+.2%}{plus_minus(cut.perplexity_loss_error, '.2%')}"
        ),
        "far nats": lambda cut: _far(far, cut),
        "prefill FLOPs": lambda cut: f"{cut.prefill_flops_share:.1%}",
        "KV bytes/token": lambda cut: f"{cut.kv_bytes_per_token:,}",
        "KV cache": lambda cut: f"{cut.kv_bytes_share:.1%}",
    }
    for name, cell in UNIFORM.items():
        if all(columns[name](cut) == cell for cut in analysis.cuts):
            del columns[name]
    if analysis.calibration_tokens:
        columns["R2 of K (layer)"] = lambda cut: _smallest(cut, "r2_k")
        columns["R2 of V (layer)"] = lambda cut: _smallest(cut, "r2_v")
    if recommendation is not None:
        columns["budget"] = lambda cut: _verdict(cut, far, budget, recommendation)
    rows = [[cell(cut) for cell in columns.values()] for cut in analysis.cuts]
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        for cells in (list(columns), *rows)
    ]
    title = f"undistilled students, {_describe_init(analysis)}, on {analysis.tokens:,} predicted"
    title += f" tokens; teacher's perplexity {analysis.teacher_perplexity:,.2f}"
    notes = [
        _describe_far(analysis),
        *describe_keys(analysis, recommendation),
        *describe_dips(analysis),
        describe_heads(analysis.heads),
    ]
    if recommendation is not None:
        notes.append("budget: a loss counts with its standard error on top")
    return "\n".join([title, lines[0], "-" * len(lines[0]), *lines[1:], *notes])


def _verdict(
    cut: CutResult, far_tokens: int, budget: Budget, recommendation: Recommendation
) -> str:
    if recommendation.is_of(cut):
        return "recommended" if recommendation.within_budget else "nearest"
    return "within" if budget.holds(as_counted(cut, far_tokens)) else "over"


def _generated(cut: CutResult) -> str:
    return cut.generated_kv + (f" + {cut.exact_tail}" if cut.exact_tail else "")


def _far(far_tokens: int, cut: CutResult) -> str:
    lost = FarLoss(far_tokens, cut.far_nats)
    error = plus_minus(cut.far_nats_error, ".3f") if lost.is_known else ""
    return lost.cell + error + "*" * lost.is_too_much


def _smallest(cut: CutResult, name: str) -> str:
    """The smallest R2 of all layers, and which one has it."""
    worst = min(cut.r2, key=lambda layer: getattr(layer, name))
    return f"{getattr(worst, name):.3f} ({worst.layer})"


def _describe_far(analysis: Analysis) -> str:
    """Sentences about the far tokens."""
    count = analysis.far_tokens
    text = (
        f"far nats: lost on the {count:,} tokens on which the teacher loses more "
        f"than {FAR_NATS:g} nat without the far part of the row"
    )
    if count < MIN_FAR_TOKENS:
        text += f"; {MIN_FAR_TOKENS} are needed: measure more rows, or longer ones"
    if any(FarLoss(count, cut.far_nats).is_too_much for cut in analysis.cuts):
        text += f"; *: more than {MAX_FAR_LOSS:g}: distil it or keep more layers, and measure again"
    return text


def describe_keys(analysis: Analysis, recommendation: Recommendation | None) -> list[str]:
    """R2 of the keys of every layer, for each K as it is and the recommended student."""
    lines = []
    for k, cuts in by_k(analysis.cuts).items():
        recommended = [cut for cut in cuts[1:] if recommendation and recommendation.is_of(cut)]
        for cut in (cuts[0], *recommended):
            name = f"K={k}" + f" with {_improved(cut)}" * (cut is not cuts[0])
            least = min(cut.r2, key=lambda layer: layer.r2_k)
            values = "  ".join(
                f"{layer.layer}:{layer.r2_k:.2f}" + "*" * (layer is least) for layer in cut.r2
            )
            lines += textwrap.wrap(f"{name}  {values}", WIDTH, subsequent_indent="    ")
    if lines:
        lines.insert(
            0,
            "R2 of keys, layer by layer: explained share of their variance, first tokens of "
            "documents left out; *: the smallest",
        )
    return lines


def describe_dips(analysis: Analysis) -> list[str]:
    """For each K whose keys dip the layers, their R2 as it is and as the measured students with an
    exact head have it; and whether previous-token heads are cut off."""
    lines = []
    for k, (base, *improved) in by_k(analysis.cuts).items():
        if found := dips(base.layers):
            layers = [fit.layer for fit in found]
            r2 = _r2(base.layers, layers)
            line = f"K={k}: the keys of {_layers(layers)} dip, R2 of the fit {r2}"
            for cut in improved:
                line += f"; with {_improved(cut)} {_r2(cut.layers, layers)}"
            lines.append(line)
        previous, induction = cut_off(analysis.heads, k)
        if previous:
            lines.append(
                f"K={k}: previous-token heads of {_layers(previous)} are above the cut, and the "
                f"induction heads of {_layers(induction)} need what they write"
            )
    return lines


def by_k(cuts: Sequence[CutResult]) -> dict[int, list[CutResult]]:
    """The students in closed form, without groups, of each K: the first without an exact head, the
    others with one. All are fitted for the same keys of generated tokens: `own` where that was
    measured, as exact heads are."""
    fitted = [cut for cut in cuts if cut.key_value_group_size == 1 and cut.layers]
    found: dict[int, list[CutResult]] = {}
    for cut in fitted:
        is_own = cut.generated_kv == "own"
        if not cut.exact_head and (cut.num_key_value_layers not in found or is_own):
            found[cut.num_key_value_layers] = [cut]
    for cut in fitted:
        if cut.exact_head:
            found[cut.num_key_value_layers].append(cut)
    return found


def _improved(cut: CutResult) -> str:
    parts = ["a tap"] * cut.boundary_taps
    if cut.prompt_attention_layers:
        parts.append(f"M={cut.prompt_attention_layers}")
    return " and ".join(parts or ["an exact head"])


def _r2(fits: Sequence[LayerFit], layers: Sequence[int]) -> str:
    """R2 of the fit of the keys of `layers`, 1 where they are exact."""
    found = {fit.layer: fit.r2_k for fit in fits}
    return ", ".join(f"{found.get(layer, 1.0):.2f}" for layer in layers)


def _layers(layers: Sequence[int]) -> str:
    return f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"


def _describe_init(analysis: Analysis) -> str:
    """A phrase for the start of the students."""
    if analysis.init != "closed-form":
        return f"copied ({analysis.init})"
    return f"in closed form from {analysis.calibration_tokens:,} other tokens"
