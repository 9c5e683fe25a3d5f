"""The distillation loss: the student's divergence from the teacher, and its distance from one
hidden state.

Teacher and student share embedding and lower layers, so those run once. Logits are computed for one
chunk of positions at a time, and the gradient in the same pass, so there is never a `B T V` array
of long rows times a large vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from ...model.attention import DEFAULT, Attention
from ...model.batch import Batch
from ...model.config import Config
from ...model.layers import finish_logits, head_weights, norm, unfinished_gradient
from ...model.mesh import MODEL, dp_size
from ...model.params import Llama, SwiftKV
from ...model.sharding import all_gather_vocabulary, constrain_activations
from ...model.stacks import cast
from ...model.transformer import (
    Remat,
    run_lower_layers,
    run_upper_layers_student,
    run_upper_layers_teacher,
)
from .divergence import Divergence, divergence_and_gradient
from .objective import AUTHORS, LossAverage, Objective

LOGITS_PER_CHUNK = 2**26
"""Largest number of logits in a chunk on one device, 256 MiB in float32; see `chunk_length`."""


@struct.dataclass
class Sums:
    """Sums over one batch, all f32[]. Only `divergence` and `hidden` are differentiable, and only
    in the delta."""

    divergence: Array  # sum of loss_mask * temperature^2 * the objective's divergence, nats
    hidden: Array  # sum over real tokens of the hidden states' error, see `HiddenLoss`
    targets: Array  # sum of loss_mask
    tokens: Array  # real (not padding) tokens
    agreement: Array  # sum of loss_mask where both models rank the same token first
    teacher_nll: Array  # sum of loss_mask * cross-entropy of the teacher with the next token, nats
    student_nll: Array  # the same for the student
    kl: Array  # sum of loss_mask * KL(teacher || student) at temperature 1, nats

    def means(self, average: LossAverage = "targets") -> dict[str, Array]:
        """Per-token means, independent of padding, packing and device layout. `average` decides
        what `logits_loss` is divided by. `kl` is the same measure whatever the objective is."""
        targets = jnp.maximum(self.targets, 1)
        tokens = jnp.maximum(self.tokens, 1)
        return {
            "logits_loss": self.divergence / (targets if average == "targets" else tokens),
            "hidden_loss": self.hidden / tokens,
            "agreement": self.agreement / targets,
            "teacher_loss": self.teacher_nll / targets,
            "student_loss": self.student_nll / targets,
            "kl": self.kl / targets,
        }


def distill_sums(
    config: Config,
    delta: SwiftKV,
    llama: Llama,
    batch: Batch,
    *,
    objective: Objective = AUTHORS,
    remat: Remat = "none",
    attention: Attention = DEFAULT,
    chunk: int | None = None,
    metrics: bool | Array = True,
) -> Sums:
    """Run teacher and student on one batch. The fields of `batch` are B T; its `own` tokens keep
    upper keys and values of their own.

    The delta may be wider than the frozen weights (a float32 master copy): it is cast to their
    dtype. `chunk` and `metrics` are the arguments of `linear_kl`. Raises `ValueError` as
    `Objective.layer_index` does.
    """
    compared = objective.layer_index(config.num_layers)
    llama = jax.lax.stop_gradient(llama)
    delta = cast(delta, llama.embed.dtype)
    real = (batch.segment_ids > 0).astype(jnp.float32)

    def squared_error(student_x, teacher_x):
        wide = teacher_x.astype(jnp.float32)
        error = jnp.square(student_x.astype(jnp.float32) - wide).mean(axis=-1)
        if objective.hidden == "relative":
            error /= jnp.square(wide).mean(axis=-1) + jnp.finfo(jnp.float32).tiny
        return (error * real).sum()

    def zero(student_x, teacher_x):
        return jnp.zeros((), jnp.float32)  # 0.0 is a float64 under jax_enable_x64

    with jax.named_scope("lower"):
        x, tables = run_lower_layers(config, llama, batch, attention=attention)
    with jax.named_scope("teacher"):
        teacher_x, teacher_hidden = run_upper_layers_teacher(
            config,
            llama,
            x,
            tables,
            batch.segment_ids,
            layer_hook=lambda index, x: jnp.where(index == compared, x, 0),
            attention=attention,
        )
    with jax.named_scope("student"):
        # The error is summed inside the scan: carrying the compared state out of it would store
        # it once per layer.
        student_x, hidden = run_upper_layers_student(
            config,
            llama,
            delta,
            x,
            tables,
            batch.segment_ids,
            layer_hook=lambda index, x: jax.lax.cond(
                index == compared, squared_error, zero, x, teacher_hidden
            ),
            remat=remat,
            attention=attention,
            own=batch.own,
        )
    teacher_x, student_x = (
        constrain_activations(attention.mesh, x) for x in (teacher_x, student_x)
    )  # not split along the sequence: chunks run along it
    teacher_x, student_x = (norm(config, x, llama.final_norm) for x in (teacher_x, student_x))
    if compared == config.num_layers:
        hidden = squared_error(student_x, teacher_x)
    divergence, agreement, teacher_nll, student_nll, kl = linear_kl(
        objective.temperature,
        student_x,
        teacher_x,
        head_weights(llama),
        jnp.roll(batch.tokens, -1, axis=1),
        batch.loss_mask,
        config=config,
        divergence=objective.divergence,
        top_k=objective.top_k,
        mesh=attention.mesh,
        chunk=chunk,
        metrics=metrics,
    )
    targets = batch.loss_mask.sum()
    tokens = real.sum()
    return Sums(divergence, hidden, targets, tokens, agreement, teacher_nll, student_nll, kl)


# Divergence through the output matrix, without the logits ---------------------


class _Static(NamedTuple):
    config: Config | None
    temperature: float
    divergence: Divergence
    top_k: int | None
    chunk: int


def linear_kl(
    temperature: float,
    student_x: Float[Array, "B T D"],
    teacher_x: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    next_tokens: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    *,
    config: Config | None = None,
    divergence: Divergence = "forward",
    top_k: int | None = None,
    mesh: Mesh | None = None,
    chunk: int | None = None,
    metrics: bool | Array = True,
) -> tuple[Array, Array, Array, Array, Array]:
    """Weighted sums over positions, in float32: (temperature^2 divergence, agreement, teacher nll,
    student nll, KL(teacher || student) at temperature 1).

    The divergence is taken between the softmaxes of both logits over `temperature` (Hinton et al.,
    "Distilling the Knowledge in a Neural Network", 2015), see `divergence`. Only it is
    differentiable, and only in `student_x`: teacher and head are frozen. The KL divergence takes
    one more pass over a chunk's logits, unless it is the divergence. Logits are divided and
    capped as `config` says; without one they are the products with `head`. On a `mesh` rows stay
    split over data and fsdp, and logits over model. `chunk` is the number of positions whose logits
    exist at a time; None is `chunk_length`. Without `metrics`, which may be known to the device
    only, all sums but the first are 0: each costs a pass over the logits.
    """
    batch, length, _ = student_x.shape
    chunk = chunk or chunk_length(batch, length, head.shape[0], mesh)
    sums: Any = _linear_kl(
        _Static(config, temperature, divergence, top_k, chunk),
        student_x,
        teacher_x,
        all_gather_vocabulary(mesh, head),
        next_tokens,
        weights,
        jnp.asarray(metrics),
    )
    return sums


def chunk_length(batch: int, length: int, vocabulary: int, mesh: Mesh | None = None) -> int:
    """Positions of a chunk whose logits on one device are `LOGITS_PER_CHUNK` entries at most: a
    power of two, so that rows and tiles divide evenly, or the whole `length`."""
    if mesh is not None:
        batch = -(-batch // dp_size(mesh))
        vocabulary = -(-vocabulary // mesh.shape[MODEL])
    allowed = max(1, LOGITS_PER_CHUNK // (batch * vocabulary))
    return min(length, 2 ** (allowed.bit_length() - 1))


def split_chunks(x: Array, chunk: int) -> Array:
    """B T ... -> chunks B `chunk` ...; the last chunk is padded with zeros."""
    batch, length, *rest = x.shape
    x = jnp.pad(x, [(0, 0), (0, -length % chunk)] + [(0, 0)] * len(rest))
    return jnp.moveaxis(x.reshape(batch, -1, chunk, *rest), 1, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear_kl(static, *arrays):
    return _scan_chunks(static, *arrays, with_gradient=False)[0]


def _linear_kl_forward(static, *arrays):
    return _scan_chunks(static, *arrays, with_gradient=True)


def _linear_kl_backward(static, gradient, cotangents):
    return cotangents[0].astype(gradient.dtype) * gradient, None, None, None, None, None


_linear_kl.defvjp(_linear_kl_forward, _linear_kl_backward)


def _scan_chunks(
    static: _Static,
    student_x,
    teacher_x,
    head,
    next_tokens,
    weights,
    metrics: Bool[Array, ""],
    *,
    with_gradient: bool,
):
    """(the sums of `linear_kl`, the first one's gradient in student_x or None).

    Chunks run along the sequence, never over flattened tokens: flattening would gather a batch that
    is sharded over rows.
    """
    batch, length, _ = student_x.shape
    chunk = static.chunk
    chunks = -(-length // chunk)

    def step(sums, arrays):
        student_x, teacher_x, next_tokens, weights = arrays
        student = jnp.einsum("BTD,VD->BTV", student_x, head, preferred_element_type=jnp.float32)
        teacher = jnp.einsum("BTD,VD->BTV", teacher_x, head, preferred_element_type=jnp.float32)
        if static.config is not None:
            student, teacher = (finish_logits(static.config, x) for x in (student, teacher))
        divergence, gradient = divergence_and_gradient(
            static.divergence, student, teacher, static.temperature, static.top_k
        )

        def measured() -> tuple[Array, ...]:
            kl = divergence
            if (static.divergence, static.temperature, static.top_k) != ("forward", 1.0, None):
                kl, _ = divergence_and_gradient("forward", student, teacher, 1.0)
            agreement = same_first(student, teacher)
            return agreement, nll(teacher, next_tokens), nll(student, next_tokens), kl

        def nothing() -> tuple[Array, ...]:
            return (jnp.zeros_like(divergence),) * 4

        parts = divergence, *jax.lax.cond(metrics, measured, nothing)
        sums = tuple(
            total + (weights * part).sum() for total, part in zip(sums, parts, strict=True)
        )
        if not with_gradient:
            return sums, None
        if static.config is not None:
            gradient = unfinished_gradient(static.config, gradient, student)
        gradient = (gradient * weights[..., None]).astype(head.dtype)
        return sums, jnp.einsum("BTV,VD->BTD", gradient, head).astype(student_x.dtype)

    zeros = (jnp.zeros((), jnp.float32),) * 5
    sums, gradient = jax.lax.scan(
        step,
        zeros,
        tuple(split_chunks(x, chunk) for x in (student_x, teacher_x, next_tokens, weights)),
    )
    if gradient is not None:
        gradient = jnp.moveaxis(gradient, 0, 1).reshape(batch, chunks * chunk, -1)[:, :length]
    return sums, gradient


# Both are sums and maxima over the vocabulary, so that logits split over `model` are not moved.


def same_first(student, teacher):
    """1.0 where teacher and student have the same likeliest token."""
    is_best = teacher == teacher.max(axis=-1, keepdims=True)
    students_logit = jnp.where(is_best, student, -jnp.inf).max(axis=-1)
    return (students_logit == student.max(axis=-1)).astype(jnp.float32)


def nll(logits, tokens):
    chosen = jnp.where(
        jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == tokens[..., None], logits, 0.0
    ).sum(axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - chosen
