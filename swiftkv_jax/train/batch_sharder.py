"""From the rows a process reads to arrays on the mesh."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import numpy as np
from jax.sharding import NamedSharding

from ..transformer import Batch


@dataclasses.dataclass(frozen=True)
class BatchSharder:
    """How the rows of a batch are laid out on the devices. A batch has prod(shape) rows, counted in
    the order of `shape`."""

    sharding: NamedSharding
    """Of arrays `shape` T."""
    shape: tuple[int, ...]
    """(A, B): micro-batches and their rows; or (B,)."""

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape)

    @functools.cached_property
    def positions(self) -> list[int]:
        """The rows that this process's devices hold: those it has to read."""
        needed = np.zeros(self.shape, bool)
        for index in self.sharding.addressable_devices_indices_map((*self.shape, 1)).values():
            assert index is not None
            needed[index[:-1]] = True
        return np.flatnonzero(needed).tolist()

    def place(self, rows: Batch) -> Batch:
        """`rows` holds the rows `positions` on the host, P T; returns the whole batch on the mesh,
        `shape` T."""

        def spread(field: np.ndarray) -> jax.Array:
            whole = np.zeros((self.num_rows, field.shape[1]), field.dtype)
            whole[self.positions] = field
            whole = whole.reshape(*self.shape, -1)
            return jax.make_array_from_callback(
                whole.shape, self.sharding, lambda index: whole[index]
            )

        return jax.tree.map(spread, rows)
