"""Results of a model runner's calls."""

from __future__ import annotations

from typing import Any, NamedTuple

NON_FINITE = -2
"""Marks a row whose logits are not finite; no token follows it."""
REJECTED = -3
"""Marks the place of a draft that differs from what came before it, and of those after it."""


class SamplerOutput(NamedTuple):
    """The next token of each row, and log-probabilities for the rows that ask for them. Like every
    named tuple it is a JAX pytree.

    The log-probabilities are the model's own: the log-softmax of the float32 logits as they come,
    before any bias, penalty, temperature or filter (vLLM's `raw_logprobs`).
    """

    token: Any  # i32[B]; `NON_FINITE` where there is none
    logprob: Any  # f32[B]; of `token`; 0 where the row does not ask
    top_ids: Any  # i32[B, 20]; the likeliest tokens, best first, as many as asked for, then -1
    top_logprobs: Any  # f32[B, 20]; theirs, then -inf
    draft_source: Any = None  # i32[B]; see `drafts.Block.source`; None without drafts


class AsyncOutput(NamedTuple):
    """The result of a call that may still be running."""

    result: Any
    index: Any = None
    """Index of the wanted entries of `result`; None if only the end of the call is waited for."""
    num_padding: int = 0
    """Tokens of a prefill call beyond those asked for."""
