"""Write Hugging Face checkpoints, a tensor at a time.

`full` is what the authors' PyTorch class and vLLM plugin load: teacher and delta. A student whose
layers mix shared values (`SwiftKV.mix`) gets a model type that they refuse, for they would leave
the mixes out. `expanded` gives every upper layer keys and values of its own, equal to what it makes
of its group's: for loaders without support for groups or mixes. `delta` is only what was trained.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Sharding

from ..errors import UsageError
from ..model.config import Config
from ..model.sharding import to_host
from ..process.files import check_free, new_directory, write_json
from .auxiliary import write_auxiliary_files
from .interleaved import join_pairs
from .safetensors_io import crc32, write_file
from .source import Source, parse_dtype
from .tensor_map import MappedLeaf, leaves

logger = logging.getLogger(__name__)

Format = Literal["full", "delta", "expanded"]
INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# Keys of the safetensors metadata.
FORMAT = "swiftkv_format"
DELTA = "delta"
BASE_DIGEST = "base_model_digest"
SHARD_BYTES = 4_000_000_000


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor to write: entry `index` of a leaf's leading axes; of several leaves the one below
    the other."""

    leaves: tuple[MappedLeaf, ...]
    index: tuple[int, ...]
    name: str
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.leaves[0].stored_shape

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def write_hf(
    source: Source,
    path: str | os.PathLike[str],
    *,
    format: Format = "full",
    dtype: Any = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[MappedLeaf], None] = lambda leaf: None,
) -> None:
    """Write a source as safetensors with a config.json, leaf by leaf; `progress` is called after
    each. `dtype` None keeps each leaf's own. See the module for the formats.

    A model without a delta is written as a plain Llama, fp8 matrices as `compressed_tensors` says.
    Nothing appears at `path` until all is written. Raises `UsageError` if `path` exists, if there
    is no delta to write as one, if the teacher's upper q, k, v were dropped, and for int8 matrices,
    which have no form here. With several processes, all of them call this: each tensor is gathered
    to every host in turn, and process 0 writes.
    """
    check_free(path)
    _check_format(source, format)
    if format == "expanded" and source.has_delta:
        source = _with_expanded_groups(source)
    wanted = parse_dtype(dtype)
    tensors = _plan(source, format, wanted)
    metadata = {}
    if format == "delta":
        metadata = {FORMAT: DELTA, BASE_DIGEST: base_model_digest(source)}
    with new_directory(path) as partial:
        shards = _split(tensors, shard_bytes)
        blocks = _values(source, tensors, wanted, progress)
        count = len(shards)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        if count == 1:
            names = [SINGLE_FILE]
        for name, shard in zip(names, shards, strict=True):
            mine = itertools.islice(blocks, len(shard))
            if jax.process_index() == 0:
                write_file(
                    partial / name,
                    [(tensor.name, tensor.shape, tensor.dtype) for tensor in shard],
                    mine,
                    metadata,
                )
            else:
                collections.deque(mine, maxlen=0)  # takes part in gathering
        next(blocks, None)  # lets the generator finish
        if jax.process_index() == 0:
            if len(shards) > 1:
                weight_map = {
                    tensor.name: name
                    for name, shard in zip(names, shards, strict=True)
                    for tensor in shard
                }
                size = {"total_size": sum(tensor.num_bytes for tensor in tensors)}
                index = {"metadata": size, "weight_map": weight_map}
                write_json(partial / INDEX, index, canonical=True)
            dtype_name = (source.dtypes["embed"] if wanted is None else wanted).name
            write_auxiliary_files(
                partial,
                _config(source),
                source.auxiliary_files,
                dtype_name,
                source.quantization,
            )


def base_model_digest(source: Source) -> str:
    """Identifies the frozen weights, whatever the SwiftKV cut: a digest over the digests of the
    plain Llama's tensors.

    Each is taken of the values rounded to bfloat16, so a base loaded in a wider dtype than its
    file's is the same base.
    """
    tensors = [tensor for tensor in _plan(source, "full", None) if not tensor.leaves[0].is_delta]
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    digests = {
        tensor.name: crc32(block.astype(bfloat16))
        for tensor, block in zip(
            tensors, _values(source, tensors, None, lambda leaf: None), strict=True
        )
    }
    lines = "".join(f"{name} {digests[name]:08x}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()[:32]


def _check_format(source: Source, format: str) -> None:
    if format not in ("full", "delta", "expanded"):
        raise UsageError(f"`format`={format!r} is not known; choose full, delta or expanded")
    if format == "delta" and not source.has_delta:
        raise UsageError(
            "`format`=delta: this model has no delta; add one with add_swiftkv, or write full"
        )
    if source.quantization == "int8" or (source.quantization and format == "delta"):
        raise UsageError(
            f"`format`={format}: not for {source.quantization} weights; use save, or load them "
            f"with `quantization`='none'"
        )
    if not source.has_teacher:
        raise UsageError(
            f"`format`={format} needs the teacher's upper q, k, v, which this model was saved or "
            f"loaded without"
        )


def _config(source: Source) -> Config:
    config = source.config
    if not source.has_delta:
        return config.cut(config.num_layers)
    return config


def _plan(source: Source, format: str, dtype: np.dtype | None) -> list[_Tensor]:
    """Every tensor to write, in the order of the leaves; wide dtypes first, so that each starts at
    a multiple of its size."""
    joined: dict[tuple[str, ...], list[MappedLeaf]] = {}
    for leaf in source.leaves:
        if leaf.tensors and (leaf.is_delta or format != "delta"):
            joined.setdefault(leaf.tensors, []).append(leaf)

    def stored(parts: list[MappedLeaf]) -> np.dtype:
        if dtype is not None and not parts[0].part:
            return dtype
        found = [source.dtypes[leaf.name] for leaf in parts]
        return found[0] if len(found) == 1 else np.dtype(jnp.result_type(*found))

    groups = [(tuple(sorted(parts, key=_first_row)), stored(parts)) for parts in joined.values()]
    tensors = []
    for parts, of_group in sorted(groups, key=lambda group: -group[1].itemsize):
        tensors += [
            _Tensor(parts, index, name, of_group)
            for index, name in zip(np.ndindex(*parts[0].counts), parts[0].tensors, strict=True)
        ]
    return tensors


def _first_row(leaf: MappedLeaf) -> int:
    return 0 if leaf.rows is None else leaf.rows[0]


def _split(tensors: Sequence[_Tensor], shard_bytes: int) -> list[list[_Tensor]]:
    shards: list[list[_Tensor]] = []
    room = 0
    for tensor in tensors:
        if not shards or tensor.num_bytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= tensor.num_bytes
    return shards


def _values(
    source: Source,
    tensors: Sequence[_Tensor],
    dtype: np.dtype | None,
    progress: Callable[[MappedLeaf], None],
) -> Iterator[np.ndarray]:
    """The values of the tensors on the host. Each leaf is read once and let go before the next."""
    where = source.shardings(None)
    arrays = []
    current = ()
    for tensor in tensors:
        if tensor.leaves is not current:
            for leaf in current:
                progress(leaf)
            arrays = []
            current = tensor.leaves
            arrays = [source.read(leaf, dtype, where[leaf.name]) for leaf in current]
        parts = [
            _in_tensors_order(leaf, to_host(array, *tensor.index).reshape(leaf.tensor_shape))
            for leaf, array in zip(current, arrays, strict=True)
        ]
        yield parts[0] if len(parts) == 1 else np.concatenate(parts).astype(tensor.dtype)
    for leaf in current:
        progress(leaf)


def _in_tensors_order(leaf: MappedLeaf, rows: np.ndarray) -> np.ndarray:
    if leaf.interleaved is None:
        return rows
    return join_pairs(rows, leaf.interleaved)


# Groups of layers, written apart ----------------------------------------------


def _read_of_layer(
    stored: Source, leaf: MappedLeaf, dtype: np.dtype, sharding: Sharding
) -> jax.Array:
    """Read the keys and values of a group once for each of its layers, as that layer uses them: its
    own order of heads, and its `mix` of the values."""
    config = stored.config
    by_name = {leaf.name: leaf for leaf in stored.leaves}
    array = stored.read(by_name[leaf.name], dtype, sharding)
    if not (leaf.is_delta and leaf.param.axes[0] in "JP"):
        return array
    # Those of prompt attention layers, which have no group, come first; taps have none of them.
    alone = config.prompt_attention_layers
    first, left_out = (0, alone) if leaf.param.axes[0] == "P" else (alone, 0)
    repeated = jnp.repeat(array[first:], config.key_value_group_size, axis=0)
    array = jnp.concatenate([array[:first], repeated])
    if config.shared_kv_heads is None:
        return array
    heads = jnp.asarray(config.shared_kv_heads)[left_out:]
    array = jax.vmap(lambda layer, order: layer[order])(array, heads)
    if leaf.name not in ("swiftkv.v", "swiftkv.v_bias"):
        return array
    mix = stored.read(by_name["swiftkv.mix"], np.dtype(np.float32), sharding)[left_out:]
    spec = "UKHD,UKGH->UKGD" if array.ndim == 4 else "UKH,UKGH->UKG"
    exact = jax.lax.Precision.HIGHEST
    return jnp.einsum(spec, array.astype(jnp.float32), mix, precision=exact).astype(dtype)


def _with_expanded_groups(stored: Source) -> Source:
    """The same model without groups: every upper layer with keys and values of its own. Its
    queries fit those, and not the teacher's keys: it is for `generated_kv` boundary only. Where
    the model attends to two caches (`Config.has_two_caches`), its queries stay scaled for that.

    Raises `UsageError` if it has mixes and is quantised.
    """
    if stored.config.shared_kv_heads is not None and stored.quantization:
        raise UsageError(
            f"layers that mix shared values cannot be written apart in {stored.quantization}: "
            f"load them with `quantization`='none'"
        )
    config = stored.config
    if config.has_two_caches:
        logger.warning(
            "written without groups the model is for generated_kv=boundary: its queries fit the "
            "shared keys only, and stay scaled for own; better write the model as it was before "
            "it was scaled"
        )
        config = dataclasses.replace(config, generated_kv="boundary", exact_tail=0)
    config = config.cut(
        config.num_key_value_layers,
        prompt_attention_layers=config.prompt_attention_layers,
        prompt_mlp_neurons=config.prompt_mlp_neurons,
        boundary_taps=config.boundary_taps,
    )
    stored_names = {leaf.name for leaf in stored.leaves}
    present = leaves(config, quantization=stored.quantization)
    return dataclasses.replace(
        stored,
        config=config,
        leaves=tuple(leaf for leaf in present if leaf.name in stored_names),
        reader=functools.partial(_read_of_layer, stored),
    )
