"""Attention, as two ops: `prefill_attention` and `decode_attention`. The model calls them through
`swiftkv_jax.model.attention` and in no other way. Products of experts (`grouped_product`) and of
FP8 matrices (`fp8_product`) are two more, and rows of the latter (`fp8_rows`) a third.

Reading order: `reference` (the formula), `operands` (what an op is given), `checks`, `choice` and
`ops`, then one implementation: `xla` runs everywhere, `hopper` and `tpu` are device kernels,
`cudnn` is a library, for prefill on other GPUs.

Importing this imports neither JAX nor a kernel until one of the functions is used: the commands
list the implementations in their help.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from .implementations import IMPLEMENTATIONS, Implementation, ImplementationError

if TYPE_CHECKING:
    from typing import Any

    from .checks import check_decode, check_prefill
    from .choice import choose
    from .decode_plan import DecodePlan
    from .gradients import ATTENTION_OUTPUT
    from .operands import AttentionOperands, AttentionSpec
    from .ops import decode_attention, plan_decode, prefill_attention, widens_pool
    from .score_options import PLAIN_SCORES, ScoreOptions

_MODULES = {
    "ATTENTION_OUTPUT": "gradients",
    "AttentionOperands": "operands",
    "AttentionSpec": "operands",
    "DecodePlan": "decode_plan",
    "PLAIN_SCORES": "score_options",
    "ScoreOptions": "score_options",
    "check_decode": "checks",
    "check_prefill": "checks",
    "choose": "choice",
    "decode_attention": "ops",
    "plan_decode": "ops",
    "prefill_attention": "ops",
    "widens_pool": "ops",
}
"""The other public names, and the modules that hold them."""

__all__ = [
    "IMPLEMENTATIONS",
    "ATTENTION_OUTPUT",
    "AttentionOperands",
    "AttentionSpec",
    "DecodePlan",
    "Implementation",
    "ImplementationError",
    "PLAIN_SCORES",
    "ScoreOptions",
    "check_decode",
    "check_prefill",
    "choose",
    "decode_attention",
    "plan_decode",
    "prefill_attention",
    "widens_pool",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value
