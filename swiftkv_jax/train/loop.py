"""A distillation run, in the order it happens."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from typing import NamedTuple

import jax
import optax
from jax.sharding import Mesh

from ..checkpoints import open_any, save_hf
from ..cli.exit import INTERRUPTED, OK
from ..config import Config
from ..cost import train_flops_per_token
from ..distributed import check_all_take_part
from ..errors import UsageError
from ..mesh import MeshShape, make_mesh
from ..params import Llama, cast
from ..sharding import batch_sharding
from .batch_sharder import BatchSharder
from .checkpointing import RunCheckpoints, check_resume, prepare_folder
from .data.loader import DatasetMixture, batches
from .evaluation import LOSS, evaluate, evaluations_since_best
from .journal import Journal
from .profiling import ProfileWindow
from .progress import Ceiling, Progress, flops_ceiling
from .recipe import Recipe
from .report import write_report
from .setup import (
    choose_cut,
    describe,
    fingerprint,
    load_data,
    load_model,
    open_tokenizer,
    say,
    source_dtype,
    write_settings,
)
from .signals import StopSignals
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

EXPORT = "model"
"""In the output folder."""


def run(recipe: Recipe) -> int:
    """Distil a delta and export the model to `output_dir/model`. Returns the exit code.

    Continues from the newest intact checkpoint in `output_dir` if there is one. On SIGINT or
    SIGTERM the current step is finished and saved first. With several processes, all of them call
    this.
    """
    mesh = make_mesh(recipe.mesh)
    check_all_take_part(mesh)
    recipe = dataclasses.replace(
        recipe, mesh=MeshShape(*mesh.devices.shape)
    )  # checked again, now that -1 is a number
    config = choose_cut(recipe, open_any(recipe.model).config)
    check_resume(recipe.output_dir, recipe.resume)  # before data and weights are read
    prepare_folder(recipe.output_dir)
    rows, eval_rows = load_data(recipe, open_tokenizer(recipe))
    steps = recipe.max_steps or max(1, recipe.num_train_epochs * rows.num_rows // recipe.batch_size)

    model = load_model(recipe, config, mesh)
    export_dtype = source_dtype(model)
    say(describe(recipe, model, mesh))
    optimizer = make_optimizer(recipe, steps)
    shapes, shardings = state_shapes(config, optimizer), state_shardings(config, optimizer, mesh)
    checkpoints = RunCheckpoints(
        recipe.output_dir,
        fingerprint(recipe, model, rows, steps),
        keep=recipe.save_total_limit,
        resume=recipe.resume,
    )
    with contextlib.closing(checkpoints):
        state = checkpoints.restore(shapes, shardings)
        exported = recipe.output_dir / EXPORT
        if exported.exists():
            if state is None:
                raise UsageError(
                    f"--output-dir {recipe.output_dir} holds the model of a finished run; name "
                    f"another, or remove {exported}"
                )
            say(f"finished after step {int(state.step)} before: the model is in {exported}")
            return OK
        if state is None:
            assert model.swiftkv is not None
            state = init_state(config, optimizer, mesh, model.swiftkv)
        model = dataclasses.replace(
            model, swiftkv=None
        )  # the state's master copy is the delta from here on

        ceiling = flops_ceiling(mesh, model.dtype)
        if jax.process_index() == 0:
            write_settings(recipe, config, steps, ceiling.description)
        job = Job(recipe, config, mesh, steps, optimizer, model.llama, rows, eval_rows, ceiling)
        state, stop = train(job, state, checkpoints)
        if stop:
            say(f"stopped after step {int(state.step)} of {steps}; the same command continues")
            return INTERRUPTED if stop == signal.SIGINT else OK
        if recipe.load_best_model_at_end and (best := checkpoints.best_step()) not in (
            None,
            int(state.step),
        ):
            say(f"exporting step {best}, which had the lowest held-out loss")
            state = checkpoints.load(best, shapes, shardings)

    if jax.process_index() == 0:
        write_report(
            recipe.output_dir
        )  # first, because a run that has its model is finished, and is not started again
    save_hf(
        dataclasses.replace(
            model, llama=cast(model.llama, export_dtype), swiftkv=cast(state.delta, export_dtype)
        ),
        exported,
    )
    say(f"finished after step {int(state.step)} of {steps}: the model is in {exported}")
    return OK


class Job(NamedTuple):
    """All that stays as it is while a run trains."""

    recipe: Recipe
    config: Config
    mesh: Mesh
    steps: int
    optimizer: optax.GradientTransformation
    llama: Llama
    rows: DatasetMixture
    eval_rows: DatasetMixture | None
    ceiling: Ceiling


def train(job: Job, state: TrainState, checkpoints: RunCheckpoints) -> tuple[TrainState, int]:
    """Take the steps from `state` on: (the last state, the signal that stopped the run or 0)."""
    recipe, steps, first = job.recipe, job.steps, int(state.step)
    train_step = make_train_step(job.config, recipe, job.optimizer, job.mesh)
    eval_step = make_eval_step(job.config, recipe, job.mesh)
    micro_batches = BatchSharder(
        micro_batch_sharding(job.mesh),
        (recipe.gradient_accumulation_steps, recipe.micro_batch_size),
    )
    eval_batches = BatchSharder(batch_sharding(job.mesh), (recipe.micro_batch_size,))
    progress = Progress(
        first_step=first,
        steps=steps,
        tokens_per_step=recipe.batch_size * recipe.max_length,
        flops_per_token=train_flops_per_token(
            job.config, recipe.max_length
        ),  # the model's: recomputation is no achievement
        ceiling=job.ceiling,
    )

    with contextlib.ExitStack() as stack:
        journal = stack.enter_context(
            contextlib.closing(Journal(recipe, progress, first_step=first, steps=steps))
        )
        profile = stack.enter_context(
            ProfileWindow(recipe.profile_steps, recipe.output_dir / "profile")
        )
        signals = stack.enter_context(StopSignals())

        def measure(step: int, state: TrainState) -> float | None:
            """The held-out loss; None without held-out data."""
            if job.eval_rows is None:
                return None
            results = evaluate(
                eval_step, state.delta, job.llama, job.eval_rows, recipe, eval_batches
            )
            journal.evaluated(step, results)
            return results[LOSS]

        def patience_is_over(step: int) -> bool:
            """Asked after evaluations, and of a resumed run, which may have been killed after its
            last step."""
            patience = recipe.early_stopping_patience
            over = (
                patience is not None and evaluations_since_best(journal.held_out_losses) >= patience
            )
            if over:
                say(f"step {step}: the held-out loss has not fallen in {patience} evaluations")
            return over

        if first:
            say(f"continuing after step {first} of {steps}")
            if patience_is_over(first):
                return state, 0
        else:
            measure(0, state)
        read = batches(
            job.rows,
            recipe.batch_size,
            positions=micro_batches.positions,
            seed=recipe.seed,
            start=first,
            stop=steps,
        )
        data = stack.enter_context(contextlib.closing(read))
        for step, local in enumerate(data, start=first + 1):
            profile.step(step, state)
            state, values = train_step(state, job.llama, micro_batches.shard(local.batch))
            journal.took(step, values, local.row_ids)
            if step == first + 1:
                jax.block_until_ready(state)
                progress.restart_clock()  # compilation is not training speed

            stop = signals.agreed()
            evaluates = step == steps or (
                recipe.eval_steps is not None and step % recipe.eval_steps == 0
            )
            if not (stop or evaluates or step % recipe.save_steps == 0):
                continue
            journal.settle()
            evaluates &= not stop or step == steps  # who stops a run may not wait for long
            checkpoints.save(state, score=measure(step, state) if evaluates else None)
            progress.restart_clock()
            if stop and step < steps:
                return state, stop
            if evaluates and patience_is_over(step):
                break
    return state, 0
