"""`python -m swiftkv_jax.train report RUN`: one page with the curves of a run, during it or after.

`report.html` needs nothing beside itself: the picture is inside. It is made from `metrics.jsonl`
and `recipe.json` alone.
"""

from __future__ import annotations

import argparse
import html
import logging
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ... import cli
from ...checkpoints.training_run import RECIPE
from ...errors import CheckpointError, UsageError
from ...process.files import write_atomic
from ...process.json_files import read_json
from ...process.plotting import matplotlib_missing
from ..loss.divergence import describe
from ..run.metrics import METRICS, loss_of, read_metrics
from .plots import draw_run

logger = logging.getLogger(__name__)

REPORT = "report.html"

_SETTINGS = """
model data eval_data mesh num_key_value_layers key_value_group_size
prompt_attention_layers prompt_mlp_neurons boundary_taps generated_kv exact_tail exact_head init
max_length padding batch_size gradient_accumulation_steps max_steps learning_rate lr_schedule
warmup_ratio max_grad_norm temperature kl kl_top_k hidden_loss hidden_loss_weight hidden_loss_layer
loss_average loss_mask dtype remat seed mfu_of jax
""".split()

_OUTCOMES = {  # name in the metrics -> (label, format)
    "eval_teacher_perplexity": ("perplexity, teacher", "{:.4g}"),
    "eval_student_perplexity": ("perplexity, student", "{:.4g}"),
    "eval_agreement": ("next token agrees with the teacher", "{:.1%}"),
    "eval_kl": ("KL, nats per token", "{:.4g}"),
    "eval_logits_loss": ("distillation loss", "{:.4g}"),
    "eval_hidden_loss": ("hidden loss", "{:.4g}"),
}

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1080px;
  margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.4rem; margin-bottom: 0; }}
h2 {{ font-size: 1.1rem; margin: 2rem 0 .5rem; }}
p {{ margin: .3rem 0; color: #555; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: left; padding: .15rem 1.5rem .15rem 0; border-bottom: 1px solid #e6e6e6;
  overflow-wrap: anywhere; }}
th {{ font-weight: 600; }}
svg {{ width: 100%; height: auto; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{summary}</p>
<p>{losses}</p>
{outcomes}
<h2>Curves</h2>
{curves}
<h2>Recipe</h2>
{recipe}
</body>
</html>
"""


def main(args: argparse.Namespace) -> int:
    write_report(args.folder)
    return cli.OK


def write_report(folder: Path) -> None:
    """Write `folder/report.html`; where matplotlib is missing, log how to get it instead.

    Raises `UsageError` if the folder holds no run, or one that has not logged a step, and
    `CheckpointError` if its `recipe.json` is damaged.
    """
    for name in (RECIPE, METRICS):
        if not (folder / name).is_file():
            raise UsageError(f"{folder}: no {name} in it; name the output folder of a run")
    if missing := matplotlib_missing():
        logger.info("no %s: %s", REPORT, missing)
        return
    recipe = read_json(folder / RECIPE)
    rows = read_metrics(folder / METRICS)
    if not rows:
        raise UsageError(f"{folder / METRICS}: nothing is logged yet")
    if not (isinstance(recipe.get("config"), dict) and isinstance(recipe.get("max_steps"), int)):
        raise CheckpointError(
            f"{folder / RECIPE}: not written by a training run: it has no config and max_steps"
        )
    page = render(folder.resolve().name, recipe, rows)
    write_atomic(folder / REPORT, page.encode())
    logger.info("report: %s", folder / REPORT)


def render(name: str, recipe: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """The page, as HTML."""
    evaluations = [row for row in rows if "eval_student_perplexity" in row]
    resolved = recipe | recipe["config"]  # the cut that was taken where the recipe left it open
    settings = [(key, _text(resolved[key])) for key in _SETTINGS if resolved.get(key) is not None]
    loss = describe(recipe["kl"], recipe["temperature"], recipe["kl_top_k"])
    settings.append(("distillation loss", loss))
    return _PAGE.format(
        title=html.escape(f"Distillation run {name}"),
        summary=html.escape(summary(recipe, rows)),
        losses=html.escape(loss_sentence(evaluations)),
        outcomes=_table(*outcomes(evaluations)) if evaluations else "",
        curves=draw_run(rows),
        recipe=_table(("setting", "value"), settings),
    )


def summary(recipe: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Step, time and speed of the run, in one line."""
    timed = [row for row in rows if "seconds" in row]
    parts = [f"step {rows[-1]['step']:,} of {recipe['max_steps']:,}"]
    if timed:
        speed, useful, mfu = (
            statistics.median(row[key] for row in timed)
            for key in ("tokens_per_second", "useful_tokens_per_second", "mfu")
        )
        parts.append(
            f"{tqdm.format_interval(sum(row['seconds'] for row in timed))} in logged steps"
        )
        parts.append(f"median {speed:,.0f} tokens/s ({useful:,.0f} without padding), MFU {mfu:.1%}")
    return "; ".join(parts)


def loss_sentence(evaluations: Sequence[dict[str, Any]]) -> str:
    """Warning of the last evaluation, or that nothing was measured; empty if all is well."""
    if not evaluations:
        return "Loss on far tokens: not measured (eval_data)."
    too_much = loss_of(evaluations[-1]).too_much
    if not too_much:
        return ""
    return f"Warning: the student loses {too_much}: do not serve it as it is."


def outcomes(evaluations: Sequence[dict[str, Any]]) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    """Held-out numbers of the first and of the last evaluation: (heading, rows)."""
    chosen = evaluations[:1] if len(evaluations) == 1 else [evaluations[0], evaluations[-1]]
    heading = ("held-out", *(_moment(row["step"]) for row in chosen))
    rows = [
        (label, *(form.format(row[key]) for row in chosen))
        for key, (label, form) in _OUTCOMES.items()
    ]
    losses = [loss_of(row) for row in chosen]
    rows.append(("far tokens, nats lost", *(str(lost.far) for lost in losses)))
    excess = (f"{lost.perplexity.share:+.2%}" for lost in losses)
    return heading, [*rows, ("student's perplexity above the teacher's", *excess)]


def _moment(step: int) -> str:
    return "before training" if step == 0 else f"after step {step:,}"


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["".join(f"<th>{html.escape(cell)}</th>" for cell in heading)]
    lines += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    return "<table>\n" + "\n".join(f"<tr>{line}</tr>" for line in lines) + "\n</table>"
