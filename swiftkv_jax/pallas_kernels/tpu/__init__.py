"""Attention for TPUs in Pallas Mosaic TPU."""

from . import backward, decode, prefill

__all__ = ["backward", "decode", "prefill"]
