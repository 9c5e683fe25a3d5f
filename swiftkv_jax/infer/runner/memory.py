"""The memory plan of an engine: bytes on each device by the compiler's own figures, before any of
them are allocated."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from ...errors import OutOfMemoryError
from ...plan.hardware import GIB
from ...process.distributed import smallest

CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Files with the limit of a container's memory: of version 2 and of version 1 of Linux's cgroups
(https://docs.kernel.org/admin-guide/cgroup-v2.html)."""


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes that an engine needs on one device."""

    weights: int
    kept: int
    """Bytes of the model that the weights were copied from, where it stays (`bytes_kept`)."""
    cache: int
    rows: int
    """Bytes of the decode state without the cache."""
    temporaries: int
    """Bytes of temporaries of the program that needs most."""
    program: str
    """Name of that program."""
    limit: int | None
    """Bytes that may be used, on a CPU those of the machine; None where a device does not say."""

    @property
    def total(self) -> int:
        return self.weights + self.kept + self.cache + self.rows + self.temporaries

    @property
    def over(self) -> int:
        """Bytes by which the plan exceeds the limit; 0 if it fits."""
        return max(0, self.total - self.limit) if self.limit is not None else 0

    def __str__(self) -> str:
        of = "" if self.limit is None else f" of {size_of(self.limit)}"
        kept = f"the model they were copied from {size_of(self.kept)} + " if self.kept else ""
        return (
            f"memory per device: weights {size_of(self.weights)} + {kept}"
            f"KV cache {size_of(self.cache)} + rows {size_of(self.rows)} + "
            f"temporaries {size_of(self.temporaries)} ({self.program}) = {size_of(self.total)}{of}"
        )


def memory_plan(
    weights,
    cache,
    rows,
    compiled: Mapping[Any, jax.stages.Compiled],
    limit: int | None,
    kept_bytes: int = 0,
) -> MemoryPlan:
    """The plan for arrays, or their shapes with shardings, and the programs that run on them."""
    temporaries, program = max(
        (_temporaries(executable), str(program)) for program, executable in compiled.items()
    )
    return MemoryPlan(
        bytes_per_device(weights),
        kept_bytes,
        bytes_per_device(cache),
        bytes_per_device(rows),
        temporaries,
        program,
        limit,
    )


def bytes_per_device(tree) -> int:
    """Bytes of a tree of arrays, or of shapes with shardings, on one device."""
    return sum(_shard_bytes(leaf) for leaf in jax.tree.leaves(tree))


def bytes_kept(model, weights) -> int:
    """Bytes on one device of the arrays of `model` that are not deleted and whose memory `weights`,
    made from it, do not share."""
    shared = {buffer for leaf in jax.tree.leaves(weights) for buffer in _buffers(leaf)}
    return sum(
        _shard_bytes(leaf)
        for leaf in jax.tree.leaves(model)
        if isinstance(leaf, jax.Array) and not leaf.is_deleted() and not shared & _buffers(leaf)
    )


def memory_limit(device: Any, utilization: float) -> int | None:
    """Bytes that may be used of a device: `utilization` of what JAX may use, the least in any
    process; None if the device does not say, as a CPU."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if not stats or "bytes_limit" not in stats:
        return None
    return smallest(int(utilization * stats["bytes_limit"]))


@contextlib.contextmanager
def allocating(what: str) -> Iterator[None]:
    """Turn a failed allocation of `what` into an `OutOfMemoryError`."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemoryError(f"no memory is free for {what}") from error


def host_memory() -> int:
    """Bytes of memory of this machine or container; of the smallest of several processes'."""
    limits = [int(text) for file in CGROUP_LIMITS if (text := _read(file)).isdigit()]
    return smallest(min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *limits]))


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _buffers(array: jax.Array) -> set[tuple[Any, int]]:
    """Return the addresses of an array's memory on the devices of this process."""
    return {
        (shard.device, shard.data.unsafe_buffer_pointer()) for shard in array.addressable_shards
    }


def _shard_bytes(leaf) -> int:
    shape = (
        leaf.shape
        if getattr(leaf, "sharding", None) is None
        else leaf.sharding.shard_shape(leaf.shape)
    )
    return math.prod(shape) * leaf.dtype.itemsize


def _temporaries(executable: jax.stages.Compiled) -> int:
    """Bytes of temporaries, and of results that do not reuse the memory of arguments."""
    figures = executable.memory_analysis()
    if figures is None:
        return 0
    return figures.temp_size_in_bytes + max(
        0, figures.output_size_in_bytes - figures.alias_size_in_bytes
    )


def size_of(count: int) -> str:
    """A number of bytes in GiB or MiB."""
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"
