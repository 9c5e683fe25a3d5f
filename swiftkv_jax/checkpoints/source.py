"""A model that is read one leaf at a time: a checkpoint opened for reading, or a model in memory.

A `Source` is the table of what is there and a `Reader`, one for each place that arrays come from:
`tensor_reader.TensorReader`, and functions in `orbax_io`, `training_run` and here. Loading and
every conversion are a loop over `Source.leaves`, so none of them holds more of the model than it
returns.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from ..errors import CheckpointError, UsageError
from ..model.config import Config, Quantization
from ..model.cut import CUT_FIELDS
from ..model.mesh import check_mesh
from ..model.model import AuxiliaryFiles, Model, check_model, default_dtype
from ..model.quantization import (
    FORMATS,
    SCALE,
    VALUES,
    Format,
    Quantized,
    Scheme,
    dequantize,
    quantize,
    scheme_for,
)
from ..model.sharding import llama_shardings, swiftkv_shardings
from .tensor_map import MappedLeaf, by_name, leaves, to_trees

logger = logging.getLogger(__name__)


type Reader = Callable[[MappedLeaf, np.dtype, Sharding], jax.Array]
"""Reads one leaf of a `Source` in a dtype, where a sharding says. Raises `CheckpointError` for
damage."""


@dataclasses.dataclass(frozen=True)
class Source:
    """An unread model."""

    config: Config
    leaves: tuple[MappedLeaf, ...]
    """Leaves that are present: without the delta for a plain Llama, without the teacher's upper
    q, k, v where they were dropped."""
    dtypes: Mapping[str, np.dtype]
    """Leaf name -> dtype as stored."""
    reader: Reader
    auxiliary_files: AuxiliaryFiles
    eos_token_ids: tuple[int, ...]
    """End tokens that the configs state; `auxiliary.end_tokens` adds the tokenizer's."""
    path: Path | None = None
    """None for a model in memory."""
    digests: bool = False
    """True if damage to a weight's bytes is detected."""
    quantization: Format | None = None
    """Format of its matrices; None if they are not quantised."""

    @property
    def has_delta(self) -> bool:
        return any(leaf.is_delta for leaf in self.leaves)

    @property
    def has_teacher(self) -> bool:
        """True if the teacher can run: its upper q, k, v are there."""
        return any(leaf.is_teacher_qkv for leaf in self.leaves)

    def read(self, leaf: MappedLeaf, dtype: np.dtype | None, sharding: Sharding) -> jax.Array:
        """One leaf where `sharding` says; `dtype` None is the stored one, and the two parts of a
        quantised matrix have no other. Raises `CheckpointError` for damage."""
        stored = self.dtypes[leaf.name]
        return self.reader(leaf, stored if dtype is None or leaf.part else dtype, sharding)

    def shardings(self, mesh: Mesh | None) -> dict[str, Sharding]:
        """Leaf name -> sharding of the array as it is stored; see `shardings`."""
        return shardings(self.config, mesh, self.quantization)

    def require_teacher(self, purpose: str) -> None:
        """Raise `CheckpointError` unless the teacher's upper q, k, v are there: `purpose`, an
        infinitive, needs them."""
        if not self.has_teacher:
            raise CheckpointError(
                f"{self.path}: the teacher's upper q, k, v were dropped: a checkpoint with them is "
                f"needed to {purpose}"
            )


def load(
    source: Source,
    *,
    dtype: Any = None,
    mesh: Mesh | None = None,
    tokenizer: Any = None,
    quantization: Quantization | None = None,
) -> Model:
    """Read every leaf into a `Model`. `dtype` None is `model.default_dtype()`; `mesh` None is the
    first device.

    `quantization` None keeps matrices as they are stored, `"none"` dequantises them to `dtype`, and
    fp8 and int8 quantise each as soon as it is read. Raises `UsageError` for another format than
    the one they are stored in.
    """
    check_mesh(mesh)
    dtype = default_dtype() if dtype is None else parse_dtype(dtype)
    format = _wanted_format(source, quantization)
    device = jax.local_devices()[0] if mesh is None else mesh.devices.flat[0]
    scheme = format and scheme_for(format, device.device_kind)
    if format == source.quantization:
        where = source.shardings(mesh)
        arrays = {leaf.name: source.read(leaf, dtype, where[leaf.name]) for leaf in source.leaves}
    elif format:
        arrays = dict(_quantized(source, dtype, mesh, format))
    else:
        arrays = dict(_dequantized(source, dtype, mesh))
    llama, delta = to_trees(source.config, arrays, scheme)
    return Model(
        llama,
        delta,
        config=source.config,
        eos_token_ids=source.eos_token_ids,
        tokenizer=tokenizer,
        auxiliary_files=source.auxiliary_files,
    )


def _wanted_format(source: Source, quantization: Quantization | None) -> Format | None:
    if quantization not in (None, "none", *FORMATS):
        raise UsageError(
            f"`quantization`={quantization!r} is not known; choose none or "
            f"{' or '.join(FORMATS)}, or leave it out"
        )
    if quantization is None:
        return source.quantization
    if quantization == "none":
        return None
    if source.quantization not in (None, quantization):
        raise UsageError(
            f"`quantization`={quantization!r}: {source.path} is {source.quantization} already; "
            f"leave it out, or start from the unquantised checkpoint"
        )
    return quantization


def _quantized(
    source: Source, dtype: np.dtype | None, mesh: Mesh | None, format: Format
) -> Iterator[tuple[str, jax.Array]]:
    """Leaf name -> array, each matrix quantised as soon as it is there, from the dtype it is stored
    in."""
    scheme = Scheme(format)
    where = shardings(source.config, mesh) | shardings(source.config, mesh, format)
    for leaf in source.leaves:
        if (in_axes := leaf.param.in_axes) is None:
            yield leaf.name, source.read(leaf, dtype, where[leaf.name])
            continue
        names = [f"{leaf.name}.{part}" for part in (VALUES, SCALE)]
        out = Quantized(where[names[0]], where[names[1]], scheme)
        weight = jax.jit(quantize, static_argnums=(1, 2), out_shardings=out)(
            source.read(leaf, None, where[leaf.name]), in_axes, scheme
        )
        yield from zip(names, (weight.values, weight.scale), strict=True)


def _dequantized(
    source: Source, dtype: np.dtype | None, mesh: Mesh | None
) -> Iterator[tuple[str, jax.Array]]:
    """Leaf name -> array, each matrix computed from its two parts."""
    assert source.quantization is not None
    scheme = Scheme(source.quantization)
    leaf_of = {leaf.name: leaf for leaf in source.leaves}
    where = shardings(source.config, mesh) | source.shardings(mesh)
    for leaf in source.leaves:
        if leaf.part is None:
            yield leaf.name, source.read(leaf, dtype, where[leaf.name])
        elif leaf.part == VALUES:
            scale = leaf_of[f"{leaf.matrix}.{SCALE}"]
            values, scale = (source.read(part, None, where[part.name]) for part in (leaf, scale))
            product = jax.jit(dequantize, static_argnums=1, out_shardings=where[leaf.matrix])
            yield leaf.matrix, product(Quantized(values, scale, scheme), dtype)


# Sources of sources -----------------------------------------------------------


def from_model(model: Model) -> Source:
    """A model in memory; its leaves may be gradients. They are given out where they are."""
    check_model(model)
    arrays = by_name(model.llama) | ({} if model.swiftkv is None else by_name(model.swiftkv))
    format = model.quantization and model.quantization.format

    def read(leaf: MappedLeaf, dtype: np.dtype, sharding: Sharding) -> jax.Array:
        array = arrays[leaf.name]
        return array if array.dtype == dtype else array.astype(dtype)

    present = (leaf for leaf in leaves(model.config, quantization=format) if leaf.name in arrays)
    return Source(
        config=model.config,
        leaves=tuple(present),
        dtypes={name: np.dtype(array.dtype) for name, array in arrays.items()},
        reader=read,
        auxiliary_files=model.auxiliary_files,
        eos_token_ids=model.eos_token_ids,
        quantization=format,
    )


def with_delta(base: Source, path: Path, dtypes: Mapping[str, np.dtype], delta: Reader) -> Source:
    """The frozen weights of `base` with the delta in `path`, which has the same cut and these
    `dtypes`."""
    frozen = tuple(leaf for leaf in base.leaves if not leaf.is_delta)

    def read(leaf: MappedLeaf, dtype: np.dtype, sharding: Sharding) -> jax.Array:
        return (delta if leaf.is_delta else base.reader)(leaf, dtype, sharding)

    return dataclasses.replace(
        base,
        leaves=frozen + tuple(leaf for leaf in leaves(base.config) if leaf.is_delta),
        dtypes={leaf.name: base.dtypes[leaf.name] for leaf in frozen} | dict(dtypes),
        reader=read,
        path=path,
    )


def with_split(stored: Source, config: Config) -> Source:
    """The same Llama split at another layer and without its delta.

    Raises `CheckpointError` if the teacher's upper q, k, v are absent.
    """
    stored.require_teacher("split its layers elsewhere")
    leaf_of = {leaf.name: leaf for leaf in stored.leaves}
    cut = config.num_lower_layers

    def parts(leaf: MappedLeaf) -> list[MappedLeaf]:
        """The stored leaves that hold layers of `leaf`: those of the lower and the upper stack."""
        if not leaf.stacked:
            return [leaf]
        suffix = leaf.name.removeprefix("lower").removeprefix("upper")
        return [leaf_of[f"lower{suffix}"], leaf_of[f"upper{suffix}"]]

    def read(leaf: MappedLeaf, dtype: np.dtype, sharding: Sharding) -> jax.Array:
        if not leaf.stacked:
            return stored.read(leaf, dtype, sharding)
        layers = jnp.concatenate([stored.read(part, dtype, sharding) for part in parts(leaf)])
        mine = layers[:cut] if leaf.name.startswith("lower") else layers[cut:]
        return jax.device_put(mine, sharding)

    present = leaves(config, delta=False, quantization=stored.quantization)
    dtypes = {
        leaf.name: np.dtype(jnp.result_type(*(stored.dtypes[p.name] for p in parts(leaf))))
        for leaf in present
    }
    return dataclasses.replace(stored, config=config, leaves=present, dtypes=dtypes, reader=read)


def shardings(
    config: Config, mesh: Mesh | None, quantization: Format | None = None
) -> dict[str, Sharding]:
    """Leaf name -> sharding on `mesh`; None is all of it on this process's first device."""
    if mesh is None:
        first = SingleDeviceSharding(jax.local_devices()[0])
        return {leaf.name: first for leaf in leaves(config, quantization=quantization)}
    scheme = quantization and Scheme(quantization)
    delta = by_name(swiftkv_shardings(config, mesh, scheme)) if config.num_upper_layers else {}
    return by_name(llama_shardings(config, mesh, scheme)) | delta


def parse_dtype(dtype: Any) -> np.dtype | None:
    """float32, bfloat16 or float16, by name or as a dtype; None stays None. Raises `UsageError` for
    any other."""
    if dtype is None:
        return None
    try:
        parsed = jnp.dtype(dtype)
    except TypeError:
        parsed = None
    if parsed not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise UsageError(
            f"`dtype`={dtype!r} is not supported; supported: float32, bfloat16, float16"
        )
    return parsed


def check_overrides(path: Path, stored: Config, wanted: Config) -> None:
    """Raise `CheckpointError` unless `wanted` is `stored` with, at most, another SwiftKV cut and
    another use of it."""
    names = (*CUT_FIELDS, "shared_kv_heads")
    cut = dataclasses.replace(stored, **{name: getattr(wanted, name) for name in names})
    found = dataclasses.asdict(cut)
    expected = dataclasses.asdict(wanted)
    if different := [
        f"{name}={found[name]!r} (asked for {expected[name]!r})"
        for name in expected
        if expected[name] != found[name]
    ]:
        raise CheckpointError(f"{path}: not the model asked for: {', '.join(different)}")
