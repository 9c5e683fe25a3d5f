"""Log-probabilities of the chosen tokens and of the likeliest ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..engine.sampling_params import MAX_LOGPROBS

_BLOCK = 32  # tokens; small, so that the vocabulary over several devices is still whole blocks


def gather_logprobs(
    logits: Float[Array, "B V"], token: Int[Array, " B"], num_logprobs: Int[Array, " B"]
) -> tuple[Float[Array, " B"], Int[Array, "B 20"], Float[Array, "B 20"]]:
    """(log-probability of `token`, ids of the likeliest tokens, their log-probabilities).

    A row with `num_logprobs` below 0 gets 0 and no likeliest tokens, one with k gets k of them,
    then -1 and minus infinity.
    """
    total = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0] - total
    _, no_ids, no_values = empty_logprobs(len(token))

    def likeliest():
        values, ids = _largest(logits, MAX_LOGPROBS)
        shown = jnp.arange(MAX_LOGPROBS) < jnp.minimum(num_logprobs, logits.shape[-1])[:, None]
        return jnp.where(shown, ids, -1), jnp.where(shown, values - total[:, None], -jnp.inf)

    return jnp.where(num_logprobs >= 0, chosen, 0), *jax.lax.cond(
        jnp.any(num_logprobs > 0), likeliest, lambda: (no_ids, no_values)
    )


def empty_logprobs(
    batch: int,
) -> tuple[Float[Array, " B"], Int[Array, "B 20"], Float[Array, "B 20"]]:
    """The result of `gather_logprobs` for rows without log-probabilities."""
    shape = batch, MAX_LOGPROBS
    return (
        jnp.zeros(batch, jnp.float32),
        jnp.full(shape, -1, jnp.int32),
        jnp.full(shape, -jnp.inf, jnp.float32),
    )


def _largest(logits: Float[Array, "B V"], k: int) -> tuple[Float[Array, "B k"], Int[Array, "B k"]]:
    """`lax.top_k` over the vocabulary, without the sort of all of it that a GPU would do: only the
    k blocks with the largest maxima are searched.

    Each of those has a token at least as large as any outside them, and of blocks with equal maxima
    the first are chosen: so they hold the k largest tokens, of equals those with lower ids. The
    vocabulary is padded with minus infinity.
    """
    batch, vocab_size = logits.shape
    num_blocks = max(-(-vocab_size // _BLOCK), k)
    blocks = jnp.pad(
        logits, ((0, 0), (0, num_blocks * _BLOCK - vocab_size)), constant_values=-jnp.inf
    ).reshape(batch, num_blocks, _BLOCK)
    chosen = jnp.sort(jax.lax.top_k(blocks.max(axis=-1), k)[1], axis=-1)
    candidates = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1).reshape(batch, k * _BLOCK)
    ids = (chosen[:, :, None] * _BLOCK + jnp.arange(_BLOCK)).reshape(batch, k * _BLOCK)
    values, at = jax.lax.top_k(candidates, k)
    return values, jnp.take_along_axis(ids, at, axis=-1)
