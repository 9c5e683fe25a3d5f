"""Checkpoint directories of this package, written and read leaf by leaf with Orbax.

    config.json, tokenizer files   as in a Hugging Face directory
    weights/<leaf>/                one Orbax checkpoint per leaf of the model: `lower_qkv.q`
    manifest.json                  shape, dtype and digest of each leaf

One checkpoint per leaf bounds memory by the largest leaf in both directions. Orbax keeps no
checksum of array payloads, so the manifest does.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding

from ..errors import CheckpointError
from ..model.config import Config
from ..model.cut import has_same_delta
from ..model.quantization import FORMATS, SCALE, VALUES, Format, Scheme
from ..process.files import check_free, new_directory, write_json
from ..process.json_files import read_json
from . import source
from .auxiliary import read_auxiliary_files, write_auxiliary_files
from .digest import digest
from .source import Source
from .states import quiet_orbax, try_orbax
from .tensor_map import MappedLeaf, check_no_problems, differences, leaves

MANIFEST = "manifest.json"
WEIGHTS = "weights"
VERSION = 1
# Bounds what Orbax and the file system hold besides the leaf itself.
_CHUNK_BYTES = 16 * 2**20
# How Orbax's storage reports an error of the operating system, among other things.
_OS_ERROR = re.compile(r"\[os_error_code='(\d+)'\]")


# Write ------------------------------------------------------------------------


def write_orbax(
    opened: Source,
    path: str | os.PathLike[str],
    *,
    dtype: Any = None,
    mesh: Mesh | None = None,
    progress: Callable[[MappedLeaf], None] = lambda leaf: None,
) -> None:
    """Write a source, leaf by leaf, read onto `mesh`; `progress` is called after each. `dtype` None
    keeps each leaf's own. With several processes, all of them call this."""
    check_free(path)
    wanted = source.parse_dtype(dtype)
    where = opened.shardings(mesh)
    # Around the folder too: after an error Orbax's threads still write while it is removed.
    with quiet_orbax(), new_directory(path) as partial:
        manifest = {}
        for leaf in opened.leaves:
            array = opened.read(leaf, wanted, where[leaf.name])
            manifest[leaf.name] = {
                "shape": list(array.shape),
                "dtype": array.dtype.name,
                "digest": f"{digest(array):08x}",
            }
            if leaf.size:  # Orbax refuses arrays without elements
                _save_leaf(partial / WEIGHTS / leaf.name, array)
            del array
            _collect(leaf)
            progress(leaf)
        if jax.process_index() == 0:
            dtype_name = (opened.dtypes["embed"] if wanted is None else wanted).name
            write_auxiliary_files(
                partial, opened.config, opened.auxiliary_files, dtype_name, opened.quantization
            )
            document = {"format": "swiftkv-jax", "version": VERSION, "leaves": manifest}
            write_json(partial / MANIFEST, document, canonical=True)


def _save_leaf(path: Path, array: jax.Array) -> None:
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.array.saving.use_compression = False  # weights hardly compress
    context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    context.memory.deepcopy_host_arrays = False  # the save has ended before the array can change
    try:
        with context:
            ocp.save(str(path), {"leaf": array})
    except Exception as error:
        if code := _OS_ERROR.search(str(error)):
            raise OSError(int(code[1]), os.strerror(int(code[1]))) from None
        raise


# Read -------------------------------------------------------------------------


def _read_leaf(
    path: Path,
    manifest: Mapping[str, Mapping[str, Any]],
    leaf: MappedLeaf,
    dtype: np.dtype,
    sharding: Sharding,
) -> jax.Array:
    """One leaf of the directory `path`, whose digest is checked in its stored dtype, before any
    cast."""
    from orbax.checkpoint import v1 as ocp

    entry = manifest[leaf.name]
    stored = jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(entry["dtype"]), sharding=sharding)
    if leaf.size == 0:
        return jnp.zeros(leaf.shape, dtype, device=sharding)
    array, problem = try_orbax(
        lambda: ocp.load(str(path / WEIGHTS / leaf.name), {"leaf": stored})["leaf"]
    )
    if array is None:
        raise CheckpointError(
            f"{path}: {leaf.name} cannot be read from {WEIGHTS}/{leaf.name} ({problem})"
        )
    _collect(leaf)
    if f"{digest(array):08x}" != entry["digest"]:
        raise CheckpointError(
            f"{path}: {leaf.name} is damaged: its digest is not the one in {MANIFEST}; copy "
            f"{WEIGHTS}/{leaf.name} again"
        )
    return array.astype(dtype)


def open_orbax(path: Path, config: Config | None = None) -> Source:
    """Check config, manifest and shapes; read no weights yet. `config` as in `checkpoints.load`."""
    stored_config, auxiliary_files, eos_token_ids = read_auxiliary_files(path)
    manifest = _read_manifest(path)
    format = _stored_format(manifest)
    present = _match(path, stored_config, manifest, format)
    opened = Source(
        config=stored_config,
        leaves=present,
        dtypes={leaf.name: np.dtype(jnp.dtype(manifest[leaf.name]["dtype"])) for leaf in present},
        reader=functools.partial(_read_leaf, path.absolute(), manifest),
        auxiliary_files=auxiliary_files,
        eos_token_ids=eos_token_ids,
        path=path,
        digests=True,
        quantization=format,
    )
    if config is None or has_same_delta(config, stored_config):
        return dataclasses.replace(opened, config=config or stored_config)
    source.check_overrides(path, stored_config, config)
    return source.with_split(opened, config)


def _read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    file = path / MANIFEST
    manifest = read_json(file)
    if manifest.get("format") != "swiftkv-jax" or manifest.get("version") != VERSION:
        found = f"format {manifest.get('format')!r} version {manifest.get('version')!r}"
        raise CheckpointError(
            f"{file}: {found} is not supported; supported: 'swiftkv-jax' version {VERSION}"
        )
    entries = manifest.get("leaves")
    kinds = {"shape": list, "dtype": str, "digest": str}
    if not isinstance(entries, dict) or not all(
        isinstance(entry, dict) and isinstance(entry.get(name), kind)
        for entry in entries.values()
        for name, kind in kinds.items()
    ):
        raise CheckpointError(f"{file}: malformed: every leaf needs a shape, a dtype and a digest")
    return entries


def _stored_format(manifest: dict[str, dict[str, Any]]) -> Format | None:
    """The format of the quantised matrices, read from one that every model has; None if they are
    not quantised."""
    dtype = manifest.get(f"lower.o.{VALUES}", {}).get("dtype")
    return next((format for format in FORMATS if Scheme(format).dtype.name == dtype), None)


def _match(
    path: Path, config: Config, manifest: dict[str, dict[str, Any]], quantization: Format | None
) -> tuple[MappedLeaf, ...]:
    """The leaves present, after checking names, shapes and dtypes against the config. One error
    names every kind of difference."""
    has_delta = any(name.startswith("swiftkv.") for name in manifest)
    has_teacher = any(name.startswith("upper_qkv.") for name in manifest)
    expected = {
        leaf.name: leaf
        for leaf in leaves(
            config, teacher_qkv=has_teacher, delta=has_delta, quantization=quantization
        )
    }
    dtypes = {
        None: ("float32", "bfloat16", "float16"),
        SCALE: ("float32",),
        VALUES: (Scheme(quantization or "fp8").dtype.name,),
    }
    wanted = {name: (leaf.shape, dtypes[leaf.part]) for name, leaf in expected.items()}
    found = {name: (tuple(entry["shape"]), entry["dtype"]) for name, entry in manifest.items()}
    stored = {name for name, leaf in expected.items() if leaf.size and name in manifest}
    problems = differences(wanted, found) | {
        "no weights for": [name for name in stored if not (path / WEIGHTS / name).is_dir()]
    }
    check_no_problems(path, problems)
    return tuple(expected.values())


def _collect(leaf: MappedLeaf) -> None:
    """Orbax leaves each array in reference cycles: let the large ones go before the next leaf needs
    room."""
    if leaf.size > 2**20:
        gc.collect()
