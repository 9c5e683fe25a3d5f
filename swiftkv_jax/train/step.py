"""One optimiser step: the delta is differentiated and updated, everything else is read."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh

from ..attention import Attention
from ..config import Config
from ..model import Batch
from ..params import Leaf, Llama, SwiftKV, swiftkv_shapes
from ..sharding import batch_sharding, llama_shardings, replicated, swiftkv_shardings
from .distill import distill_loss, distill_sums
from .recipe import Recipe


@struct.dataclass
class TrainState:
    """All that training changes, and all that a checkpoint holds."""

    step: Leaf  # i32[]; optimiser steps taken
    delta: SwiftKV  # float32 master copy
    opt_state: Leaf  # AdamW moments of the delta, float32


def learning_rate(recipe: Recipe, steps: int) -> optax.Schedule:
    """Linear from 0 over the first `warmup_ratio` of `steps`, then linear to 0 (Hugging Face's `linear` schedule)."""
    warmup = int(recipe.warmup_ratio * steps)
    rise = optax.linear_schedule(0.0, recipe.learning_rate, max(1, warmup))
    fall = optax.linear_schedule(recipe.learning_rate, 0.0, max(1, steps - warmup))
    return optax.join_schedules([rise, fall], [warmup])


def make_optimizer(recipe: Recipe, steps: int) -> optax.GradientTransformation:
    """AdamW as the authors set it: betas 0.9 and 0.999, no weight decay, gradients clipped to norm 1."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(learning_rate(recipe, steps), b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0),
    )


def state_shapes(config: Config, optimizer: optax.GradientTransformation) -> TrainState:
    delta: Any = swiftkv_shapes(config, jnp.float32)
    return TrainState(jax.ShapeDtypeStruct((), jnp.int32), delta, jax.eval_shape(optimizer.init, delta))


def state_shardings(config: Config, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """The moments live where their parameter lives; counters are replicated."""
    delta = swiftkv_shardings(config, mesh)
    moments = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        state_shapes(config, optimizer).opt_state,
        delta,
        transform_non_params=lambda _: replicated(mesh),
    )
    return TrainState(replicated(mesh), delta, moments)


def init_state(config: Config, optimizer: optax.GradientTransformation, mesh: Mesh, delta: SwiftKV) -> TrainState:
    """The state before the first step, on the mesh."""

    def init(delta):
        delta = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), delta)
        return TrainState(jnp.zeros((), jnp.int32), delta, optimizer.init(delta))

    return jax.jit(init, out_shardings=state_shardings(config, optimizer, mesh))(delta)


def make_train_step(config: Config, recipe: Recipe, optimizer: optax.GradientTransformation, mesh: Mesh):
    """Compile-on-first-use `(state, llama, batch) -> (state, metrics)`. The state is donated, the frozen weights are not.

    Means are over the whole batch, so the losses do not depend on how the mesh divides it.
    """
    loss = functools.partial(
        distill_loss,
        config,
        temperature=recipe.temperature,
        hidden_weight=recipe.hidden_loss_weight,
        hidden_layer=recipe.hidden_loss_layer,
        remat=recipe.remat,
        attention=Attention(mesh, recipe.attention),
    )

    def train_step(state: TrainState, llama: Llama, batch: Batch):
        gradient, metrics = jax.grad(loss, has_aux=True)(state.delta, llama, batch)
        metrics["grad_norm"] = optax.tree.norm(gradient)
        delta: Any = state.delta
        updates, opt_state = optimizer.update(gradient, state.opt_state, delta)
        delta = optax.apply_updates(delta, updates)
        return TrainState(state.step + 1, delta, opt_state), metrics

    state = state_shardings(config, optimizer, mesh)
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(state, llama_shardings(config, mesh), batch_sharding(mesh)),
        out_shardings=(state, replicated(mesh)),
    )


def make_eval_step(config: Config, recipe: Recipe, mesh: Mesh):
    """Compile-on-first-use `(delta, llama, batch) -> Sums`."""
    sums = functools.partial(
        distill_sums,
        config,
        temperature=recipe.temperature,
        hidden_layer=recipe.hidden_loss_layer,
        attention=Attention(mesh, recipe.attention),
    )
    return jax.jit(
        sums,
        in_shardings=(swiftkv_shardings(config, mesh), llama_shardings(config, mesh), batch_sharding(mesh)),
        out_shardings=replicated(mesh),
    )
