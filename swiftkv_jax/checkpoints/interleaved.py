"""The order of rows of queries and keys in checkpoints whose rotary embedding is interleaved.

The model rotates dimension i of a head with dimension i + R / 2, of its first R (`Rope.rotated`);
GLM-4 and ERNIE 4.5 rotate dimension 2i with 2i + 1. Rows of q and k, and of their biases, scales
and norms, are put into the first order where they are read, and back where they are written. That
changes no score: queries and keys are permuted alike.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Interleaved(NamedTuple):
    """Dimensions of each head that a checkpoint interleaves."""

    head_dim: int
    rotated: int
    """R: how many of a head's dimensions, its first ones, rotate."""


def split_pairs(rows: np.ndarray, order: Interleaved) -> None:
    """Put whole heads, an array [heads * head_dim, ...], from the checkpoint's order into the
    model's: 0, 2, 4, ... 1, 3, 5, ... of the dimensions that rotate. In place, a head at a time."""
    for head in _heads(rows, order):
        head[: order.rotated] = np.concatenate(
            [head[0 : order.rotated : 2], head[1 : order.rotated : 2]]
        )


def join_pairs(rows: np.ndarray, order: Interleaved) -> np.ndarray:
    """The inverse of `split_pairs`, as a new array."""
    joined = np.array(rows, order="C")
    half = order.rotated // 2
    for head, source in zip(_heads(joined, order), _heads(rows, order), strict=True):
        head[0 : order.rotated : 2] = source[:half]
        head[1 : order.rotated : 2] = source[half : order.rotated]
    return joined


def _heads(rows: np.ndarray, order: Interleaved) -> np.ndarray:
    """A view [heads, head_dim, ...]: the rows are contiguous."""
    assert len(rows) % order.head_dim == 0, "no part of a leaf splits a head"
    return rows.reshape(-1, order.head_dim, *rows.shape[1:])
