"""What `jax.checkpoint` may save of attention while it computes the rest of a layer again."""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name

ATTENTION_OUTPUT = "attention"
"""Name for `jax.checkpoint_policies.save_only_these_names`: queries, output and log-sums, all that
the backward op reads but the keys and values."""


def checkpoint_names(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """`jax.ad_checkpoint.checkpoint_name` of each array, with `ATTENTION_OUTPUT`."""
    return tuple(checkpoint_name(array, ATTENTION_OUTPUT) for array in arrays)
