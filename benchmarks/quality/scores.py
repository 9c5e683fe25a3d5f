"""Scores of teacher and student at every position of held-out rows.

The teacher runs once; students start from its hidden states. A student is served in one of several
modes, which differ in the tokens that keep their own upper keys and values (`Config.generated_kv`):
none, those after the prompt, or also the last of the prompt.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from swiftkv_jax.model.attention import Attention
from swiftkv_jax.model.batch import Batch
from swiftkv_jax.model.config import Config
from swiftkv_jax.model.layers import unembed
from swiftkv_jax.model.model import Model
from swiftkv_jax.model.params import Llama
from swiftkv_jax.model.rope import rope_tables
from swiftkv_jax.model.sharding import batch_sharding
from swiftkv_jax.model.transformer import run_lower_layers, run_upper_layers_student
from swiftkv_jax.train.analysis.sweep import teacher_states
from swiftkv_jax.train.loss.far_tokens import FAR_NATS, KEPT

from .held_out import PROMPT, HeldOut


@dataclasses.dataclass(frozen=True)
class Mode:
    """How a student is served."""

    name: str
    exact_tail: int | None
    """Tokens at the prompt's end that keep their own keys and values, as those after it do; None
    if no token does."""


MODES = (Mode("boundary", None), Mode("own", 0), Mode("own+64", 64))


class Scores(NamedTuple):
    """f32[R, T] of the prediction made at each position, except where something else is said."""

    nll: Any  # cross-entropy with the next token, nats
    kl: Any  # KL(teacher || model) at temperature 1, nats
    agreement: Any  # 1.0 where teacher and model rank the same token first
    first: Any  # 1.0 where the model ranks the next token first


@dataclasses.dataclass(frozen=True)
class Teacher:
    """The teacher on held-out rows; lists have an entry for each batch."""

    held_out: HeldOut
    batches: list[Batch]
    states: dict[int, list[Array]]
    """Layer -> the hidden states B T D that enter it."""
    last: list[Array]
    """Outputs of the last layer."""
    scores: Scores
    masks: dict[str, np.ndarray]
    """Name -> bool[R, T], the predictions that a figure is about: `all`; `answers` those after the
    prompt, of which some depend on the `far` prompt and the `others` do not; `recall` those of
    recalled identifiers."""


def run_teacher(
    config: Config,
    llama: Llama,
    held_out: HeldOut,
    mesh: Mesh,
    *,
    batch_size: int,
    layers: Iterable[int],
) -> Teacher:
    """Run the teacher, whose layers are all lower ones, and keep the states that enter `layers`."""
    attention, sharding, layers = Attention(mesh), batch_sharding(mesh), tuple(layers)
    batches, last, states = [], [], {layer: [] for layer in layers}
    scores, cut_nll = list[Scores](), list[np.ndarray]()
    for start in range(0, len(held_out.tokens), batch_size):
        host_batch = held_out.batch(slice(start, start + batch_size))
        batch = jax.device_put(host_batch, sharding)
        inputs, output = teacher_states(config, attention, llama, batch)
        without_prompt = jax.device_put(cut_away(host_batch, PROMPT - KEPT), sharding)
        cut_output = _all_layers(config, attention, llama, without_prompt)
        for layer in layers:
            states[layer].append(inputs[layer])
        batches.append(batch)
        last.append(output)
        scores.append(_to_host(compare(config, llama, output, output, batch.tokens)))
        cut_nll.append(_to_host(compare(config, llama, cut_output, output, batch.tokens)).nll)
    teacher = _joined(scores)
    far = held_out.answers & far_dependent(teacher.nll, np.concatenate(cut_nll))
    masks = {
        "all": held_out.predicted,
        "answers": held_out.answers,
        "far": far,
        "others": held_out.answers & ~far,
        "recall": held_out.recalled & held_out.answers,
    }
    return Teacher(held_out, batches, states, last, teacher, masks)


def cut_away(batch: Batch, tokens: int) -> Batch:
    """The same rows with their first `tokens` tokens in a segment of their own, so that no later
    token attends to them. Positions stay."""
    return dataclasses.replace(
        batch, segment_ids=batch.segment_ids * (1 + (np.arange(batch.tokens.shape[1]) >= tokens))
    )


def far_dependent(nll: np.ndarray, cut_nll: np.ndarray) -> np.ndarray:
    """True where the teacher loses more than `FAR_NATS` without the far prompt."""
    return cut_nll - nll > FAR_NATS


@functools.partial(jax.jit, static_argnums=(0, 1))
def _all_layers(config: Config, attention: Attention, llama: Llama, batch: Batch) -> Array:
    return run_lower_layers(config, llama, batch, attention=attention)[0]


def score_student(model: Model, teacher: Teacher, mesh: Mesh, mode: Mode) -> Scores:
    """The student's scores. In a mode in which tokens keep their own keys and values only rows
    that reach beyond the prompt are run: the others are zeros."""
    config, attention, sharding = model.config, Attention(mesh), batch_sharding(mesh)
    inputs, scores = teacher.states[config.num_key_value_layers], list[Scores]()
    for number, (batch, x, last) in enumerate(
        zip(teacher.batches, inputs, teacher.last, strict=True)
    ):
        own = None
        if mode.exact_tail is not None:
            if number * len(batch.tokens) >= teacher.held_out.num_long_rows:
                scores.append(Scores(*[np.zeros(batch.tokens.shape, np.float32)] * 4))
                continue
            columns = np.arange(batch.tokens.shape[1]) >= PROMPT - mode.exact_tail
            own = jax.device_put(np.broadcast_to(columns, batch.tokens.shape), sharding)
        found = _student(config, attention, model.llama, model.swiftkv, batch, x, last, own)
        scores.append(_to_host(found))
    return _joined(scores)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _student(config, attention, llama, delta, batch: Batch, x, last, own) -> Scores:
    """`x` enters the first upper layer, `last` is the teacher's output."""
    x, _ = run_upper_layers_student(
        config,
        llama,
        delta,
        x,
        rope_tables(config, batch.positions),
        batch.segment_ids,
        attention=attention,
        own=own,
    )
    return compare(config, llama, x, last, batch.tokens)


@functools.partial(jax.jit, static_argnums=0)
def compare(
    config: Config,
    llama: Llama,
    x: Float[Array, "B T D"],
    teacher_x: Float[Array, "B T D"],
    tokens: Int[Array, "B T"],
) -> Scores:
    """Scores of a model from its hidden states and the teacher's, both before the final norm."""
    model, teacher = (jax.nn.log_softmax(unembed(config, llama, h)) for h in (x, teacher_x))
    following = jnp.roll(tokens, -1, axis=1)
    likeliest = model.argmax(-1)
    return Scores(
        nll=-jnp.take_along_axis(model, following[..., None], axis=-1)[..., 0],
        kl=(jnp.exp(teacher) * (teacher - model)).sum(-1),
        agreement=(likeliest == teacher.argmax(-1)).astype(jnp.float32),
        first=(likeliest == following).astype(jnp.float32),
    )


def sums(scores: Scores, masks: dict[str, np.ndarray], per_document: Callable) -> dict[str, Any]:
    """Set -> score -> its sum in each document."""
    return {
        name: {score: per_document(values, mask) for score, values in scores._asdict().items()}
        for name, mask in masks.items()
    }


def _to_host(scores: Scores) -> Scores:
    return jax.tree.map(np.asarray, scores)


def _joined(scores: list[Scores]) -> Scores:
    return jax.tree.map(lambda *parts: np.concatenate(parts), *scores)
