"""Attention, as two ops. Everything in the model attends through them; nothing else in the package does.

Reading order: `reference` (the formula), `ops` (arguments, choice), then one implementation: `xla` runs everywhere,
`hopper` and `tpu` are device kernels, `cudnn` is a library to compare with.
"""

from .ops import Implementation, decode_attention, prefill_attention

__all__ = ["Implementation", "decode_attention", "prefill_attention"]
