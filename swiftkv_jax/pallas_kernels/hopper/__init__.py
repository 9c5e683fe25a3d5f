"""Attention for NVIDIA Hopper GPUs (H100, H200, GH200) in Pallas Mosaic GPU."""

from . import backward, decode, prefill

__all__ = ["backward", "decode", "prefill"]
