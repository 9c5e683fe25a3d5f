"""Batches of one process's rows, as arrays on the mesh."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import numpy as np
from jax.sharding import NamedSharding

from ...model.batch import Batch


@dataclasses.dataclass(frozen=True)
class BatchSharder:
    """Puts the rows that a process has read onto the devices that need them. A batch has
    prod(shape) rows, counted in the order of `shape`."""

    sharding: NamedSharding
    """Sharding of arrays `shape` T."""
    shape: tuple[int, ...]
    """(A, B): micro-batches and their rows; or (B,)."""

    @property
    def num_rows(self) -> int:
        """Rows of a batch, over all processes."""
        return math.prod(self.shape)

    @functools.cached_property
    def positions(self) -> list[int]:
        """The rows that this process's devices hold, and which it has to read."""
        needed = np.zeros(self.shape, bool)
        for index in self.sharding.addressable_devices_indices_map((*self.shape, 1)).values():
            assert index is not None
            needed[index[:-1]] = True
        return np.flatnonzero(needed).tolist()

    def shard(self, rows: Batch) -> Batch:
        """The batch on the mesh, fields `shape` T. `rows` are NumPy arrays P T on the host: the
        rows `positions`, in that order."""

        def shard_field(field: np.ndarray) -> jax.Array:
            batch = np.zeros((self.num_rows, field.shape[1]), field.dtype)
            batch[self.positions] = field
            batch = batch.reshape(*self.shape, -1)
            return jax.make_array_from_callback(
                batch.shape, self.sharding, lambda index: batch[index]
            )

        return jax.tree.map(shard_field, rows)
