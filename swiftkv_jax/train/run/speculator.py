"""Training of a speculator on a distilled student, whose weights stay as they are.

From the student's state at a token and the tokens after it, step i learns the student's own choice
i + 1 places after the next one. The loss is its cross-entropy, summed over the steps. Optimiser and
schedule are ArcticTraining's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from ...checkpoints.speculators import read_speculator_config, write_speculator
from ...checkpoints.training_run import RECIPE, SPECULATOR
from ...errors import DivergenceError, UsageError
from ...model.attention import Attention
from ...model.batch import Batch
from ...model.config import Config
from ...model.layers import head_weights, norm, unembed
from ...model.model import Model
from ...model.params import Llama, SwiftKV
from ...model.sharding import constrain_activations, replicated, to_host
from ...model.speculator import (
    Speculator,
    advance,
    first_state,
    speculator_logits,
    speculator_shapes,
)
from ...model.speculator_config import SpeculatorConfig
from ...model.stacks import cast
from ...model.transformer import student
from ...process.distributed import is_main_process
from ...process.files import write_json
from ...process.json_files import read_json
from ..data.loader import DatasetMixture, batches
from ..loss.distill import chunk_length, split_chunks
from ..recipe import Recipe
from .batch_sharder import BatchSharder
from .evaluation import held_out_batches
from .metrics import MetricsLog
from .progress import track
from .setup import own_tail
from .step import micro_batch_sharding, sum_of_micro_batches

logger = logging.getLogger(__name__)

WARMUP_SHARE = 0.05
WEIGHT_DECAY = 0.1
ACCEPTED = "eval_speculator_accepted_{}"
"""Name of the share of held-out places at which so many drafts, the first ones, are the student's
choice."""
SETTINGS = ("speculator", "speculator_steps", "speculator_learning_rate")
"""Fields of the recipe that a speculator is made with; the first are its drafts."""


class Sums(NamedTuple):
    """Sums over the places of a batch."""

    loss: Array  # f32[], nats of all steps
    accepted: Array  # f32[N]; places at which the drafts of steps 0 to i are all right
    places: Array  # f32[N]; places that have a right draft of step i


def check_speculator(recipe: Recipe) -> None:
    """Raise `UsageError` if the output folder has a speculator that was trained by other settings
    than those of the recipe."""
    folder = recipe.output_dir / SPECULATOR
    if recipe.speculator is None or not folder.exists():
        return
    recorded = read_json(recipe.output_dir / RECIPE)
    trained = {name: recorded.get(name) for name in SETTINGS if recorded.get(SETTINGS[0])}
    trained[SETTINGS[0]] = read_speculator_config(folder).n_predict
    for name, old in trained.items():
        if (new := getattr(recipe, name)) != old:
            raise UsageError(
                f"`{name}`={new}: the speculator in {folder} was made with {old}; remove that "
                f"folder to train another",
                option=name,
            )
    logger.info("the speculator is there already: %s", folder)


def train_speculator(
    recipe: Recipe,
    model: Model,
    data: DatasetMixture,
    eval_data: DatasetMixture | None,
    mesh: Mesh,
    step: int,
) -> None:
    """Train a speculator for the student of a finished run and write it into the output folder.
    `step` is the step that the student is of. With several processes, all of them call this."""
    assert model.swiftkv is not None and recipe.speculator
    model = dataclasses.replace(model, swiftkv=cast(model.swiftkv, model.dtype))
    config = trained_speculator(recipe.speculator, model.config)
    init = jax.jit(init_speculator, static_argnums=0, out_shardings=replicated(mesh))
    speculator = init(config, model.llama, jax.random.key(recipe.seed))
    speculator = cast(_fit(recipe, speculator, model, data, mesh), model.dtype)
    if eval_data is not None:
        shares = _accepted_shares(recipe, speculator, model, eval_data, mesh)
        logger.info(
            "speculator: held-out drafts accepted %s; %.2f tokens a step along the text",
            "  ".join(f"{share:.3f}" for share in shares),
            1 + sum(shares),
        )
        log = MetricsLog(recipe.output_dir, first_step=None, report_to=recipe.report_to)
        with contextlib.closing(log):
            named = {ACCEPTED.format(place): share for place, share in enumerate(shares, 1)}
            log.write({"step": step} | named)
    folder = recipe.output_dir / SPECULATOR
    if is_main_process():  # a run that had finished has recorded other settings, or none
        settings = {name: getattr(recipe, name) for name in SETTINGS}
        recorded = read_json(recipe.output_dir / RECIPE)
        write_json(recipe.output_dir / RECIPE, recorded | settings, canonical=True)
    write_speculator(jax.tree.map(to_host, speculator), folder)
    logger.info("the speculator is in %s", folder)


def trained_speculator(drafts: int, config: Config) -> SpeculatorConfig:
    """The head for a student: an LSTM as wide as its hidden state, whose steps share weights."""
    return SpeculatorConfig(
        "sum_lstm",
        drafts,
        config.vocab_size,
        hidden_dim=config.embed_dim,
        inner_dim=config.embed_dim,
        scale_input=True,
    )


def _fit(
    recipe: Recipe, speculator: Speculator, model: Model, data: DatasetMixture, mesh: Mesh
) -> Speculator:
    """The speculator after the steps of the recipe. The one that is given is donated. Raises
    `DivergenceError`."""
    steps, peak = recipe.speculator_steps, recipe.speculator_learning_rate
    optimizer = make_speculator_optimizer(recipe)
    opt_state = jax.jit(optimizer.init, out_shardings=replicated(mesh))(speculator)
    train_step = make_speculator_step(recipe, model.config, optimizer, mesh)
    sharder = BatchSharder(
        micro_batch_sharding(mesh), (recipe.gradient_accumulation_steps, recipe.micro_batch_size)
    )
    reading = batches(
        data,
        recipe.batch_size,
        positions=sharder.positions,
        seed=recipe.seed,
        stop=steps,
        loss_mask=recipe.loss_mask,
        own_tail=own_tail(model.config),
    )
    with contextlib.closing(reading):
        for number, local in enumerate(track(reading, "training the speculator", steps), 1):
            micro_batches = sharder.shard(local.batch)
            speculator, opt_state, sums = train_step(
                speculator, opt_state, model.llama, model.swiftkv, micro_batches
            )
            if number % max(1, steps // 10) == 0 or number == steps:
                loss = float(sums.loss) / max(1.0, float(sums.places[0]))
                if not jnp.isfinite(optax.tree.norm(speculator)):
                    raise DivergenceError(
                        f"speculator step {number}: loss {loss}, and its weights are not finite; "
                        f"lower `speculator_learning_rate`={peak}"
                    )
                logger.info("speculator step %d: loss %.3f", number, loss)
    return speculator


def make_speculator_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """AdamW, with a warm-up and a cosine."""
    steps, peak = recipe.speculator_steps, recipe.speculator_learning_rate
    warmup = max(1, round(WARMUP_SHARE * steps))
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, max(steps, warmup + 1))
    return optax.chain(
        optax.clip_by_global_norm(recipe.max_grad_norm),
        optax.adamw(rate, weight_decay=WEIGHT_DECAY),
    )


def make_speculator_step(
    recipe: Recipe, config: Config, optimizer: optax.GradientTransformation, mesh: Mesh
) -> Any:
    """`step(speculator, opt_state, llama, delta, micro_batches)`, compiled, which returns the first
    two and the `Sums`; they are donated. The student's weights are `llama` and `delta`."""
    sums_of = functools.partial(_sums_of_student, recipe, config, mesh)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(speculator, opt_state, llama, delta, micro_batches):
        def loss(speculator, batch):
            sums = sums_of(cast(speculator, llama.embed.dtype), llama, delta, batch)
            return sums.loss, sums

        gradient_and_sums = functools.partial(jax.grad(loss, has_aux=True), speculator)
        gradient, sums = sum_of_micro_batches(gradient_and_sums, micro_batches)
        places = jnp.maximum(sums.places[0], 1)
        gradient = jax.tree.map(lambda leaf: leaf / places, gradient)
        updates, opt_state = optimizer.update(gradient, opt_state, speculator)
        return optax.apply_updates(speculator, updates), opt_state, sums

    return step


def _accepted_shares(
    recipe: Recipe, speculator: Speculator, model: Model, data: DatasetMixture, mesh: Mesh
) -> list[float]:
    """The share of held-out places at which the first draft, the first two, ... are all right."""
    measure = jax.jit(
        functools.partial(_sums_of_student, recipe, model.config, mesh),
        out_shardings=replicated(mesh),
    )
    rows = held_out_batches(recipe, model.config, data, mesh)
    found = [measure(speculator, model.llama, model.swiftkv, batch) for batch in rows]
    accepted, places = (
        sum(np.asarray(getattr(sums, name)) for sums in found) for name in ("accepted", "places")
    )
    return (accepted / np.maximum(places, 1)).tolist()


def _sums_of_student(
    recipe: Recipe,
    config: Config,
    mesh: Mesh,
    speculator: Speculator,
    llama: Llama,
    delta: SwiftKV,
    batch: Batch,
) -> Sums:
    """`speculator_sums` from the states of the student."""
    attention = Attention(mesh, recipe.attention, recipe.shard_sequence)
    hidden, chosen = student_states(config, attention, llama, delta, batch)
    return speculator_sums(speculator, hidden, chosen, batch, mesh)


def init_speculator(config: SpeculatorConfig, llama: Llama, key: Array) -> Speculator:
    """A speculator with the model's embedding, rescaled, and its output matrix, and matrices that
    keep the size of a state."""
    shapes = speculator_shapes(config, jnp.float32)
    embed = llama.embed.astype(jnp.float32)
    embed = embed * (config.inner_dim**-0.5 / jnp.std(embed))
    keys = jax.random.split(key, len(shapes.proj))
    norms = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), (shapes.norm, shapes.cell_norm))
    ones = [tuple(dataclasses.replace(one, weight=one.bias + 1) for one in each) for each in norms]
    proj = (
        leaf.shape[1] ** -0.5 * jax.random.normal(one, leaf.shape)
        for one, leaf in zip(keys, shapes.proj, strict=True)
    )
    head = jnp.copy(head_weights(llama).astype(jnp.float32))  # the speculator's are donated
    return Speculator(config, (embed,), tuple(proj), (head,), norm=ones[0], cell_norm=ones[1])


def student_states(
    config: Config, attention: Attention, llama: Llama, delta: SwiftKV, batch: Batch
) -> tuple[Float[Array, "B T D"], Int[Array, "B T"]]:
    """The student's hidden states after the final norm, and the likeliest token after each."""
    x = student(config, llama, delta, batch, attention=attention, own=batch.own)
    x = constrain_activations(attention.mesh, x)
    rows, length, _ = x.shape
    chunk = chunk_length(rows, length, config.vocab_size, attention.mesh)
    chosen = jax.lax.map(
        lambda part: jnp.argmax(unembed(config, llama, part), axis=-1), split_chunks(x, chunk)
    )
    chosen = jnp.moveaxis(chosen, 0, 1).reshape(rows, -1)[:, :length]
    return norm(config, x, llama.final_norm), chosen.astype(jnp.int32)


def speculator_sums(
    speculator: Speculator,
    hidden: Float[Array, "B T D"],
    chosen: Int[Array, "B T"],
    batch: Batch,
    mesh: Mesh,
) -> Sums:
    """Loss and right drafts from the states `hidden`, where the student has `chosen` the token
    after each. A draft counts where its place is one whose prediction counts."""
    rows, length, _ = hidden.shape
    steps = range(speculator.config.n_predict)
    chunk = chunk_length(rows, length, speculator.config.vocab_size, mesh)
    ids = batch.segment_ids

    def ahead(field: Array, places: int) -> Array:
        """Entries so many places further in each row; 0 behind its end."""
        return jnp.pad(field[:, places:], ((0, 0), (0, places)))

    fields: list[Any] = []
    for i in steps:
        same = (ahead(ids, i + 1) == ids) & (ids > 0)
        counts = same & (ahead(batch.loss_mask, i + 1) > 0)
        fields.append((ahead(batch.tokens, i + 1), ahead(chosen, i + 1), counts))

    @jax.checkpoint
    def of_chunk(part):
        x, fields = part
        state, right = first_state(speculator, x), True
        loss, accepted, places = 0.0, [], []
        for i, (token, label, counts) in zip(steps, fields, strict=True):
            state = advance(speculator, i, state, token)
            logits = speculator_logits(speculator, i, state)
            nll = optax.softmax_cross_entropy_with_integer_labels(logits, label)
            loss += jnp.where(counts, nll, 0).sum()
            right &= jnp.argmax(logits, axis=-1) == label
            accepted.append((right & counts).sum())
            places.append(counts.sum())
        return loss, *(jnp.stack(each).astype(jnp.float32) for each in (accepted, places))

    parts = jax.tree.map(lambda field: split_chunks(field, chunk), (hidden, fields))
    return Sums(*(each.sum(axis=0) for each in jax.lax.map(of_chunk, parts)))
