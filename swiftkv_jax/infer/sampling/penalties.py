"""Changes to the logits before a token is chosen: `min_tokens`, `logit_bias` and the penalties; and
the counts of tokens that the penalties need.

Token counts are u16 for each row and token of the vocabulary: bit 15 is set for tokens of the
prompt, the bits below count how often the token was generated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt16

from .metadata import SamplingMetadata

IN_PROMPT = 1 << 15
_COUNT = IN_PROMPT - 1


def token_counts_of(tokens: Sequence[int], num_generated: int, vocab_size: int) -> np.ndarray:
    """u16[V]: the token counts of a sequence that has generated the last `num_generated` of its
    tokens."""
    ids = np.asarray(tokens, np.int64)
    prompt = len(tokens) - num_generated
    counts = np.bincount(ids[prompt:], minlength=vocab_size).clip(max=_COUNT).astype(np.uint16)
    counts[ids[:prompt]] |= IN_PROMPT
    return counts


def update_token_counts(
    token_counts: UInt16[Array, "_ V"],
    rows: Int[Array, " B"],
    token: Int[Array, " B"],
    active: Bool[Array, " B"],
) -> UInt16[Array, "_ V"]:
    """Count one more `token` in each active one of `rows`, which are distinct; a row past the last
    is left out.

    A count stays at 32767 once it is there. Writes one element a row.
    """
    old = token_counts.at[rows, token].get(mode="clip")
    more = active & (old & _COUNT < _COUNT)
    return token_counts.at[rows, token].set(old + more.astype(token_counts.dtype), mode="drop")


def update_token_counts_of_blocks(
    token_counts: UInt16[Array, "_ V"],
    rows: Int[Array, " B"],
    token: Int[Array, "B T"],
    active: Bool[Array, "B T"],
) -> UInt16[Array, "_ V"]:
    """`update_token_counts` for one column of `token` after the other, as one write."""
    before = jnp.tri(token.shape[1], k=-1, dtype=bool)
    same = (token[:, :, None] == token[:, None, :]) & active[:, None, :] & before
    old = token_counts.at[rows[:, None], token].get(mode="clip") & _COUNT
    more = active & (old + same.sum(axis=-1) < _COUNT)
    more = more.astype(token_counts.dtype)
    return token_counts.at[rows[:, None], token].add(more, mode="drop")


def changes_logits(sampling: SamplingMetadata, position: Int[Array, " B"]) -> Bool[Array, " B"]:
    """True for rows that `apply_penalties` changes."""
    penalised = (
        (sampling.repetition_penalty != 1)
        | (sampling.presence_penalty != 0)
        | (sampling.frequency_penalty != 0)
    )
    biased = jnp.any(sampling.bias_ids >= 0, axis=-1)
    return _below_min_tokens(sampling, position) | biased | penalised


def apply_penalties(
    logits: Float[Array, "B V"],
    sampling: SamplingMetadata,
    token_counts: UInt16[Array, "B V"],
    position: Int[Array, " B"],
    then: Callable[[Float[Array, "..."]], Float[Array, "..."]] = lambda logits: logits,
) -> Float[Array, "B V"]:
    """Logits after the mask of `min_tokens`, the bias and the penalties, in vLLM's order. With
    `then`, the result of this elementwise function on them, without storing the logits
    themselves."""
    rows = jnp.arange(len(logits))[:, None]
    vocab_size = logits.shape[-1]

    def penalized(logits, counts):
        repetition, presence, frequency = (
            penalty[:, None]
            for penalty in (
                sampling.repetition_penalty,
                sampling.presence_penalty,
                sampling.frequency_penalty,
            )
        )
        times = (counts & _COUNT).astype(jnp.float32)
        repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
        logits = jnp.where(counts > 0, repeated, logits)
        return then(logits - frequency * times - jnp.where(times > 0, presence, 0))

    # All tokens, and then the few with a bias or a mask in their place. An index past the end is
    # dropped; -1 would be the last token.
    ids = jnp.where(sampling.bias_ids >= 0, sampling.bias_ids, vocab_size)
    biased = logits.at[rows, ids].get(mode="clip") + sampling.bias
    biased = penalized(biased, token_counts.at[rows, ids].get(mode="clip"))
    changed = penalized(logits, token_counts).at[rows, ids].set(biased, mode="drop")
    masked = (sampling.stop_token_ids >= 0) & _below_min_tokens(sampling, position)[:, None]
    ids = jnp.where(masked, sampling.stop_token_ids, vocab_size)
    return changed.at[rows, ids].set(then(jnp.full(ids.shape, -jnp.inf)), mode="drop")


def _below_min_tokens(sampling: SamplingMetadata, position: Int[Array, " B"]) -> Bool[Array, " B"]:
    stops = jnp.any(sampling.stop_token_ids >= 0, axis=-1)
    return (position + 1 < sampling.min_length) & stops
