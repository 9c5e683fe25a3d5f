"""Predictions that depend on the far prompt.

Most tokens follow from what is near, so an average hides whether a student still reads a distant
prompt. A prediction in the second half of a row is far-dependent if the teacher loses more than
`FAR_NATS` on it when it sees nothing before the last `KEPT` tokens of the first half. Where
generated tokens keep upper keys and values of their own, the first half is the prompt.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...model.attention import Attention
from ...model.batch import Batch
from ...model.config import Config
from ...model.layers import unembed
from ...model.params import Llama
from ...model.sharding import constrain_activations
from ...model.transformer import teacher
from .distill import chunk_length, split_chunks

FAR_NATS = 1.0
KEPT = 64
"""Tokens at the end of a row's first half that are not far; a quarter of a row at most."""


@functools.partial(jax.jit, static_argnums=(0, 1))
def only_far(config: Config, attention: Attention, llama: Llama, batch: Batch) -> Batch:
    """The batch with a `loss_mask` that keeps only the far-dependent predictions. If tokens of
    `config` keep their own keys and values, `own` marks those from `exact_tail` before the second
    half on. What the batch marks is ignored: if the far prompt kept its own too, nothing in it
    could be lost."""
    length = batch.tokens.shape[1]
    at = jnp.arange(length)
    half = length // 2
    near = at >= half - min(KEPT, length // 4)
    real = batch.segment_ids > 0
    cut = dataclasses.replace(
        batch, segment_ids=jnp.where(real, 2 * batch.segment_ids + near, 0), own=None
    )
    with_far, without = (_nll(config, attention, llama, each) for each in (batch, cut))
    far = (without - with_far > FAR_NATS) & (at >= half - 1)
    found = dataclasses.replace(batch, loss_mask=batch.loss_mask * far, own=None)
    return mark_own(config, found)


@functools.partial(jax.jit, static_argnums=0)
def mark_own(config: Config, batch: Batch) -> Batch:
    """The batch with `own` as `only_far` marks it, if tokens of `config` keep their own keys and
    values; as it is otherwise."""
    if config.generated_kv != "own":
        return batch
    length = batch.tokens.shape[1]
    late = jnp.arange(length) >= length // 2 - config.exact_tail
    return dataclasses.replace(batch, own=(batch.segment_ids > 0) & late)


def _nll(config: Config, attention: Attention, llama: Llama, batch: Batch) -> Float[Array, "B T"]:
    """The teacher's cross-entropy with the next token at each position, nats."""
    x = constrain_activations(attention.mesh, teacher(config, llama, batch, attention=attention))
    targets = jnp.roll(batch.tokens, -1, axis=1)
    rows, length, _ = x.shape
    chunk = chunk_length(rows, length, config.vocab_size, attention.mesh)

    def nll(part):
        x, targets = part
        logits = unembed(config, llama, x)
        taken = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return jax.nn.logsumexp(logits, -1) - taken

    found = jax.lax.map(nll, (split_chunks(x, chunk), split_chunks(targets, chunk)))
    return jnp.moveaxis(found, 0, 1).reshape(rows, -1)[:, :length]
