"""Where a model's leaves come from, one at a time: a checkpoint opened for reading, or a model in memory.

Loading and every conversion are a loop over `Source.leaves`, so none of them holds more of the model than it returns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from ..bundle import Model, SideFiles, default_dtype
from ..config import Config
from ..errors import CheckpointError, UsageError
from ..sharding import llama_shardings, swiftkv_shardings
from .names import Leaf, by_name, leaves, to_trees


@dataclasses.dataclass(frozen=True)
class Source:
    """An unread model."""

    config: Config
    leaves: tuple[Leaf, ...]
    """Those present: without the delta for a plain Llama, without the teacher's upper q, k, v where they were dropped."""
    dtypes: Mapping[str, np.dtype]
    """Leaf name -> dtype as stored."""
    read: Callable[[Leaf, np.dtype | None, Sharding], jax.Array]
    """(leaf, dtype or None for the stored one, where to put it) -> array. Raises `CheckpointError` for damage."""
    side_files: SideFiles
    eos_token_ids: tuple[int, ...]
    path: Path | None = None
    """None for a model in memory."""
    digests: bool = False
    """Whether damage to a weight's bytes is detected."""

    @property
    def has_delta(self) -> bool:
        return any(leaf.is_delta for leaf in self.leaves)

    @property
    def has_teacher(self) -> bool:
        """Whether the teacher can run: its upper q, k, v are there."""
        return any(leaf.is_teacher_qkv for leaf in self.leaves)


def load(source: Source, *, dtype: Any = None, mesh: Mesh | None = None, tokenizer: Any = None) -> Model:
    """Read every leaf into a `Model`. `dtype` None is `bundle.default_dtype()`; `mesh` None is the first device."""
    dtype = default_dtype() if dtype is None else parse_dtype(dtype)
    where = placements(source.config, mesh)
    llama, delta = to_trees(source.config, {leaf.name: source.read(leaf, dtype, where[leaf.name]) for leaf in source.leaves})
    return Model(
        llama,
        delta,
        config=source.config,
        eos_token_ids=source.eos_token_ids,
        tokenizer=tokenizer,
        side_files=source.side_files,
    )


def from_model(model: Model) -> Source:
    """A model in memory; its leaves may be gradients. They are given out where they are."""
    arrays = by_name(model.llama) | ({} if model.swiftkv is None else by_name(model.swiftkv))
    present = tuple(leaf for leaf in leaves(model.config) if leaf.name in arrays)

    def read(leaf: Leaf, dtype: np.dtype | None, sharding: Sharding) -> jax.Array:
        array = arrays[leaf.name]
        return array if dtype is None else array.astype(dtype)

    return Source(
        config=model.config,
        leaves=present,
        dtypes={name: np.dtype(array.dtype) for name, array in arrays.items()},
        read=read,
        side_files=model.side_files,
        eos_token_ids=model.eos_token_ids,
    )


def with_delta(base: Source, path: Path, dtypes: Mapping[str, np.dtype], read_delta: Callable[..., jax.Array]) -> Source:
    """The frozen weights of `base` with the delta in `path`, which has the same cut; `dtypes` and `read_delta` as in `Source`."""
    frozen = tuple(leaf for leaf in base.leaves if not leaf.is_delta)
    delta = tuple(leaf for leaf in leaves(base.config) if leaf.is_delta)

    def read(leaf: Leaf, dtype: np.dtype | None, sharding: Sharding) -> jax.Array:
        return (read_delta if leaf.is_delta else base.read)(leaf, dtype, sharding)

    together = {leaf.name: base.dtypes[leaf.name] for leaf in frozen} | dict(dtypes)
    return dataclasses.replace(base, leaves=frozen + delta, dtypes=together, read=read, path=path)


def placements(config: Config, mesh: Mesh | None) -> dict[str, Sharding]:
    """Leaf name -> sharding on `mesh`, or all of it on this process's first device."""
    if mesh is None:
        first = SingleDeviceSharding(jax.local_devices()[0])
        return {leaf.name: first for leaf in leaves(config)}
    delta = by_name(swiftkv_shardings(config, mesh)) if config.num_upper_layers else {}
    return by_name(llama_shardings(config, mesh)) | delta


def parse_dtype(dtype: Any) -> np.dtype | None:
    """float32, bfloat16 or float16, by name or as a dtype; None stays None. Raises `UsageError` for any other."""
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
    theirs = dataclasses.asdict(stored.cut(wanted.num_key_value_layers, wanted.key_value_group_size))
    ours = dataclasses.asdict(wanted)
    if different := [f"{name}={theirs[name]!r} (asked for {ours[name]!r})" for name in ours if ours[name] != theirs[name]]:
        raise CheckpointError(f"{path}: not the model asked for: {', '.join(different)}")


def recut(opened: Source, config: Config) -> Source:
    """The same Llama with its boundary elsewhere and without its delta; each leaf is put together from both stacks.

    Raises `CheckpointError` if the teacher's upper q, k, v are absent.
    """
    if not opened.has_teacher:
        raise CheckpointError(f"{opened.path}: the teacher's upper q, k, v are absent, so layers cannot move to another SwiftKV cut")
    stored = {leaf.name: leaf for leaf in opened.leaves}

    def read(leaf: Leaf, dtype: np.dtype | None, sharding: Sharding) -> jax.Array:
        if not leaf.stacked:
            return opened.read(leaf, dtype, sharding)
        part, field = leaf.name.split(".")
        halves = [stored[f"{stack}{part[len('lower'):]}.{field}"] for stack in ("lower", "upper")]
        whole = jnp.concatenate([opened.read(half, dtype, sharding) for half in halves])
        cut = config.num_lower_layers
        return jax.device_put(whole[:cut] if part.startswith("lower") else whole[cut:], sharding)

    present = leaves(config, delta=False)
    return dataclasses.replace(opened, config=config, leaves=present, read=read)
