"""FLOPs that the shared prefix of the distillation step saves: its matrix products against those of
two whole models.

Distillation is usually written with a teacher and a student that are two models, each run from the
embedding on. Here the student's lower layers are the teacher's, so they run once. Both forms are
differentiated and compiled for a CPU at full size, which allocates nothing, and their matrix
products are counted as `hlo_flops` does. Attention is one dense product over all T x T pairs,
because loops over blocks end where documents do; of it, only the pairs count that a document's
tokens see.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from swiftkv_jax.model.attention import Attention
from swiftkv_jax.model.batch import Batch
from swiftkv_jax.model.config import Config
from swiftkv_jax.model.layers import head_weights, norm
from swiftkv_jax.model.params import Llama, SwiftKV, llama_shapes, swiftkv_shapes
from swiftkv_jax.model.transformer import (
    Remat,
    run_lower_layers,
    run_upper_layers_student,
    run_upper_layers_teacher,
)
from swiftkv_jax.pallas_kernels.remat import checkpoint_names
from swiftkv_jax.plan.cost import train_flops_by_part
from swiftkv_jax.train.loss.distill import linear_kl, mean_loss
from swiftkv_jax.train.loss.objective import AUTHORS

from .hlo_flops import matmul_flops


@dataclasses.dataclass(frozen=True)
class DenseAttention(Attention):
    """All pairs of positions in one product, on one device."""

    def prefill(self, q, k, v, *, segment_ids: Any = None, **_):
        same = segment_ids[:, :, None] == segment_ids[:, None]
        visible = same & jnp.tril(jnp.ones(same.shape[1:], bool))
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[1], axis=1) for x in (k, v))
        return _dense(q, k, v, visible)


@jax.custom_vjp
def _dense(q, k, v, visible):
    return _dense_forward(q, k, v, visible)[0]


def _dense_forward(q, k, v, visible):
    """Keeps what the kernels keep under the same name; the weights stand for their log-sums."""
    scores = jnp.einsum("BTNH,BNSH->BNTS", q, k) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -1e30))
    q, weights, out = checkpoint_names(q, weights, jnp.einsum("BNTS,BNSH->BTNH", weights, v))
    return out, (q, k, v, weights)


def _dense_backward(residuals, d_out):
    q, k, v, weights = residuals
    d_weights = jnp.einsum("BTNH,BNSH->BNTS", d_out, v)
    d_scores = (
        weights
        * (d_weights - (d_weights * weights).sum(axis=-1, keepdims=True))
        * q.shape[-1] ** -0.5
    )
    d_q, d_k = (
        jnp.einsum("BNTS,BNSH->BTNH", d_scores, k),
        jnp.einsum("BNTS,BTNH->BNSH", d_scores, q),
    )
    return d_q, d_k, jnp.einsum("BNTS,BTNH->BNSH", weights, d_out), None


_dense.defvjp(_dense_forward, _dense_backward)


def two_model_loss(
    config: Config,
    delta: SwiftKV,
    student: Llama,
    teacher: Llama,
    batch: Batch,
    *,
    remat: Remat,
    attention: Attention,
) -> jax.Array:
    """`mean_loss` of the default objective, by two models with weights of their own."""
    compared, ids = AUTHORS.layer_index(config.num_layers), batch.segment_ids
    student, teacher = (jax.lax.stop_gradient(model) for model in (student, teacher))

    def tap(index, x):
        return jnp.where(index == compared, x, 0)

    def squared_error(index, x):
        difference = jnp.where(index == compared, (x - wanted).astype(jnp.float32), 0)
        return (jnp.square(difference).mean(axis=-1) * (ids > 0)).sum()

    x, rope = run_lower_layers(config, teacher, batch, attention=attention)
    teacher_x, wanted = run_upper_layers_teacher(
        config, teacher, x, rope, ids, layer_hook=tap, attention=attention
    )
    x, rope = run_lower_layers(config, student, batch, attention=attention)
    student_x, hidden = run_upper_layers_student(
        config,
        student,
        delta,
        x,
        rope,
        ids,
        layer_hook=squared_error,
        remat=remat,
        attention=attention,
    )
    student_x, teacher_x = (
        norm(config, x, model.final_norm)
        for x, model in ((student_x, student), (teacher_x, teacher))
    )
    next_tokens = jnp.roll(batch.tokens, -1, axis=1)
    divergence, *_ = linear_kl(
        AUTHORS.temperature,
        student_x,
        teacher_x,
        head_weights(teacher),
        next_tokens,
        batch.loss_mask,
        config=config,
    )
    return divergence / batch.loss_mask.sum() + AUTHORS.hidden_weight * hidden / (ids > 0).sum()


def shared_loss(
    config: Config,
    delta: SwiftKV,
    llama: Llama,
    batch: Batch,
    *,
    remat: Remat,
    attention: Attention,
) -> jax.Array:
    """`mean_loss` without its metrics."""
    return mean_loss(config, delta, llama, batch, remat=remat, attention=attention)[0]


def saving(config: Config, length: int, document: int, remat: Remat) -> dict[str, Any]:
    """FLOPs of both forms for one row of `length` tokens in documents of `document`, and the share
    that the shared prefix saves.

    Counted in the compiled programs, and by the formula of `cost`.
    """
    integers, floats = (
        jax.ShapeDtypeStruct((1, length), dtype) for dtype in (jnp.int32, jnp.float32)
    )
    batch = Batch(integers, integers, integers, floats)
    delta, llama = swiftkv_shapes(config), llama_shapes(config)
    attention: Any = DenseAttention()

    def count(loss: Callable[..., jax.Array], *shapes: Any) -> float:
        gradient = jax.grad(functools.partial(loss, config, remat=remat, attention=attention))
        products = matmul_flops(jax.jit(gradient).lower(*shapes).compile().as_text() or "")
        return products.plain + products.batched * (document + 1) / (2 * length)

    shared, two = (
        count(shared_loss, delta, llama, batch),
        count(two_model_loss, delta, llama, llama, batch),
    )
    parts = train_flops_by_part(config, document, remat=remat)
    formula, again = length * sum(parts.values()), length * parts["lower layers, once for both"]
    return {
        "remat": remat,
        "length": length,
        "document": document,
        "counted": {"shared": shared, "two_models": two, "saved": 1 - shared / two},
        "formula": {
            "shared": formula,
            "two_models": formula + again,
            "saved": again / (formula + again),
        },
    }
