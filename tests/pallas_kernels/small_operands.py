"""Operands of the two ops in one small shape: zeros, any of which a test may change."""

from typing import Any

import jax
import jax.numpy as jnp

B, T, N, K, S, H = 2, 6, 4, 2, 8, 64
SCALE = jnp.ones((B, K, S))


def zeros(*shape: int, dtype=jnp.bfloat16) -> jax.Array:
    return jnp.zeros(shape, dtype)


def prefill_operands(**changes: Any) -> dict[str, Any]:
    return {"q": zeros(B, T, N, H), "k": zeros(B, K, S, H), "v": zeros(B, K, S, H)} | changes


def decode_operands(**changes: Any) -> dict[str, Any]:
    operands = {"q": zeros(B, 1, N, H), "k": zeros(B, K, S, H), "v": zeros(B, K, S, H)}
    return operands | {"length": jnp.asarray([8, 3])} | changes
