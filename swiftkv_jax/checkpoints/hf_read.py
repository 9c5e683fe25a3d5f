"""Read Hugging Face checkpoints: a Llama, or SwiftKV as its authors publish it. `hf_export` is the
other direction.

Names are strict (`names`): a tensor that is missing, unexpected, repeated, misshapen or of a wrong
dtype is an error, and one error lists all of them. Each device's slice of each leaf is read
straight from the file, one leaf at a time.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding

from ..config import Config
from ..errors import CheckpointError
from ..model import Model
from ..params import split_layers
from ..quantization import SCALE, VALUES, Format, Scheme, refuse_quantized
from . import source
from .auxiliary import load_tokenizer, read_json, read_side_files
from .hf_write import BASE_DIGEST, DELTA, FORMAT, INDEX, SINGLE_FILE, base_model_digest, save_hf
from .safetensors_io import DTYPES, Stored, read_header, read_into, same_values, verify
from .source import Quantization, Source
from .tensor_map import Leaf, by_name, leaves, to_trees

__all__ = ["delta_config", "load_delta", "load_hf", "open_delta", "open_hf", "save_hf"]

# Buffers that old exporters wrote and that nothing reads: the frequencies follow from the config.
_INERT = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
_FP8 = "F8_E4M3"
_WIDE = tuple(code for code in DTYPES if code != _FP8)
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl")


def load_hf(
    path: str | os.PathLike[str],
    *,
    dtype: Any = None,
    mesh: Mesh | None = None,
    config: Config | None = None,
    quantization: Quantization | None = None,
) -> Model:
    """Load a Hugging Face directory.

    `dtype` None is `bundle.default_dtype()`; `mesh` None is the first device. `config` asks for
    another SwiftKV cut than the file's, so that a plain Llama goes straight into two stacks; a
    delta in the file does not fit it and is not read. `quantization` as in `source.load`. Raises
    `CheckpointError` for anything missing, damaged or unsupported.
    """
    opened = open_hf(path, config)
    tokenizer = load_tokenizer(Path(path), opened.auxiliary_files)
    return source.load(
        opened, dtype=dtype, mesh=mesh, tokenizer=tokenizer, quantization=quantization
    )


def load_delta(path: str | os.PathLike[str], base: Model) -> Model:
    """Put a delta that `save_hf(format="delta")` wrote on the plain Llama it was trained for, in
    the base's dtype.

    Raises `CheckpointError` if it was trained for other weights, `UsageError` if `base` is
    quantised.
    """
    refuse_quantized(base.llama, "a delta")
    config = delta_config(path)
    source.check_overrides(
        Path(path),
        config,
        base.config.cut(config.num_key_value_layers, config.key_value_group_size),
    )
    cut = dataclasses.replace(
        base, config=config, llama=split_layers(config, base.llama), swiftkv=None
    )
    opened, where = open_delta(path, source.from_model(cut)), source.placements(config, None)
    delta = {
        leaf.name: opened.read(leaf, np.dtype(base.dtype), where[leaf.name])
        for leaf in opened.leaves
        if leaf.is_delta
    }
    return dataclasses.replace(
        cut, swiftkv=to_trees(config, delta | dict.fromkeys(by_name(cut.llama)))[1]
    )


def delta_config(path: str | os.PathLike[str]) -> Config:
    """The config that `open_delta` wants its base opened with."""
    return read_side_files(Path(path))[0]


def open_delta(path: str | os.PathLike[str], base: Source) -> Source:
    """A delta that `save_hf(format="delta")` wrote, on its base, which has the same cut. Reads the
    base, to compare its digest.

    Raises `CheckpointError` if the delta was trained for other weights.
    """
    path = Path(path)
    stored, metadata = _read_weights(path)
    if metadata.get(FORMAT) != DELTA:
        raise CheckpointError(f"{path}: holds a whole model, not a delta; load it by itself")
    found, actual = metadata.get(BASE_DIGEST), base_model_digest(base)
    if found != actual:
        raise CheckpointError(
            f"{path}: was trained for another base model (digest {found}, this one has {actual})"
        )
    table = tuple(leaf for leaf in leaves(base.config) if leaf.is_delta)
    tensors = _match(path, table, stored)
    dtypes = {leaf.name: _stored_dtype(leaf, tensors, None) for leaf in table}

    def read(leaf: Leaf, dtype: np.dtype | None, sharding: Sharding) -> jax.Array:
        return _read_leaf(leaf, tensors, dtypes[leaf.name] if dtype is None else dtype, sharding)

    return source.with_delta(base, path, dtypes, read)


def open_hf(path: str | os.PathLike[str], config: Config | None = None) -> Source:
    """Check a Hugging Face directory's config, names, shapes and dtypes; read no weights yet.
    `config` as in `load_hf`."""
    path = Path(path)
    file_config, auxiliary_files, eos_token_ids = read_side_files(path)
    format: Format | None = "fp8" if auxiliary_files.hf_config.get("quantization_config") else None
    stored, metadata = _read_weights(path)
    if metadata.get(FORMAT) == DELTA:
        raise CheckpointError(
            f"{path}: holds only the trained tensors, not its base model; join them with convert "
            f"hf2orbax --base"
        )

    moved = config is not None and config != file_config
    if config is not None:
        source.check_overrides(path, file_config, config)
    names = {tensor.name for tensor in stored}
    teacher_names = {
        name
        for leaf in leaves(file_config, quantization=format)
        if leaf.is_teacher_qkv
        for name in leaf.tensors
    }
    slim = bool(teacher_names) and names.isdisjoint(teacher_names)
    if slim and moved:
        raise CheckpointError(
            f"{path}: the teacher's upper q, k, v are absent, so layers cannot move to another "
            f"SwiftKV cut"
        )
    present = leaves(file_config, teacher_qkv=not slim, quantization=format)
    tensors = _match(path, present, stored)
    _check_tied_head(path, file_config, tensors)

    if config is not None and moved:
        present = leaves(config, delta=False, quantization=format)
    dtypes = {leaf.name: _stored_dtype(leaf, tensors, format) for leaf in present}

    def read(leaf: Leaf, dtype: np.dtype | None, sharding: Sharding) -> jax.Array:
        return _read_leaf(
            leaf, tensors, dtypes[leaf.name] if dtype is None or leaf.part else dtype, sharding
        )

    return Source(
        config=config or file_config,
        leaves=present,
        dtypes=dtypes,
        read=read,
        auxiliary_files=auxiliary_files,
        eos_token_ids=eos_token_ids,
        path=path,
        digests=all(tensor.crc32 is not None for tensor in tensors.values()),
        quantization=format,
    )


# Files ------------------------------------------------------------------------


def _read_weights(path: Path) -> tuple[list[Stored], dict[str, str]]:
    """Every tensor of every weight file, unread and unchecked, and the files' metadata together."""
    stored: list[Stored] = []
    metadata: dict[str, str] = {}
    for file in _weight_files(path):
        tensors, fields = read_header(file)
        stored += tensors
        metadata |= fields
    return stored, metadata


def _weight_files(path: Path) -> list[Path]:
    if (path / INDEX).is_file():
        weight_map = read_json(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path / INDEX}: no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        if unsafe := [
            name
            for name in names
            if name != Path(name).name or "\\" in name or name in ("", ".", "..")
        ]:
            raise CheckpointError(
                f"{path / INDEX}: weight files must lie in the same directory: "
                f"{', '.join(map(repr, unsafe))}"
            )
        if absent := [name for name in names if not (path / name).is_file()]:
            raise CheckpointError(
                f"{path}: missing weight files that {INDEX} lists: {', '.join(absent)}"
            )
        return [path / name for name in names]
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    if pickles := sorted(file.name for pattern in _PICKLES for file in path.glob(pattern)):
        raise CheckpointError(
            f"{path}: {', '.join(pickles)}: pickle files can run code; convert to safetensors"
        )
    raise CheckpointError(f"{path}: no weights: looked for {INDEX} and {SINGLE_FILE}")


# Names ------------------------------------------------------------------------


def _match(path: Path, expected: tuple[Leaf, ...], stored: list[Stored]) -> dict[str, Stored]:
    """Name -> tensor, after checking that the files hold exactly what is expected. One error lists
    every difference."""
    shapes = {name: leaf.tensor_shape for leaf in expected for name in leaf.tensors}
    eight_bits = {name for leaf in expected if leaf.part == VALUES for name in leaf.tensors}
    tied = "lm_head.weight" not in shapes and "model.embed_tokens.weight" in shapes
    places: dict[str, list[Stored]] = {}
    for tensor in stored:
        places.setdefault(tensor.name, []).append(tensor)

    def allowed(name: str) -> bool:
        return name in shapes or bool(_INERT.search(name)) or (tied and name == "lm_head.weight")

    found = {
        name: tensors[0]
        for name, tensors in places.items()
        if name in shapes or (tied and name == "lm_head.weight")
    }
    shaped = [
        (tensor, shapes[name])
        for name, tensor in found.items()
        if name in shapes and tensor.shape != shapes[name]
    ]
    codes = {name: (_FP8,) if name in eight_bits else _WIDE for name in found}
    typed = [
        f"{name} {found[name].code} (supported: {', '.join(codes[name])})"
        for name in found
        if found[name].code not in codes[name]
    ]
    problems = {
        "missing": [name for name in shapes if name not in places],
        "unexpected": [name for name in places if not allowed(name)],
        "repeated": [
            f"{name} (in {', '.join(t.file.name for t in ts)})"
            for name, ts in places.items()
            if len(ts) > 1
        ],
        "wrong shape": [
            f"{tensor.name} {list(tensor.shape)}, expected {list(shape)}"
            for tensor, shape in shaped
        ],
        "dtype not supported yet": typed,
    }
    if any(problems.values()):
        raise CheckpointError(
            f"{path}: "
            + "; ".join(f"{kind}: {', '.join(which)}" for kind, which in problems.items() if which)
        )
    return found


def _check_tied_head(path: Path, config: Config, tensors: Mapping[str, Stored]) -> None:
    head = tensors.get("lm_head.weight")
    if (
        config.tie_word_embeddings
        and head is not None
        and not same_values(head, tensors["model.embed_tokens.weight"])
    ):
        raise CheckpointError(
            f"{path}: lm_head.weight differs from model.embed_tokens.weight, but config.json says "
            f"tie_word_embeddings; "
            "set it to false if the head is to be used"
        )


def _stored_dtype(
    leaf: Leaf, tensors: Mapping[str, Stored], quantization: Format | None
) -> np.dtype:
    """The narrowest dtype that holds each of a leaf's tensors exactly. An empty stack has the
    embedding's.

    Scales may be stored in fewer bits, but products want them in float32.
    """
    if quantization is not None and leaf.part is not None:
        return np.dtype(np.float32) if leaf.part == SCALE else Scheme(quantization).dtype
    codes = {tensors[name].code for name in leaf.tensors or ("model.embed_tokens.weight",)}
    return np.dtype(jnp.result_type(*(DTYPES[code] for code in codes)))


# Weights ----------------------------------------------------------------------


def _read_leaf(
    leaf: Leaf, tensors: Mapping[str, Stored], dtype: np.dtype, sharding: Sharding
) -> jax.Array:
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
            blocks[ranges] = _read_ranges(leaf, tensors, ranges, dtype, verified)
        return blocks[ranges]

    return jax.make_array_from_callback(leaf.shape, sharding, block)


def _read_ranges(
    leaf: Leaf,
    tensors: Mapping[str, Stored],
    ranges: tuple[range, ...],
    dtype: np.dtype,
    verified: set[str],
) -> np.ndarray:
    """The part of a leaf within `ranges`, one tensor after another. Tensors read in part are
    checked as a whole, once."""
    out = _empty(tuple(len(part) for part in ranges), dtype)
    layers, within = (ranges[0], ranges[1:]) if leaf.stacked else (range(1), ranges)
    index = _merge_heads(leaf, within)
    for row, layer in enumerate(layers):
        tensor = tensors[leaf.tensors[layer]]
        partial = any(
            part.stop - part.start != size for part, size in zip(index, tensor.shape, strict=True)
        )
        if partial and tensor.name not in verified:
            verify(tensor)
            verified.add(tensor.name)
        target = out[row] if leaf.stacked else out
        read_into(target.reshape([part.stop - part.start for part in index]), tensor, index)
        if dtype == np.float16 and DTYPES[tensor.code] != dtype and not np.isfinite(target).all():
            raise CheckpointError(
                f"{tensor.file}: {tensor.name} has values beyond float16; load it as bfloat16 or "
                f"float32"
            )
        if leaf.part == SCALE and not (np.isfinite(target) & (target >= 0)).all():
            raise CheckpointError(
                f"{tensor.file}: {tensor.name} has scales that are negative or not finite; copy "
                f"or download it again"
            )
    return out


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array that a CPU device can take over without a copy: that needs an address divisible by
    64."""
    num_bytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(num_bytes + 63, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + num_bytes].view(dtype).reshape(shape)


def _merge_heads(leaf: Leaf, within: tuple[range, ...]) -> tuple[slice, ...]:
    """Ranges of one layer's array as slices of its tensor. Heads are never split: their dimension
    is whole."""
    slices = [slice(part.start, part.stop) for part in within]
    if (axis := leaf.head_axis) is not None:
        head_dim = len(within[axis + 1])
        assert head_dim == leaf.shape[axis + 1 + leaf.stacked], "no sharding splits a head"
        slices[axis : axis + 2] = [
            slice(slices[axis].start * head_dim, slices[axis].stop * head_dim)
        ]
    return (*slices, slice(0, 1)) if leaf.part == SCALE else tuple(slices)
