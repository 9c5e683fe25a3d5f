"""One optimiser step: the delta is differentiated and updated, the other weights are frozen."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool

from ...model.attention import Attention
from ...model.batch import Batch
from ...model.config import Config
from ...model.mesh import row_axes
from ...model.params import Leaf, Llama, SwiftKV, swiftkv_shapes
from ...model.sharding import batch_sharding, llama_shardings, replicated, swiftkv_shardings
from ..loss.distill import distill_sums
from ..loss.objective import Objective
from ..recipe import Recipe


@struct.dataclass
class TrainState:
    """The state that training changes and checkpoints hold."""

    step: Leaf  # i32[]; optimiser steps taken
    delta: SwiftKV  # float32 master copy
    opt_state: Leaf  # AdamW moments of the delta, float32


def learning_rate(recipe: Recipe, steps: int) -> optax.Schedule:
    """Linear from 0 over the first `warmup_ratio` of `steps`, then as `lr_schedule` says; linear
    and cosine end at 0."""
    warmup = int(recipe.warmup_ratio * steps)
    rise = optax.linear_schedule(0.0, recipe.learning_rate, max(1, warmup))
    rest = max(1, steps - warmup)
    after = {
        "linear": optax.linear_schedule(recipe.learning_rate, 0.0, rest),
        "cosine": optax.cosine_decay_schedule(recipe.learning_rate, rest),
        "constant": optax.constant_schedule(recipe.learning_rate),
    }
    return optax.join_schedules([rise, after[recipe.lr_schedule]], [warmup])


def make_optimizer(recipe: Recipe, steps: int) -> optax.GradientTransformation:
    """AdamW as the authors set it: betas 0.9 and 0.999, no weight decay, the gradient's norm
    clipped."""
    return optax.chain(
        optax.clip_by_global_norm(recipe.max_grad_norm),
        optax.adamw(learning_rate(recipe, steps), b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0),
    )


def state_shapes(config: Config, optimizer: optax.GradientTransformation) -> TrainState:
    delta: Any = swiftkv_shapes(config, jnp.float32)
    return TrainState(
        jax.ShapeDtypeStruct((), jnp.int32), delta, jax.eval_shape(optimizer.init, delta)
    )


def state_shardings(
    config: Config, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """Moments are sharded like their parameter; counters are replicated."""
    delta = swiftkv_shardings(config, mesh)
    moments = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        state_shapes(config, optimizer).opt_state,
        delta,
        transform_non_params=lambda _: replicated(mesh),
    )
    return TrainState(replicated(mesh), delta, moments)


def init_state(
    config: Config, optimizer: optax.GradientTransformation, mesh: Mesh, delta: SwiftKV
) -> TrainState:
    """The state before the first step, on the mesh."""

    def init(delta):
        delta = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), delta)
        return TrainState(jnp.zeros((), jnp.int32), delta, optimizer.init(delta))

    return jax.jit(init, out_shardings=state_shardings(config, optimizer, mesh))(delta)


def make_train_step(
    config: Config,
    recipe: Recipe,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    chunk: int | None = None,
):
    """Make the function `(state, llama, micro_batches, logged) -> (state, metrics)`, which is
    compiled at its first call. The state is donated, the frozen weights are not. If not `logged`
    (bool[]), only those metrics are right that the step itself needs: the losses, `grad_norm` and
    `tokens`.

    The fields of `micro_batches` are A B T. Sums are divided by the tokens of all A of them, so the
    update depends neither on how the rows are divided into micro-batches nor on the mesh. `chunk`
    is the argument of `distill.linear_kl`.
    """
    objective = recipe.objective
    attention = Attention(mesh, recipe.attention, recipe.shard_sequence)
    sums_of = functools.partial(
        distill_sums,
        config,
        objective=objective,
        remat=recipe.remat,
        attention=attention,
        chunk=chunk,
    )

    def train_step(state: TrainState, llama: Llama, micro_batches: Batch, logged: Bool[Array, ""]):
        delta: Any = state.delta
        tokens = jnp.maximum((micro_batches.segment_ids > 0).sum(), 1)
        targets = jnp.maximum(micro_batches.loss_mask.sum(), 1)
        predictions = targets if objective.average == "targets" else tokens

        def loss(delta, batch):
            sums = sums_of(delta, llama, batch, metrics=logged)
            return (
                sums.divergence / predictions + objective.hidden_weight * sums.hidden / tokens,
                sums,
            )

        gradient_and_sums = functools.partial(jax.grad(loss, has_aux=True), delta)
        gradient, sums = sum_of_micro_batches(gradient_and_sums, micro_batches)
        metrics = sums.means(objective.average)
        metrics["loss"] = metrics["logits_loss"] + objective.hidden_weight * metrics["hidden_loss"]
        metrics["grad_norm"] = optax.tree.norm(gradient)
        metrics["tokens"] = sums.tokens
        updates, opt_state = optimizer.update(gradient, state.opt_state, delta)
        delta = optax.apply_updates(delta, updates)
        return TrainState(state.step + 1, delta, opt_state), metrics

    state = state_shardings(config, optimizer, mesh)
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(
            state,
            llama_shardings(config, mesh),
            micro_batch_sharding(mesh),
            replicated(mesh),
        ),
        out_shardings=(state, replicated(mesh)),
    )


def sum_of_micro_batches[T](function: Callable[[Batch], T], micro_batches: Batch) -> T:
    """The sum of what `function` returns for each micro-batch of fields A B T, run one by one."""
    first = jax.tree.map(lambda field: field[0], micro_batches)
    if len(micro_batches.tokens) == 1:
        return function(first)
    shapes = jax.eval_shape(function, first)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def add_micro_batch(totals: T, batch: Batch) -> tuple[T, None]:
        return jax.tree.map(jnp.add, totals, function(batch)), None

    return jax.lax.scan(add_micro_batch, zeros, micro_batches)[0]


def micro_batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of arrays A B T: the rows of every micro-batch over `data` and `fsdp`."""
    return NamedSharding(mesh, PartitionSpec(None, row_axes(mesh)))


def make_eval_step(config: Config, objective: Objective, attention: Attention):
    """Make the function `(delta, llama, batch, masks) -> Sums`, which is compiled at its first
    call. Its sums have an entry for each of `masks`, a tuple of loss masks B T that stand in for
    that of the batch: both models run once for all of them."""
    mesh = attention.mesh
    assert mesh is not None

    def sums(delta, llama, batch, masks):
        def masked(mask):
            rows = dataclasses.replace(batch, loss_mask=mask)
            return distill_sums(
                config, delta, llama, rows, objective=objective, attention=attention
            )

        return jax.vmap(masked)(jnp.stack(masks))

    return jax.jit(
        sums,
        in_shardings=(
            swiftkv_shardings(config, mesh),
            llama_shardings(config, mesh),
            batch_sharding(mesh),
            batch_sharding(mesh),
        ),
        out_shardings=replicated(mesh),
    )
