"""What a backward pass may keep of attention while it computes the rest of a layer again."""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name

ATTENTION_OUTPUT = "attention"
"""The name for `jax.checkpoint_policies.save_only_these_names`: queries, output and log-sums, all
that the backward op reads but the keys and values."""


def keep(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The same arrays, under that name."""
    return tuple(checkpoint_name(array, ATTENTION_OUTPUT) for array in arrays)
