"""Attention, as two ops: `prefill_attention` and `decode_attention`. The model calls them through
`swiftkv_jax.attention` and in no other way.

Reading order: `reference` (the formula), `checks` and `ops` (arguments, choice), then one
implementation: `xla` runs everywhere, `hopper` and `tpu` are device kernels, `cudnn` is a library,
for prefill on other GPUs.
"""

from typing import get_args

from .checks import check_decode, check_prefill
from .decode_plan import DecodePlan
from .ops import Implementation, decode_attention, plan_decode, prefill_attention, widens_pool
from .remat import ATTENTION_OUTPUT

IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)

__all__ = [
    "IMPLEMENTATIONS",
    "ATTENTION_OUTPUT",
    "DecodePlan",
    "Implementation",
    "check_decode",
    "check_prefill",
    "decode_attention",
    "plan_decode",
    "prefill_attention",
    "widens_pool",
]
