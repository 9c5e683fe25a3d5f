"""Kernels for NVIDIA Hopper GPUs (H100, H200, GH200) in Pallas Mosaic GPU: attention, and the
products of experts."""

from . import backward, decode, grouped, prefill

__all__ = ["backward", "decode", "grouped", "prefill"]
