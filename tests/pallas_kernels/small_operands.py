"""Operands of the two ops in one small shape: zeros, any of which a test may change."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

B, T, N, K, S, H = 2, 6, 4, 2, 8, 64
SCALE = jnp.asarray(np.ones((B, K, S), np.float32))  # without a program, which would be compiled


def zeros(*shape: int, dtype=jnp.bfloat16) -> jax.Array:
    return jnp.asarray(np.zeros(shape, dtype))


def prefill_operands(**changes: Any) -> dict[str, Any]:
    return {"q": zeros(B, T, N, H), "k": zeros(B, K, S, H), "v": zeros(B, K, S, H)} | changes


def decode_operands(**changes: Any) -> dict[str, Any]:
    operands = {"q": zeros(B, 1, N, H), "k": zeros(B, K, S, H), "v": zeros(B, K, S, H)}
    return operands | {"length": jnp.asarray([8, 3])} | changes
