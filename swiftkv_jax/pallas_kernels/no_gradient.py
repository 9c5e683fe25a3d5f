"""Refusal of gradients that attention does not have."""

from __future__ import annotations

import functools

import jax

SCALED_OR_PAGED = (
    "attention to scaled or paged keys and values has no gradient: widen or gather them first"
)
"""Why no implementation has a gradient of them."""


LOG_SUMS = "attention with return_lse has no gradient"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def without_gradient(message: str, operands):
    """`operands`; differentiating them raises `NotImplementedError(message)`."""
    return operands


def _refuse(message, *_):
    raise NotImplementedError(message)


without_gradient.defvjp(_refuse, _refuse)
