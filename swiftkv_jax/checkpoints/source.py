"""Where a model's leaves come from, one at a time: a checkpoint opened for reading, or a model in
memory.

Loading and every conversion are a loop over `Source.leaves`, so none of them holds more of the
model than it returns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from ..config import Config
from ..errors import CheckpointError, UsageError
from ..model import AuxiliaryFiles, Model, default_dtype
from ..quantization import (
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
from ..sharding import llama_shardings, swiftkv_shardings
from .tensor_map import Leaf, by_name, leaves, to_trees

Quantization = Literal["none", "fp8", "int8"]
"""What a caller may ask for, besides None: as stored."""


@dataclasses.dataclass(frozen=True)
class Source:
    """An unread model."""

    config: Config
    leaves: tuple[Leaf, ...]
    """Those present: without the delta for a plain Llama, without the teacher's upper q, k, v where
    they were dropped."""
    dtypes: Mapping[str, np.dtype]
    """Leaf name -> dtype as stored."""
    read: Callable[[Leaf, np.dtype | None, Sharding], jax.Array]
    """(leaf, dtype or None for the stored one, where to put it) -> array. Raises `CheckpointError`
    for damage.

    The two parts of a quantised matrix have no dtype but their own.
    """
    auxiliary_files: AuxiliaryFiles
    eos_token_ids: tuple[int, ...]
    path: Path | None = None
    """None for a model in memory."""
    digests: bool = False
    """Whether damage to a weight's bytes is detected."""
    quantization: Format | None = None
    """How its matrices are stored; None for those that are not quantised."""

    @property
    def has_delta(self) -> bool:
        return any(leaf.is_delta for leaf in self.leaves)

    @property
    def has_teacher(self) -> bool:
        """Whether the teacher can run: its upper q, k, v are there."""
        return any(leaf.is_teacher_qkv for leaf in self.leaves)


def load(
    source: Source,
    *,
    dtype: Any = None,
    mesh: Mesh | None = None,
    tokenizer: Any = None,
    quantization: Quantization | None = None,
) -> Model:
    """Read every leaf into a `Model`. `dtype` None is `bundle.default_dtype()`; `mesh` None is the
    first device.

    `quantization` None keeps matrices as they are stored, `"none"` dequantises them to `dtype`, and
    fp8 and int8 quantise each as soon as it is read. Raises `UsageError` for another format than
    the one they are stored in.
    """
    dtype = default_dtype() if dtype is None else parse_dtype(dtype)
    format = _wanted_format(source, quantization)
    device = jax.local_devices()[0] if mesh is None else mesh.devices.flat[0]
    scheme = format and scheme_for(format, device.device_kind)
    if format == source.quantization:
        where = placements(source.config, mesh, format)
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
            f"quantization {quantization!r} is not known; choose none or {' or '.join(FORMATS)}, "
            f"or leave it out"
        )
    format = (
        source.quantization
        if quantization is None
        else None
        if quantization == "none"
        else quantization
    )
    if None not in (format, source.quantization) and format != source.quantization:
        where, stored = source.path, source.quantization
        raise UsageError(
            f"quantization {format!r}: {where} is {stored} already; leave it out, or start from "
            f"the unquantised checkpoint"
        )
    return format


def _quantized(
    source: Source, dtype: np.dtype | None, mesh: Mesh | None, format: Format
) -> Iterator[tuple[str, jax.Array]]:
    """Leaf name -> array, each matrix quantised as soon as it is there, from the dtype it is stored
    in."""
    scheme, where = (
        Scheme(format),
        placements(source.config, mesh) | placements(source.config, mesh, format),
    )
    for leaf in source.leaves:
        if (in_axes := leaf.param.in_axes) is None:
            yield leaf.name, source.read(leaf, dtype, where[leaf.name])
            continue
        names = [f"{leaf.name}.{part}" for part in (VALUES, SCALE)]
        places = Quantized(where[names[0]], where[names[1]], scheme)
        weight = jax.jit(quantize, static_argnums=(1, 2), out_shardings=places)(
            source.read(leaf, None, where[leaf.name]), in_axes, scheme
        )
        yield from zip(names, (weight.values, weight.scale), strict=True)


def _dequantized(
    source: Source, dtype: np.dtype | None, mesh: Mesh | None
) -> Iterator[tuple[str, jax.Array]]:
    """Leaf name -> array, each matrix put together from its two parts."""
    assert source.quantization is not None
    scheme, by_name = Scheme(source.quantization), {leaf.name: leaf for leaf in source.leaves}
    where = placements(source.config, mesh) | placements(source.config, mesh, source.quantization)
    for leaf in source.leaves:
        if leaf.part is None:
            yield leaf.name, source.read(leaf, dtype, where[leaf.name])
        elif leaf.part == VALUES:
            scale = by_name[f"{leaf.matrix}.{SCALE}"]
            values, scale = (source.read(part, None, where[part.name]) for part in (leaf, scale))
            together = jax.jit(dequantize, static_argnums=1, out_shardings=where[leaf.matrix])
            yield leaf.matrix, together(Quantized(values, scale, scheme), dtype)


def from_model(model: Model) -> Source:
    """A model in memory; its leaves may be gradients. They are given out where they are."""
    arrays = by_name(model.llama) | ({} if model.swiftkv is None else by_name(model.swiftkv))
    format = model.quantization and model.quantization.format
    present = tuple(
        leaf for leaf in leaves(model.config, quantization=format) if leaf.name in arrays
    )

    def read(leaf: Leaf, dtype: np.dtype | None, sharding: Sharding) -> jax.Array:
        array = arrays[leaf.name]
        return array if dtype is None or leaf.part else array.astype(dtype)

    return Source(
        config=model.config,
        leaves=present,
        dtypes={name: np.dtype(array.dtype) for name, array in arrays.items()},
        read=read,
        auxiliary_files=model.auxiliary_files,
        eos_token_ids=model.eos_token_ids,
        quantization=format,
    )


def with_delta(
    base: Source, path: Path, dtypes: Mapping[str, np.dtype], read_delta: Callable[..., jax.Array]
) -> Source:
    """The frozen weights of `base` with the delta in `path`, which has the same cut; `dtypes` and
    `read_delta` as in `Source`."""
    frozen = tuple(leaf for leaf in base.leaves if not leaf.is_delta)
    delta = tuple(leaf for leaf in leaves(base.config) if leaf.is_delta)

    def read(leaf: Leaf, dtype: np.dtype | None, sharding: Sharding) -> jax.Array:
        return (read_delta if leaf.is_delta else base.read)(leaf, dtype, sharding)

    together = {leaf.name: base.dtypes[leaf.name] for leaf in frozen} | dict(dtypes)
    return dataclasses.replace(base, leaves=frozen + delta, dtypes=together, read=read, path=path)


def placements(
    config: Config, mesh: Mesh | None, quantization: Format | None = None
) -> dict[str, Sharding]:
    """Leaf name -> sharding on `mesh`, or all of it on this process's first device."""
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
        raise UsageError(f"dtype {dtype!r} is not supported; supported: float32, bfloat16, float16")
    return parsed


def check_overrides(path: Path, stored: Config, wanted: Config) -> None:
    """Raise `CheckpointError` unless `wanted` is `stored` with, at most, another SwiftKV cut."""
    theirs = dataclasses.asdict(
        stored.cut(wanted.num_key_value_layers, wanted.key_value_group_size)
    )
    ours = dataclasses.asdict(wanted)
    if different := [
        f"{name}={theirs[name]!r} (asked for {ours[name]!r})"
        for name in ours
        if ours[name] != theirs[name]
    ]:
        raise CheckpointError(f"{path}: not the model asked for: {', '.join(different)}")


def recut(opened: Source, config: Config) -> Source:
    """The same Llama with its boundary elsewhere and without its delta; each leaf is put together
    from both stacks.

    Raises `CheckpointError` if the teacher's upper q, k, v are absent.
    """
    if not opened.has_teacher:
        raise CheckpointError(
            f"{opened.path}: the teacher's upper q, k, v are absent, so layers cannot move to "
            f"another SwiftKV cut"
        )
    stored = {leaf.name: leaf for leaf in opened.leaves}

    def read(leaf: Leaf, dtype: np.dtype | None, sharding: Sharding) -> jax.Array:
        if not leaf.stacked:
            return opened.read(leaf, dtype, sharding)
        part, field = leaf.name.split(".", 1)
        halves = [stored[f"{stack}{part[len('lower') :]}.{field}"] for stack in ("lower", "upper")]
        whole = jnp.concatenate([opened.read(half, dtype, sharding) for half in halves])
        cut = config.num_lower_layers
        return jax.device_put(whole[:cut] if part.startswith("lower") else whole[cut:], sharding)

    present = leaves(config, delta=False, quantization=opened.quantization)
    return dataclasses.replace(opened, config=config, leaves=present, read=read)
