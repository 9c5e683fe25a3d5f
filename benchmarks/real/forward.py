"""Scores of teacher and student at the scored predictions of rows.

The teacher runs once; students start from the hidden states that enter their first upper layer.
Logits are computed at the scored predictions only, some of them at a time: vocabularies of real
models have up to 262,144 entries.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from swiftkv_jax.model.attention import DEFAULT
from swiftkv_jax.model.batch import Batch
from swiftkv_jax.model.config import Config
from swiftkv_jax.model.layers import unembed
from swiftkv_jax.model.model import Model
from swiftkv_jax.model.params import Llama, SwiftKV
from swiftkv_jax.model.rope import rope_tables
from swiftkv_jax.model.transformer import run_upper_layers_student, teacher
from swiftkv_jax.train.analysis.sweep import teacher_states
from swiftkv_jax.train.loss.far_tokens import FAR_NATS, KEPT

from .rows import PROMPT, Rows

TOKENS_PER_BATCH = 4096
PREDICTIONS_PER_CHUNK = 256


class Scores(NamedTuple):
    """Scores of the prediction made at each position."""

    nll: Any  # cross-entropy with the next token, nats
    kl: Any  # KL(teacher || model) at temperature 1, nats
    agreement: Any  # 1.0 where teacher and model rank the same token first
    first: Any  # 1.0 where the model ranks the next token first


class Reference(NamedTuple):
    """The teacher on rows. N counts the scored predictions, in order."""

    teacher: Model
    rows: Rows
    inputs: dict[int, list[np.ndarray]]
    """Layer -> the hidden states B T D that enter it, for each batch."""
    last: np.ndarray
    """f32[N, D]: outputs of the last layer."""
    scores: Scores
    """f32[N]"""
    far: np.ndarray | None
    """bool[N]: the predictions that depend on the far prompt; None where that was not asked."""


def run_teacher(model: Model, rows: Rows, layers: Iterable[int], *, far: bool) -> Reference:
    """Run a model without a delta and keep the states that enter `layers`; `far` finds the
    far-dependent predictions of rows of text."""
    inputs: dict[int, list[np.ndarray]] = {layer: [] for layer in sorted(set(layers))}
    last = []
    without_prompt = []
    for chosen, batch in rows.batches(TOKENS_PER_BATCH):
        states, output = teacher_states(model.config, DEFAULT, model.llama, batch)
        for layer, kept in inputs.items():
            kept.append(np.asarray(states[layer]))
        last.append(_scored(rows, chosen, output))
        if far:
            output = _teacher(model.config, model.llama, cut_away(batch, PROMPT - KEPT))
            without_prompt.append(_scored(rows, chosen, output))
    outputs = np.concatenate(last)
    scores = _scores(model, rows, outputs, outputs)
    found = None
    if far:
        cut = _scores(model, rows, np.concatenate(without_prompt), outputs)
        found = far_dependent(scores.nll, cut.nll)
    return Reference(model, rows, inputs, outputs, scores, found)


def run_student(student: Model, reference: Reference) -> Scores:
    """Run the student as its `Config.generated_kv` and `exact_tail` say: f32[N]."""
    config = student.config
    rows = reference.rows
    found = []
    inputs = reference.inputs[config.num_key_value_layers]
    for x, (chosen, batch) in zip(inputs, rows.batches(TOKENS_PER_BATCH), strict=True):
        if config.generated_kv == "own":
            first = np.zeros(len(batch.tokens), np.int32)
            first[: chosen.stop - chosen.start] = rows.prompts[chosen] - config.exact_tail
            own = (np.arange(batch.tokens.shape[1]) >= first[:, None]) & (batch.segment_ids > 0)
            batch = dataclasses.replace(batch, own=own)
        output = _student(config, student.llama, student.swiftkv, batch, x)
        found.append(_scored(rows, chosen, output))
    return _scores(reference.teacher, rows, np.concatenate(found), reference.last)


@functools.partial(jax.jit, static_argnums=0)
def _teacher(config: Config, llama: Llama, batch: Batch):
    return teacher(config, llama, batch)


@functools.partial(jax.jit, static_argnums=0)
def _student(config: Config, llama: Llama, delta: SwiftKV, batch: Batch, x):
    tables = rope_tables(config.at_length(x.shape[1]), batch.positions)
    x, _ = run_upper_layers_student(
        config, llama, delta, x, tables, batch.segment_ids, own=batch.own
    )
    return x


def cut_away(batch: Batch, tokens: int) -> Batch:
    """The same rows with their first `tokens` tokens in a segment of their own, so that no later
    token attends to them. Positions stay."""
    later = np.arange(batch.tokens.shape[1]) >= tokens
    return dataclasses.replace(batch, segment_ids=batch.segment_ids * (1 + later))


def far_dependent(nll: np.ndarray, cut_nll: np.ndarray) -> np.ndarray:
    """True where the teacher loses more than `FAR_NATS` without the far prompt."""
    return cut_nll - nll > FAR_NATS


def _scored(rows: Rows, chosen: slice, output: Any) -> np.ndarray:
    """The states of a batch at the scored predictions."""
    states = np.asarray(output, np.float32)[: chosen.stop - chosen.start]
    return states[rows.scored[chosen]]


def _scores(model: Model, rows: Rows, states: np.ndarray, reference: np.ndarray) -> Scores:
    """The scores from a model's states and the teacher's, f32[N, D]. Final norm and output matrix
    are those of `model`."""
    following = np.roll(rows.tokens, -1, axis=1)[rows.scored]
    parts = []
    for start in range(0, len(states), PREDICTIONS_PER_CHUNK):
        part = slice(start, start + PREDICTIONS_PER_CHUNK)
        parts.append(_score_chunk(model, states[part], reference[part], following[part]))
    return jax.tree.map(lambda *found: np.concatenate(found), *parts)


def _score_chunk(model: Model, states: Any, reference: Any, following: Any) -> Scores:
    """Scores of a chunk, which is filled up to one size."""
    count = len(states)
    dtype = model.llama.embed.dtype
    missing = PREDICTIONS_PER_CHUNK - count
    x, teacher_x = (
        jnp.asarray(np.pad(part, ((0, missing), (0, 0))), dtype)[None]
        for part in (states, reference)
    )
    tokens = jnp.asarray(np.pad(following, (0, missing)))[None]
    layers: Any = {"lower": None, "lower_qkv": None, "upper": None, "upper_qkv": None}
    ends = dataclasses.replace(model.llama, **layers)
    found = compare(model.config, ends, x, teacher_x, tokens)
    return jax.tree.map(lambda values: np.asarray(values)[0, :count], found)


@functools.partial(jax.jit, static_argnums=0)
def compare(
    config: Config,
    llama: Llama,
    x: Float[Array, "B T D"],
    teacher_x: Float[Array, "B T D"],
    following: Int[Array, "B T"],
) -> Scores:
    """Scores of a model from its hidden states and the teacher's, both before the final norm;
    `following` is the right token after each position."""
    model, teacher = (jax.nn.log_softmax(unembed(config, llama, h)) for h in (x, teacher_x))
    likeliest = model.argmax(-1)
    return Scores(
        nll=-jnp.take_along_axis(model, following[..., None], axis=-1)[..., 0],
        kl=(jnp.exp(teacher) * (teacher - model)).sum(-1),
        agreement=(likeliest == teacher.argmax(-1)).astype(jnp.float32),
        first=(likeliest == following).astype(jnp.float32),
    )
