"""Read leaves from safetensors and GGUF files, each device's slice straight from the file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from ..errors import CheckpointError, OutOfMemoryError
from ..model.quantization import SCALE
from ..plan.hardware import GIB
from .interleaved import split_pairs
from .quantized.matrices import Tensor
from .safetensors_io import DTYPES, Stored, read_into, verify
from .tensor_map import MappedLeaf


@dataclasses.dataclass(frozen=True)
class TensorReader:
    """Reads from the tensors of a Hugging Face checkpoint."""

    tensors: Mapping[str, Tensor]
    """Tensor name -> tensor as stored."""

    def __call__(self, leaf: MappedLeaf, dtype: np.dtype, sharding: Sharding) -> jax.Array:
        """One leaf onto its devices. Equal slices (copies on several devices) are read once."""
        if leaf.size == 0:
            return jnp.zeros(leaf.shape, dtype, device=sharding)
        blocks: dict[tuple[range, ...], np.ndarray] = {}
        verified: set[str] = set()

        def block(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            ranges = tuple(
                range(*part.indices(size)) for part, size in zip(index, leaf.shape, strict=True)
            )
            if ranges not in blocks:
                blocks[ranges] = self.read_ranges(leaf, ranges, dtype, verified)
            return blocks[ranges]

        return jax.make_array_from_callback(leaf.shape, sharding, block)

    def read_ranges(
        self, leaf: MappedLeaf, ranges: tuple[range, ...], dtype: np.dtype, verified: set[str]
    ) -> np.ndarray:
        """The part of a leaf within `ranges`, one tensor after another. Of a tensor that is read in
        part the checksum is verified once, and of a head always the whole is read."""
        if leaf.head_axis is not None:
            axis = leaf.tensor_axes + leaf.head_axis + 1
            head = range(leaf.shape[axis])
            part = ranges[axis]
            if part != head:
                whole = self.read_ranges(
                    leaf, (*ranges[:axis], head, *ranges[axis + 1 :]), dtype, verified
                )
                return whole[(slice(None),) * axis + (slice(part.start, part.stop),)]
        out = _empty(leaf, tuple(len(part) for part in ranges), dtype)
        of_tensors = ranges[: leaf.tensor_axes]
        within = ranges[leaf.tensor_axes :]
        index = _within_tensor(leaf, _merge_heads(leaf, within))
        for entry in np.ndindex(*map(len, of_tensors)):
            name = leaf.tensor_at([part[i] for part, i in zip(of_tensors, entry, strict=True)])
            tensor = self.tensors[name]
            target = out[entry]
            merged = target.reshape([part.stop - part.start for part in index])
            if not isinstance(tensor, Stored):
                tensor.read_into(merged, index)
            else:
                partial = any(
                    part.stop - part.start != size
                    for part, size in zip(index, tensor.shape, strict=True)
                )
                if partial and tensor.name not in verified:
                    verify(tensor)
                    verified.add(tensor.name)
                read_into(merged, tensor, index)
            if leaf.interleaved is not None:
                split_pairs(merged, leaf.interleaved)
            _check_values(leaf, tensor, target)
        return out


def _check_values(leaf: MappedLeaf, tensor: Tensor, values: np.ndarray) -> None:
    narrowed = values.dtype == np.float16 and DTYPES[tensor.code] != values.dtype
    if narrowed and not np.isfinite(values).all():
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} has values beyond float16; load it as bfloat16 or "
            f"float32"
        )
    # A negative scale is one like any other: auto-round writes them.
    if leaf.part == SCALE and not np.isfinite(values).all():
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} has scales that are not finite; copy or download it "
            f"again"
        )


def _empty(leaf: MappedLeaf, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array that a CPU device can take over without a copy: that needs an address divisible by
    64."""
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        buffer = np.empty(num_bytes + 63, np.uint8)
    except (MemoryError, ValueError):  # NumPy's for sizes beyond the address space
        raise OutOfMemoryError(
            f"out of host memory: reading {leaf.name} needs {num_bytes / GIB:.2f} GiB for "
            f"{dtype.name}{list(shape)}"
        ) from None
    start = -buffer.ctypes.data % 64
    return buffer[start : start + num_bytes].view(dtype).reshape(shape)


def _within_tensor(leaf: MappedLeaf, slices: tuple[slice, ...]) -> tuple[slice, ...]:
    """`slices` of the leaf's part of a tensor, counted from where the tensor begins."""
    if leaf.rows is None:
        return slices
    first = leaf.rows[0]
    rest = slices[1:]
    return (slice(slices[0].start + first, slices[0].stop + first), *rest)


def _merge_heads(leaf: MappedLeaf, within: tuple[range, ...]) -> tuple[slice, ...]:
    """Ranges of one tensor's array, with whole heads, as slices of the tensor."""
    slices = [slice(part.start, part.stop) for part in within]
    if (axis := leaf.head_axis) is not None:
        head_dim = len(within[axis + 1])
        slices[axis : axis + 2] = [
            slice(slices[axis].start * head_dim, slices[axis].stop * head_dim)
        ]
    return (*slices, slice(0, 1)) if leaf.part == SCALE else tuple(slices)
