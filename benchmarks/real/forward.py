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

from swiftkv_jax.model.attention import DEFAULT
from swiftkv_jax.model.batch import Batch
from swiftkv_jax.model.config import Config
from swiftkv_jax.model.model import Model
from swiftkv_jax.model.params import Llama, SwiftKV
from swiftkv_jax.model.rope import rope_tables
from swiftkv_jax.model.transformer import run_upper_layers_student, teacher
from swiftkv_jax.train.analysis.sweep import teacher_states
from swiftkv_jax.train.loss.far_tokens import KEPT

from ..quality.held_out import PROMPT
from ..quality.scores import Scores, compare, cut_away, far_dependent
from .rows import Rows

TOKENS_PER_BATCH = 4096
PREDICTIONS_PER_CHUNK = 256


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
    last, without_prompt = [], []
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
    config, rows, found = student.config, reference.rows, []
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


def _scored(rows: Rows, chosen: slice, output: Any) -> np.ndarray:
    """The states of a batch at the scored predictions."""
    states = np.asarray(output, np.float32)[: chosen.stop - chosen.start]
    return states[rows.scored[chosen]]


def _scores(model: Model, rows: Rows, states: np.ndarray, reference: np.ndarray) -> Scores:
    """The scores of `quality.scores.compare` from a model's states and the teacher's, f32[N, D].
    Final norm and output matrix are those of `model`."""
    following = np.roll(rows.tokens, -1, axis=1)[rows.scored]
    parts = []
    for start in range(0, len(states), PREDICTIONS_PER_CHUNK):
        part = slice(start, start + PREDICTIONS_PER_CHUNK)
        parts.append(_compare(model, states[part], reference[part], following[part]))
    return jax.tree.map(lambda *found: np.concatenate(found), *parts)


def _compare(model: Model, states: Any, reference: Any, following: Any) -> Scores:
    """Scores of a chunk, which is filled up to one size."""
    count, dtype = len(states), model.llama.embed.dtype
    missing = PREDICTIONS_PER_CHUNK - count
    x, teacher_x = (
        jnp.asarray(np.pad(part, ((0, missing), (0, 0))), dtype)[None]
        for part in (states, reference)
    )
    # `compare` takes rows of text, and the token after each position for the right one.
    tokens = jnp.asarray(np.roll(np.pad(following, (0, missing)), 1))[None]
    layers: Any = {"lower": None, "lower_qkv": None, "upper": None, "upper_qkv": None}
    ends = dataclasses.replace(model.llama, **layers)
    found = compare(model.config, ends, x, teacher_x, tokens)
    return jax.tree.map(lambda values: np.asarray(values)[0, :count], found)
