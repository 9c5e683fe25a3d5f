"""A distillation run, in the order of its steps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from pathlib import Path
from typing import NamedTuple

import jax
import optax
from jax.sharding import Mesh

from ...checkpoints import save_hf
from ...checkpoints.source import Source
from ...checkpoints.training_run import EXPORT, RECIPE, SPECULATOR, run_steps
from ...errors import UsageError
from ...kernel_check import training_configs
from ...model.attention import Attention
from ...model.config import Config
from ...model.model import Model
from ...model.params import Llama
from ...model.stacks import cast
from ...plan.cost import train_flops_per_token
from ...process.distributed import is_main_process
from ...process.json_files import read_json
from ..analysis.given_analysis import warn_over_budget
from ..data.loader import DatasetMixture, batches
from ..recipe import Recipe
from ..report.report import write_report
from .batch_sharder import BatchSharder
from .checkpointing import RunCheckpoints, check_resume
from .evaluation import (
    HeldOut,
    evaluate,
    evaluations_since_best,
    load_held_out,
    log_loss,
    noted,
)
from .metrics import EVAL_LOSS, METRICS, MetricsRecorder, held_out_losses
from .open_run import OpenRun, open_run
from .output_folder import held_folder
from .profiling import ProfileWindow
from .progress import PeakFlops, Progress, peak_flops
from .setup import (
    check_loss,
    check_recorded,
    check_trainable,
    describe_run,
    fingerprint,
    own_tail,
    write_settings,
)
from .signals import StopSignals
from .speculator import check_speculator, train_speculator
from .start import start_of_run
from .step import (
    TrainState,
    init_state,
    make_eval_step,
    make_optimizer,
    make_train_step,
    micro_batch_sharding,
    state_shapes,
    state_shardings,
)

logger = logging.getLogger(__name__)


class RunResult(NamedTuple):
    """How a run ended: either with its model or by a signal."""

    exported: Path | None
    """Folder of the exported model; None if the run was stopped before its last step."""
    stopped_by: int = 0
    """Number of the signal that stopped the run; 0 if none did."""


def run(recipe: Recipe) -> RunResult:
    """Distil a delta and export the model to `output_dir/model`.

    Continues from the newest intact checkpoint in `output_dir` if there is one. On SIGINT or
    SIGTERM the current step is finished and saved first. With several processes, all of them call
    this. Raises `UsageError`, `DataError`, `CheckpointError`, `DivergenceError` or
    `OutOfMemoryError`.
    """
    with held_folder(recipe.output_dir, recipe.model):
        return _run(open_run(recipe, check_run, training_configs))


def _run(opened: OpenRun[Recipe]) -> RunResult:
    recipe = opened.options
    mesh = opened.mesh
    data = opened.data
    exported = opened.exported
    continues = bool(run_steps(recipe.output_dir))
    if recipe.eval_data is None and not continues:
        logger.warning(
            "without `eval_data` nothing shows what the student loses on tokens that depend on the "
            "far prompt"
        )
    steps = recipe.max_steps or max(1, recipe.num_train_epochs * data.num_rows // recipe.batch_size)
    model, initial_delta_digest = start_of_run(
        recipe, opened.source, opened.model, data, mesh, continues=continues
    )
    config = model.config
    logger.info("%s", describe_run(recipe, model, mesh))
    optimizer = make_optimizer(recipe, steps)
    shapes = state_shapes(config, optimizer)
    shardings = state_shardings(config, optimizer, mesh)
    checkpoints = RunCheckpoints(
        recipe.output_dir,
        fingerprint(recipe, model, initial_delta_digest, data, steps),
        keep=recipe.save_total_limit,
        resume=recipe.resume,
    )
    with contextlib.closing(checkpoints):
        state = checkpoints.restore(shapes, shardings)
        if state is not None and exported.exists():
            if not _has_ended(recipe, int(state.step), steps):
                raise UsageError(
                    f"`output_dir`={recipe.output_dir} holds a model, but its run has only reached "
                    f"step {int(state.step)} of {steps}; remove {exported} to train on"
                )
            logger.info(
                "finished after step %d before: the model is in %s", int(state.step), exported
            )
            if _lacks_speculator(recipe):
                # As the export was made, whatever the recipe says now.
                if read_json(recipe.output_dir / RECIPE).get("load_best_model_at_end"):
                    losses = held_out_losses(recipe.output_dir / METRICS, int(state.step))
                    checkpoints.add_scores(losses)
                    state = _best_state(checkpoints, state, shapes, shardings)
                _train_speculator(opened, model, state)
            return RunResult(exported)
        if state is None:
            assert model.swiftkv is not None
            state = init_state(config, optimizer, mesh, model.swiftkv)
        else:
            check_recorded(recipe, config, opened.eval_data)
        # From here on the delta is the master copy in the state.
        model = dataclasses.replace(model, swiftkv=None)

        peak = peak_flops(mesh, model.dtype)
        if is_main_process():
            write_settings(recipe, config, opened.eval_data, steps, peak.description)
        context = RunContext(
            recipe, config, mesh, steps, optimizer, model.llama, data, opened.eval_data, peak
        )
        state, stop = train(context, state, checkpoints)
        if stop:
            logger.info(
                "stopped after step %d of %d; the same command continues", int(state.step), steps
            )
            return RunResult(None, stop)
        if recipe.load_best_model_at_end:
            last = int(state.step)
            state = _best_state(checkpoints, state, shapes, shardings)
            if (best := int(state.step)) != last:
                logger.info("exporting step %d, which had the lowest held-out loss", best)

    files = model.auxiliary_files
    if is_main_process():  # which writes them
        lost = log_loss(recipe.output_dir, int(state.step))
        remedy = "train it longer, or keep more layers (`num_key_value_layers`)"
        warn_over_budget(recipe, config, lost.perplexity, remedy)
        files = noted(files, "training", lost)
        # Before the export, because a run that has its model is finished and not started again.
        write_report(recipe.output_dir)
    llama, delta = (cast(tree, opened.export_dtype) for tree in (model.llama, state.delta))
    trained = dataclasses.replace(model, llama=llama, swiftkv=delta, auxiliary_files=files)
    save_hf(trained, exported)
    logger.info(
        "finished after step %d of %d: the model is in %s", int(state.step), steps, exported
    )
    if _lacks_speculator(recipe):
        _train_speculator(opened, model, state)
    return RunResult(exported)


def _has_ended(recipe: Recipe, step: int, steps: int) -> bool:
    """Return whether the run in the output folder, as it was recorded, ends with `step`."""
    if step == steps:
        return True
    patience = read_json(recipe.output_dir / RECIPE).get("early_stopping_patience")
    losses = held_out_losses(recipe.output_dir / METRICS, step)
    return patience is not None and evaluations_since_best([*losses.values()]) >= patience


def _best_state(
    checkpoints: RunCheckpoints, state: TrainState, shapes: TrainState, shardings: TrainState
) -> TrainState:
    """The saved state with the lowest held-out loss; `state`, the last one, if none has a loss."""
    best = checkpoints.best_step()
    if best in (None, int(state.step)):
        return state
    return checkpoints.load(best, shapes, shardings)


def _lacks_speculator(recipe: Recipe) -> bool:
    """Return whether the recipe asks for a speculator that the output folder does not have."""
    return recipe.speculator is not None and not (recipe.output_dir / SPECULATOR).exists()


def _train_speculator(opened: OpenRun[Recipe], model: Model, state: TrainState) -> None:
    model = dataclasses.replace(model, swiftkv=state.delta)
    train_speculator(
        opened.options, model, opened.data, opened.eval_data, opened.mesh, int(state.step)
    )


def check_run(recipe: Recipe, source: Source, config: Config) -> None:
    """Raise `UsageError` for a run that cannot begin or be continued."""
    check_loss(recipe, config)
    check_trainable(config)
    check_resume(recipe.output_dir, recipe.resume)
    exported = recipe.output_dir / EXPORT
    continues = bool(run_steps(recipe.output_dir))
    if exported.exists() and not continues:
        raise UsageError(
            f"`output_dir`={recipe.output_dir} holds a model but no run to continue; name "
            f"another, or remove {exported}"
        )
    check_speculator(recipe)


class RunContext(NamedTuple):
    """Values that do not change while a run trains."""

    recipe: Recipe
    config: Config
    mesh: Mesh
    steps: int
    optimizer: optax.GradientTransformation
    llama: Llama
    data: DatasetMixture
    eval_data: DatasetMixture | None
    peak: PeakFlops


def train(
    context: RunContext, state: TrainState, checkpoints: RunCheckpoints
) -> tuple[TrainState, int]:
    """Take the steps from `state` on: (the last state, the signal that stopped the run or 0)."""
    recipe = context.recipe
    steps = context.steps
    first = int(state.step)
    train_step = make_train_step(context.config, recipe, context.optimizer, context.mesh)
    attention = Attention(context.mesh, recipe.attention, recipe.shard_sequence)
    eval_step = make_eval_step(context.config, recipe.objective, attention)
    micro_batches = BatchSharder(
        micro_batch_sharding(context.mesh),
        (recipe.gradient_accumulation_steps, recipe.micro_batch_size),
    )
    progress = Progress(
        first_step=first,
        steps=steps,
        tokens_per_step=recipe.batch_size * recipe.max_length,
        # Those of the model, without what is computed again.
        flops_per_token=train_flops_per_token(context.config, recipe.max_length),
        peak=context.peak,
    )

    with contextlib.ExitStack() as stack:
        metrics = stack.enter_context(
            contextlib.closing(
                MetricsRecorder(
                    recipe,
                    progress,
                    first_step=first,
                    steps=steps,
                    newest_saved=checkpoints.newest_step,
                )
            )
        )
        profile = stack.enter_context(
            ProfileWindow(recipe.profile_steps, recipe.output_dir / "profile")
        )
        signals = stack.enter_context(StopSignals())

        @functools.cache
        def held_out(data: DatasetMixture) -> HeldOut:
            return load_held_out(recipe, context.config, context.llama, data, context.mesh)

        def is_evaluated(step: int) -> bool:
            return step == steps or (
                recipe.eval_steps is not None and step % recipe.eval_steps == 0
            )

        def measure(step: int, state: TrainState) -> float | None:
            """The held-out loss; None without held-out data."""
            if context.eval_data is None:
                return None
            compare = functools.partial(eval_step, state.delta, context.llama)
            rows = held_out(context.eval_data)
            results = evaluate(compare, rows, recipe.hidden_loss_weight)
            metrics.record_evaluation(step, results)
            return results[EVAL_LOSS]

        def patience_is_over(step: int) -> bool:
            """True to stop early: after an evaluation, or at the start of a resumed run, which
            may have been killed after its last step."""
            patience = recipe.early_stopping_patience
            losses = list(metrics.held_out_losses.values())
            if patience is None or evaluations_since_best(losses) < patience:
                return False
            logger.info(
                "step %d: the held-out loss has not fallen in %d evaluations", step, patience
            )
            return True

        if first:
            logger.info("continuing after step %d of %d", first, steps)
            if is_evaluated(first) and first not in metrics.held_out_losses:
                measure(first, state)  # a signal came first
            checkpoints.add_scores(metrics.held_out_losses)
            if patience_is_over(first):
                return state, 0
        else:
            score = measure(0, state)
            if recipe.load_best_model_at_end:  # training may make it worse
                checkpoints.save(state, score=score)
        reading = batches(
            context.data,
            recipe.batch_size,
            positions=micro_batches.positions,
            seed=recipe.seed,
            start=first,
            stop=steps,
            loss_mask=recipe.loss_mask,
            padding=recipe.padding,
            own_tail=own_tail(context.config),
        )
        local_batches = stack.enter_context(contextlib.closing(reading))
        for step, local in enumerate(local_batches, start=first + 1):
            profile.step(step, state)
            sharded = micro_batches.shard(local.batch)
            logged = metrics.is_logged(step)
            state, values = train_step(state, context.llama, sharded, logged)
            metrics.record(step, values, local.row_ids)
            if step == first + 1:
                jax.block_until_ready(state)
                progress.restart_clock()  # compilation is not training speed

            stop = signals.agreed()
            evaluates = is_evaluated(step)
            if not (stop or evaluates or step % recipe.save_steps == 0):
                continue
            metrics.flush()
            # A run that is stopped ends soon; the one that continues it makes up for it.
            evaluates &= not stop or step == steps
            checkpoints.save(state, score=measure(step, state) if evaluates else None)
            progress.restart_clock()
            if stop and step < steps:
                return state, stop
            if evaluates and patience_is_over(step):
                break
    return state, 0
