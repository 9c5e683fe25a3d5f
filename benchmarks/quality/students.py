"""Students of a teacher: what is made, and how it is started and trained.

Start and training are those of `swiftkv train`; only its checkpoints and reports are left out.
Trained deltas are kept, so that they can be measured again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from swiftkv_jax.checkpoints import open_any
from swiftkv_jax.errors import UsageError
from swiftkv_jax.model.attention import Attention
from swiftkv_jax.model.batch import Batch
from swiftkv_jax.model.config import Config, GeneratedKV
from swiftkv_jax.model.model import Model
from swiftkv_jax.model.params import Llama, SwiftKV, swiftkv_shapes
from swiftkv_jax.model.sharding import replicated, swiftkv_shardings
from swiftkv_jax.model.transformer import student
from swiftkv_jax.train.data.loader import DatasetMixture, batches
from swiftkv_jax.train.recipe import DEMO, RECIPES, Init, Recipe
from swiftkv_jax.train.run.batch_sharder import BatchSharder
from swiftkv_jax.train.run.setup import cut_model, load_model, own_tail
from swiftkv_jax.train.run.start import initialize_delta, scale_queries
from swiftkv_jax.train.run.step import (
    TrainState,
    init_state,
    make_optimizer,
    make_train_step,
    micro_batch_sharding,
)

from ..teachers.pretrain import text_loss

STARTS: tuple[Init, ...] = ("authors", "leader", "closed-form")
AUTHORS_RATES = (5e-4, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)
"""Learning rates that the authors' recipe is tried with, from the first up to the first that is
worse than the one before it; the best by perplexity counts."""
PACKAGE_RATES = (DEMO.learning_rate,)
"""Those of this package's recipe: only its default, unless more are asked for."""
Loss = Literal["distillation", "cross-entropy"]
"""What a student is trained with: this package's loss, or, as a control, the text alone."""
_HEADS = "shared_kv_heads"


@dataclasses.dataclass(frozen=True)
class Arm:
    """Students that differ in their seed and learning rate alone."""

    num_key_value_layers: int
    key_value_group_size: int
    start: Init
    steps: int
    generated_kv: GeneratedKV = "boundary"
    """What it is fitted to and trained for; it is served in every mode. With groups it is trained
    for `boundary`, and its queries are scaled in the end (`train calibrate --keep-delta`)."""
    loss: Loss = "distillation"
    trains_own: bool = False
    """With groups and `own` the opposite order: queries are scaled first, then it is trained for
    `own`. `swiftkv train` refuses that."""

    @property
    def scales_trained_queries(self) -> bool:
        return self.generated_kv == "own" and self.key_value_group_size > 1 and not self.trains_own

    @property
    def uses_authors_recipe(self) -> bool:
        """Whether it is trained by the authors' recipe; else, if at all, by this package's."""
        return self.start == "authors" and self.steps > 0

    def recipe(self, base: Recipe, rate: float, seed: int) -> Recipe:
        """`base` for this student: the authors' start is trained with their losses, the others
        with this package's."""
        settings = RECIPES["authors"] if self.start == "authors" else {"init": self.start}
        return dataclasses.replace(
            base,
            num_key_value_layers=self.num_key_value_layers,
            key_value_group_size=self.key_value_group_size,
            generated_kv=self.generated_kv,
            max_steps=max(self.steps, 1),
            learning_rate=rate,
            seed=seed,
            **settings,
        )

    def name(self, rate: float, seed: int) -> str:
        """`"4-2-authors-64-0.002-seed1"`; without rate and seed if nothing is trained, and
        `"4-1-closed-form-own-0"` or `"4-2-closed-form-train-own-64-0.002-seed1"` for own keys and
        values."""
        own = "-train-own" if self.trains_own else "-own"
        start = self.start if self.generated_kv == "boundary" else f"{self.start}{own}"
        if self.loss != "distillation":
            start = f"{start}-{self.loss}"
        parts = [self.num_key_value_layers, self.key_value_group_size, start, self.steps]
        return "-".join(map(str, [*parts, f"{rate:g}", f"seed{seed}"] if self.steps else parts))


def plan(
    num_layers: int,
    cuts: Sequence[int],
    groups: Sequence[int | None],
    starts: Sequence[Init],
    steps: Sequence[int],
    generated_kv: GeneratedKV = "boundary",
    loss: Loss = "distillation",
    trains_own: bool = False,
) -> list[Arm]:
    """All arms, those of fewer steps first. A group size of None is all upper layers. With
    `generated_kv` own they are those from the closed form: copies are not fitted to anything, and
    the authors' recipe has no own keys and values. With the loss `cross-entropy` they are those
    that are trained, by this package's recipe; with `trains_own` those with groups that are
    trained.

    Without groups a leader's keys and values are the mean over its group: that start is left out.
    """
    arms = []
    for count in sorted(set(steps)):
        for lower in sorted(set(cuts), reverse=True):
            upper = num_layers - lower
            for group in sorted({upper if size is None else size for size in groups}):
                if upper % group == 0:
                    arms += [
                        Arm(lower, group, start, count, generated_kv, loss, trains_own)
                        for start in STARTS
                        if start in starts and not (start == "leader" and group == 1)
                    ]
    if generated_kv == "own":
        arms = [a for a in arms if a.start == "closed-form"]
    if loss == "cross-entropy":
        arms = [a for a in arms if a.start != "authors" and a.steps]
    if trains_own:
        arms = [a for a in arms if a.key_value_group_size > 1 and a.steps]
    return arms


def make(arm: Arm, recipe: Recipe, data: DatasetMixture, mesh: Mesh, file: Path) -> Model:
    """A student with its delta, from `file` if it is there; a trained one is kept there.

    Raises `UsageError` if the file is of another recipe or other data.
    """
    identity = json.dumps(describe(recipe, data), sort_keys=True)
    config = cut_model(recipe, open_any(recipe.model).config)
    own = {"generated_kv": config.generated_kv, "exact_tail": config.exact_tail}
    if arm.scales_trained_queries:
        config = dataclasses.replace(config, generated_kv="boundary", exact_tail=0)
    model = load_model(recipe, config, mesh)
    if file.exists():
        return _load(file, model, identity, mesh)
    model, _ = initialize_delta(recipe, model, data, mesh)
    if arm.steps:
        model = train(recipe, model, data, mesh, arm.loss)
    if arm.scales_trained_queries:
        model = dataclasses.replace(model, config=dataclasses.replace(model.config, **own))
        model = scale_queries(recipe, model, data, mesh)
    if arm.steps:
        _save(file, model, identity)
    return model


def describe(recipe: Recipe, data: DatasetMixture) -> dict[str, Any]:
    """What a student follows from, as JSON holds it: not the devices and folders."""
    left_out = {"mesh", "output_dir", "model", "data", "eval_data", "report_to", "attention"}
    fields = {name: value for name, value in vars(recipe).items() if name not in left_out}
    return fields | {"data": data.fingerprint}


def train(
    recipe: Recipe, model: Model, data: DatasetMixture, mesh: Mesh, loss: Loss = "distillation"
) -> Model:
    """The model after the steps of the recipe, from the delta that it has."""
    steps = recipe.max_steps
    assert steps is not None and model.swiftkv is not None
    shared = dataclasses.replace(recipe, seed=0, learning_rate=1.0)
    optimizer, step = _program(model.config, shared, mesh, loss)
    sharder = BatchSharder(micro_batch_sharding(mesh), (1, recipe.batch_size))
    state = init_state(model.config, optimizer, mesh, model.swiftkv)
    rate = jax.device_put(np.float32(recipe.learning_rate), replicated(mesh))
    opt_state = optax.tree_utils.tree_set(state.opt_state, step_size=rate)
    state = dataclasses.replace(state, opt_state=opt_state)
    reading = batches(
        data,
        recipe.batch_size,
        positions=sharder.positions,
        seed=recipe.seed,
        stop=steps,
        loss_mask=recipe.loss_mask,
        padding=recipe.padding,
        own_tail=own_tail(model.config),
    )
    with contextlib.closing(reading):
        for local in reading:
            state, _ = step(state, model.llama, sharder.shard(local.batch))
    return dataclasses.replace(model, swiftkv=state.delta)


@functools.lru_cache(maxsize=1)
def _program(config: Config, recipe: Recipe, mesh: Mesh, loss: Loss) -> tuple[Any, Any]:
    """Optimiser and step, compiled once for all seeds and learning rates. The recipe's rate is 1;
    the optimiser's updates are multiplied by `step_size` in its state."""
    assert recipe.max_steps is not None
    optimizer = optax.chain(
        make_optimizer(recipe, recipe.max_steps),
        optax.inject_hyperparams(optax.scale)(step_size=1.0),
    )
    make_step = make_train_step if loss == "distillation" else make_cross_entropy_step
    return optimizer, make_step(config, recipe, optimizer, mesh)


def make_cross_entropy_step(
    config: Config, recipe: Recipe, optimizer: optax.GradientTransformation, mesh: Mesh
):
    """As `make_train_step`, but the delta is trained to predict the text, without a teacher."""
    attention = Attention(mesh, recipe.attention, recipe.shard_sequence)

    def cross_entropy(delta: SwiftKV, llama: Llama, batch: Batch):
        x = student(config, llama, delta, batch, attention=attention, own=batch.own)
        return text_loss(config, llama, x, batch)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, llama: Llama, micro_batches: Batch):
        batch = jax.tree.map(lambda field: field[0], micro_batches)
        delta: Any = state.delta
        loss, gradient = jax.value_and_grad(cross_entropy)(delta, llama, batch)
        updates, opt_state = optimizer.update(gradient, state.opt_state, delta)
        delta = cast(Any, optax.apply_updates(delta, updates))
        return TrainState(state.step + 1, delta, opt_state), {"loss": loss}

    return step


def _save(file: Path, model: Model, identity: str) -> None:
    heads = json.dumps(model.config.shared_kv_heads)
    arrays: dict[str, Any] = {
        f"leaf{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(model.swiftkv))
    }
    arrays |= {"identity": np.array(identity), _HEADS: np.array(heads)}
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial.npz")
    np.savez(partial, **arrays)
    os.replace(partial, file)


def _load(file: Path, model: Model, identity: str, mesh: Mesh) -> Model:
    with np.load(file) as stored:
        if str(stored["identity"]) != identity:
            raise UsageError(
                f"{file}: was trained by another recipe or on other data; remove it, or choose "
                f"another `folder`"
            )
        heads = json.loads(str(stored[_HEADS]))
        leaves = [stored[f"leaf{i}"] for i in range(len(stored.files) - 2)]
    config = dataclasses.replace(
        model.config, shared_kv_heads=None if heads is None else tuple(map(tuple, heads))
    )
    tree = jax.tree.structure(swiftkv_shapes(config, jnp.float32))
    delta = jax.device_put(jax.tree.unflatten(tree, leaves), swiftkv_shardings(config, mesh))
    return dataclasses.replace(model, config=config, swiftkv=delta)


def on_one_device(model: Model) -> Model:
    """The same model on the first device, for an engine without a mesh."""
    device = jax.devices()[0]
    return jax.tree.map(lambda leaf: jax.device_put(leaf, device), model)


def is_finite(model: Model) -> bool:
    """False after a training run that diverged."""
    return all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(model.swiftkv))
