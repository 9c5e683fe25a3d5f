"""The command `train calibrate`: a SwiftKV model in closed form, without training."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from .. import cli
from ..calibration import SLOPE_TOKENS
from ..checkpoints import save_hf
from ..checkpoints.loss_notes import loss_warning
from ..checkpoints.source import Source
from ..checkpoints.training_run import CALIBRATION, EXPORT, run_steps
from ..cli.devices import join_and_emulate, refuse_x64
from ..cli.fields import given
from ..cli.model_options import ProcessOptions
from ..errors import UsageError
from ..kernel_check import forward_configs
from ..model.attention import Attention
from ..model.config import Config
from ..model.cut import CUT_FIELDS, describe_cut, has_same_delta
from ..model.model import Model
from ..model.stacks import cast
from ..process.distributed import is_main_process
from ..process.files import write_json
from .analysis.given_analysis import warn_over_budget
from .calibrate_options import CALIBRATION_DEMO, ON_A_CPU, CalibrationOptions
from .data.loader import DatasetMixture
from .loss.far_tokens import FAR_NATS
from .loss.objective import Objective
from .loss.quality import MIN_FAR_TOKENS, FarLoss, PerplexityLoss, StudentLoss
from .run.evaluation import compare_rows, load_held_out, noted, warn_of_loss
from .run.open_run import OpenRun, open_run
from .run.output_folder import held_folder
from .run.setup import check_closed_form, describe_run
from .run.start import calibration_tokens, copied_delta, fitted_delta, rows_left, scale_queries
from .run.step import make_eval_step
from .run_options import PlanOptions, make_options

logger = logging.getLogger(__name__)


MEASURED = Objective(temperature=1.0, hidden_weight=0.0, hidden="relative")
"""The divergence of the models as they are: at temperature 1, without the hidden state's."""
HELD_OUT = "held-out text"
LEFT = "the data, in rows that were not fitted to"
"""Names of the text on which a table was measured."""


def main(args: argparse.Namespace) -> int:
    planned = PlanOptions(**given(PlanOptions, args))
    fields = given(CalibrationOptions, args)
    options = make_options(fields, demo=CALIBRATION_DEMO, dry_run=planned.dry_run)
    if planned.dry_run:
        if options.keep_delta:
            raise UsageError("`dry_run`: there is none of `keep_delta`, which fits nothing")
        from .calibration_plan import plan_calibration

        plan_calibration(options, planned.topology)
        return cli.OK
    refuse_x64()
    join_and_emulate(options.mesh, **given(ProcessOptions, args))
    if "model" in fields and jax.default_backend() == "cpu":
        options = on_a_cpu(options, fields)
    run(options)
    return cli.OK


def on_a_cpu(options: CalibrationOptions, given: Collection[str]) -> CalibrationOptions:
    """The options with the defaults of a CPU for those that are not `given`."""
    chosen = {name: value for name, value in ON_A_CPU.items() if name not in given}
    if "max_length" in chosen:
        logger.info(
            "rows have %d tokens, as on a CPU: longer ones by `max_length`", chosen["max_length"]
        )
    return dataclasses.replace(options, **chosen)


def run(options: CalibrationOptions) -> None:
    """Calibrate and export to `output_dir/model`. Raises as training does, and `UsageError` if the
    folder has a model already, or `keep_delta` has nothing to scale."""
    with held_folder(options.output_dir, options.model):
        _run(open_run(options, check_calibration, forward_configs))


def _run(opened: OpenRun[CalibrationOptions]) -> None:
    options = opened.options
    mesh = opened.mesh
    data = opened.data
    found = opened.model
    keep_delta = options.keep_delta
    model = dataclasses.replace(found, swiftkv=None)
    if not keep_delta:  # whatever delta the checkpoint has is left behind, with its order of heads
        plain = dataclasses.replace(model.config, shared_kv_heads=None)
        model = dataclasses.replace(model, config=plain)
    config = model.config
    logger.info("%s", describe_run(options, model, mesh))

    start = time.perf_counter()
    if keep_delta:
        calibrated = scale_queries(options, found, data, mesh)
        layers = ()
    else:
        calibrated, layers = fitted_delta(options, model, data, mesh)
    jax.block_until_ready(calibrated.swiftkv)
    seconds = time.perf_counter() - start
    logger.info("calibrated in %.1f s", seconds)
    results = {}
    chosen = None
    if opened.eval_data is None:
        fitted = 0 if keep_delta else calibration_tokens(options, config, mesh)
        scaled = SLOPE_TOKENS if config.has_two_caches else 0
        chosen = rows_left(options, data, max(fitted, scaled))
    if opened.eval_data is not None or chosen is not None:
        if keep_delta:
            students = {"as it was": found, "scaled": calibrated}
        else:
            students = {"copied": copied_delta("authors", model, mesh), "calibrated": calibrated}
        results = measure(options, students, opened.eval_data or data, mesh, chosen)
        del students
    else:
        logger.warning(
            "nothing is measured, because all of `data` was fitted to: give `eval_data`, more "
            "`data` or fewer `calibration_tokens`"
        )
    lost = _loss(*results.values())
    files = noted(model.auxiliary_files, "calibration", lost)
    warning = loss_warning(files.hf_config)
    if warning is None and not lost.far.is_known:
        warning = "loss on far tokens: not measured"
    if is_main_process():
        if results:
            print(table(results, config, HELD_OUT if chosen is None else LEFT))
            warn_of_losses(results, config, keep_delta=keep_delta)
            remedy = "distil it, or keep more layers (`num_key_value_layers`)"
            warn_over_budget(options, config, lost.perplexity, remedy)
        write_json(
            options.output_dir / CALIBRATION,
            {
                "model": str(Path(options.model).absolute()),
                "data": options.data,
                **{name: getattr(config, name) for name in CUT_FIELDS},
                "layers": [dataclasses.asdict(layer) for layer in layers],
                "held_out": results,
                "warning": warning,
                "measured_on": options.eval_data if chosen is None else options.data,
                "seconds": round(seconds, 2),
            },
        )
    dtype = opened.export_dtype
    llama = cast(calibrated.llama, dtype)
    delta = cast(calibrated.swiftkv, dtype)
    exported = dataclasses.replace(calibrated, llama=llama, swiftkv=delta, auxiliary_files=files)
    save_hf(exported, opened.exported)
    logger.info("the model is in %s", opened.exported)


def check_calibration(options: CalibrationOptions, source: Source, config: Config) -> None:
    """Raise `UsageError` for a model that cannot be calibrated as the options say."""
    if options.keep_delta:
        _check_kept(source, config)
    else:
        check_closed_form(config)
        if source.has_delta:
            logger.warning("the model has a delta already, which a new fit replaces")
        if config.has_two_caches:
            logger.warning(
                "`generated_kv`=own with layers that share caches: first distil such a model for "
                "boundary, then scale it with `keep_delta`"
            )
    if (options.output_dir / EXPORT).exists():
        raise UsageError(f"`output_dir`={options.output_dir}: it holds a model already")
    if run_steps(options.output_dir):
        raise UsageError(
            f"`output_dir`={options.output_dir}: it holds the checkpoints of a training run; name "
            f"another"
        )


def _loss(*results: dict[str, Any]) -> StudentLoss:
    """The loss of the last student, the one that is exported; unknown without any."""
    if not results:
        return StudentLoss()
    last = results[-1]
    share = last["perplexity"] / last["teacher_perplexity"] - 1
    return StudentLoss(
        PerplexityLoss(share, last["perplexity_loss_error"]),
        FarLoss(last["far_tokens"], last["far_nats"]),
    )


def _check_kept(source: Source, config: Config) -> None:
    """Raise `UsageError` unless the checkpoint's delta is one of `config` whose queries matter."""
    if not source.has_delta:
        raise UsageError("`keep_delta`: the model has no delta")
    if not has_same_delta(config, source.config):
        found = describe_cut(source.config, config.num_layers)
        raise UsageError(f"`keep_delta`: the model's delta is of {found}")
    if source.config.has_two_caches:
        raise UsageError("`keep_delta`: the model is for `generated_kv`=own: it is scaled already")
    if not config.has_two_caches:
        raise UsageError("`keep_delta` needs `generated_kv`=own and layers that share caches")
    if config.qk_norm is not None:
        raise UsageError("`keep_delta`: this model's queries have norms, which undo any scale")


def measure(
    options: CalibrationOptions,
    students: dict[str, Model],
    data: DatasetMixture,
    mesh: Mesh,
    chosen: range | None = None,
) -> dict[str, dict[str, Any]]:
    """For each student of one teacher: the number of predictions on held-out rows (those `chosen`,
    or the first of `data`), perplexities, divergence and agreement on them, and the nats lost on
    those that depend on the far prompt, of which there may be none."""
    first = next(iter(students.values()))
    rows = load_held_out(options, first.config, first.llama, data, mesh, chosen)
    attention = Attention(mesh, options.attention)
    step_of = functools.cache(lambda config: make_eval_step(config, MEASURED, attention))
    results = {}
    for name, student in students.items():
        step = functools.partial(step_of(student.config), student.swiftkv, student.llama)
        total, lost = compare_rows(step, rows)
        means = total.means()
        results[name] = {
            "tokens": int(total.targets),
            "teacher_perplexity": math.exp(means["teacher_loss"]),
            "perplexity": math.exp(means["student_loss"]),
            "kl": float(means["kl"]),
            "agreement": float(means["agreement"]),
            "perplexity_loss_error": lost.perplexity.error,
            "far_tokens": lost.far.tokens,
            "far_nats": lost.far.nats,
        }
    return results


def table(results: dict[str, dict[str, Any]], config: Config, text: str = HELD_OUT) -> str:
    """One line per student; what `text` they were measured on and the teacher's perplexity in the
    title."""
    *_, last = results.values()
    teacher = last["teacher_perplexity"]
    which = ""
    if config.generated_kv == "own":
        which = ", those in answers, or after a random point of plain text"
    lines = [
        f"{last['tokens']:,} tokens of {text}{which}; teacher's perplexity {teacher:,.3f}",
        "projections  perplexity  above the teacher      KL  agreement  far tokens, nats lost",
    ]
    for name, row in results.items():
        above = row["perplexity"] / teacher - 1
        lines.append(
            f"{name:<11}  {row['perplexity']:10,.3f}  {above:+17.2%}  {row['kl']:6.4f}  "
            f"{row['agreement']:9.1%}  "
            + FarLoss(row["far_tokens"], row["far_nats"]).cell.rjust(21)
        )
    far = last["far_tokens"]
    lost = last["far_nats"]
    which = f"on which the teacher loses more than {FAR_NATS:g} nat without the far part of the row"
    if lost is None:
        lines.append(f"far tokens: there are none {which}; measure on more text, or longer rows")
    elif far < MIN_FAR_TOKENS:
        few = f"too few to say, {MIN_FAR_TOKENS} are needed: measure on more text, or longer rows"
        lines.append(f"far tokens: the {far} {which}, {few}")
    else:
        lines.append(f"far tokens: the {far:,} {which}" + "; below 0 is no gain" * (lost < 0))
    return "\n".join(lines)


def warn_of_losses(results: dict[str, dict[str, Any]], config: Config, *, keep_delta: bool) -> None:
    """Log a warning if the last student should not be served as it is: it loses more than
    module `quality` allows, or is further from the teacher than the other without losing less on
    far tokens."""
    (before, old), (name, new) = results.items()
    lost = _loss(new)
    if config.generated_kv == "boundary":
        remedy = "distil it before you serve it"
    elif keep_delta:
        remedy = "serve it with `generated_kv`=boundary"
    elif not config.has_two_caches:
        closer = "bring its boundary state closer (`boundary_taps`, `exact_head`)"
        remedy = "distil it" if config.boundary_taps else closer
    else:
        remedy = "distil it for boundary before you scale it"
    more = "or keep more layers (`num_key_value_layers`)"
    warn_of_loss(lost, f"the {name} model", f"{remedy}, {more}")
    if new["kl"] > old["kl"] and not (lost.far.is_known and lost.far.nats < old["far_nats"]):
        logger.warning(
            "the %s model's KL from the teacher, %.4f, is above that of the model %s, %.4f",
            name,
            new["kl"],
            before,
            old["kl"],
        )
