"""Name of what `jax.checkpoint` may save of attention, and errors for gradients that do not
exist."""

from __future__ import annotations

import functools

import jax
from jax.ad_checkpoint import checkpoint_name

from .implementations import ImplementationError

ATTENTION_OUTPUT = "attention"
"""Name for `jax.checkpoint_policies.save_only_these_names`: queries, output and log-sums, all that
the backward op reads but the keys and values."""
SCALED_OR_PAGED = (
    "attention to scaled or paged keys and values has no gradient: widen or gather them first"
)
"""Why no implementation has a gradient of them."""
LOG_SUMS = "attention with return_lse has no gradient"


def checkpoint_names(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """`jax.ad_checkpoint.checkpoint_name` of each array, with `ATTENTION_OUTPUT`."""
    return tuple(checkpoint_name(array, ATTENTION_OUTPUT) for array in arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def without_gradient(refusal: str | tuple[str, str], operands):
    """`operands`; differentiating them raises `NotImplementedError`, or `ImplementationError` if
    the refusal is an implementation and a reason."""
    return operands


def _refuse(refusal, *_):
    raise (
        NotImplementedError(refusal) if isinstance(refusal, str) else ImplementationError(*refusal)
    )


without_gradient.defvjp(_refuse, _refuse)
