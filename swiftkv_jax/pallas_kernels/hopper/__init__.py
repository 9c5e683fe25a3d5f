"""Kernels for NVIDIA Hopper GPUs (H100, H200, GH200) in Pallas Mosaic GPU: attention, and the
products of experts and of FP8 matrices."""

from . import backward, decode, fp8_product, fp8_rows, grouped, prefill

__all__ = ["backward", "decode", "fp8_product", "fp8_rows", "grouped", "prefill"]
