"""Rows of tokens, as the model takes them."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from .params import Leaf


@struct.dataclass
class Batch:
    """Packed rows of tokens."""

    tokens: Leaf  # i32[B, T]
    positions: Leaf  # i32[B, T]; restart at 0 in every document
    segment_ids: Leaf  # i32[B, T]; equal within a document, 0 is padding
    loss_mask: Leaf  # f32[B, T]; weight of the prediction made at this position
    own: Leaf = None  # bool[B, T]; tokens that keep their own upper keys and values; None: none


def unpacked_batch(
    tokens: Int[Array, "B T"], loss_mask: Float[Array, "B T"] | None = None
) -> Batch:
    """Rows that hold one document each, from position 0."""
    ones = jnp.ones_like(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return Batch(
        tokens, positions, ones, ones.astype(jnp.float32) if loss_mask is None else loss_mask
    )
