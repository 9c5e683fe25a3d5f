"""Choosing the next token on the device: greedy, temperature, top-k, top-p, each row its own way in one program."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from ..errors import UsageError
from ..params import Leaf


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """What a caller asks for. Raises `UsageError` (a `ValueError`) that names the parameter."""

    max_tokens: int = 128
    temperature: float = 0.0
    """0 takes the likeliest token."""
    top_k: int = 0
    """Draw from the k likeliest tokens; 0 is off."""
    top_p: float = 1.0
    """Draw from the fewest tokens that hold this probability together; 1 is off. Applied after top_k."""
    seed: int = 0
    ignore_eos: bool = False
    """Go on after an end token, up to `max_tokens`."""

    def __post_init__(self):
        if self.max_tokens < 1:
            raise UsageError(f"max_tokens={self.max_tokens} must be at least 1")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UsageError(f"temperature={self.temperature} must be a number from 0 (greedy) up")
        if self.top_k < 0:
            raise UsageError(f"top_k={self.top_k} must be 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p={self.top_p} must be above 0 and at most 1 (off)")
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"seed={self.seed} must be from 0 to {2**32 - 1}")


@struct.dataclass
class Sampling:
    """What each row was asked for, as arrays: a change of value never recompiles."""

    temperature: Leaf  # f32[B]; 0 is greedy
    top_k: Leaf  # i32[B]; 0 is off
    top_p: Leaf  # f32[B]; 1 is off
    key: Leaf  # key[B]; of the row, before the position is folded in
    end_ids: Leaf  # i32[B, E]; tokens that end the row, -1 for none


def make_sampling(params: SamplingParams, rows: Sequence[int], end_ids: Sequence[int]) -> Sampling:
    """One entry per number in `rows`: a row draws by its number, wherever in a batch it stands."""
    batch = len(rows)
    ends = np.full((batch, max(len(end_ids), 1)), -1, np.int32)
    if not params.ignore_eos:
        ends[:, : len(end_ids)] = end_ids
    return Sampling(
        temperature=jnp.full(batch, params.temperature, jnp.float32),
        top_k=jnp.full(batch, min(params.top_k, 2**31 - 1), jnp.int32),
        top_p=jnp.full(batch, params.top_p, jnp.float32),
        key=jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(params.seed), jnp.asarray(rows, jnp.uint32)),
        end_ids=jnp.asarray(ends),
    )


def sample(logits: Float[Array, "B V"], sampling: Sampling, position: Int[Array, " B"]) -> Int[Array, " B"]:
    """The token that follows the one at `position` of each row.

    Its randomness is fold_in(fold_in(key(seed), row), position): the same whatever the chunking, the batch, and the
    number of steps per call. What no row asks for is not computed.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    drawn = jax.lax.cond(jnp.any(sampling.temperature > 0), _draw, lambda *_: greedy, logits, sampling, position)
    return jnp.where(sampling.temperature > 0, drawn, greedy)


def _draw(logits: Float[Array, "B V"], sampling: Sampling, position: Int[Array, " B"]) -> Int[Array, " B"]:
    """A draw from each row's distribution: the largest of its log-probabilities with Gumbel noise."""
    # Measured from the largest logit, so that no temperature however small makes an infinity minus an infinity.
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / jnp.maximum(sampling.temperature, 1e-6)[:, None]
    filters = (sampling.temperature > 0) & ((sampling.top_k > 0) | (sampling.top_p < 1))
    scaled = jax.lax.cond(jnp.any(filters), _filter, lambda scaled, _: scaled, scaled, sampling)
    keys = jax.vmap(jax.random.fold_in)(sampling.key, position)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, scaled.shape[-1:], jnp.float32))(keys)
    return jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32)


def _filter(scaled: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """Minus infinity for what top-k, then top-p of the rest, leave out. Of equal tokens the lower id ranks first."""
    order = jnp.argsort(scaled, axis=-1, descending=True, stable=True)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    keep = _within_top_k(ranked, sampling.top_k)
    probability = jax.nn.softmax(jnp.where(keep, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    keep &= (before < sampling.top_p[:, None]) | (sampling.top_p[:, None] >= 1)
    rows = jnp.arange(scaled.shape[0])[:, None]
    keep = jnp.zeros_like(keep).at[rows, order].set(keep)
    return jnp.where(keep, scaled, -jnp.inf)


def _within_top_k(ranked: Float[Array, "B V"], top_k: Int[Array, " B"]) -> Bool[Array, "B V"]:
    return (jnp.arange(ranked.shape[-1]) < top_k[:, None]) | (top_k[:, None] == 0)
