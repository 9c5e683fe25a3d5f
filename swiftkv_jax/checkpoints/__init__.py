"""Checkpoints, in and out: Hugging Face directories (`hf_read`, `hf_write`), GGUF files
(`gguf`), our own (`orbax_io`), training runs (`training_run`, `states`).

Reading and writing go leaf by leaf (`source`), names are strict (`tensor_map`, from the table in
`params`), every weight has a digest (`digest`), and a directory appears complete or not at all
(`io.files`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from jax.sharding import Mesh

from ..errors import CheckpointError
from ..model.config import Config
from ..model.model import AuxiliaryFiles, Model
from . import foreign
from .auxiliary import read_auxiliary_files
from .gguf.file import is_gguf
from .gguf.read import gguf_files, load_gguf, open_gguf
from .hf_read import load_hf, open_hf, save_hf
from .orbax_io import MANIFEST, load_orbax, open_orbax, save
from .source import Quantization, Source

__all__ = ["Kind", "kind_of", "load", "open_any", "save", "save_hf", "auxiliary_files_of"]

Kind = Literal["Orbax", "Hugging Face", "GGUF"]


def load(
    path: str | os.PathLike[str],
    *,
    dtype: Any = None,
    mesh: Mesh | None = None,
    config: Config | None = None,
    quantization: Quantization | None = None,
) -> Model:
    """Load a checkpoint of any kind. Arguments as in `hf_read.load_hf`. Raises
    `CheckpointError`."""
    readers = {"Orbax": load_orbax, "Hugging Face": load_hf, "GGUF": load_gguf}
    return readers[kind_of(path)](
        path, dtype=dtype, mesh=mesh, config=config, quantization=quantization
    )


def open_any(path: str | os.PathLike[str], config: Config | None = None) -> Source:
    """Open a checkpoint of any kind for reading leaf by leaf. `config` as in `hf_read.load_hf`.
    Raises `CheckpointError`."""
    readers = {"Orbax": open_orbax, "Hugging Face": open_hf, "GGUF": open_gguf}
    return readers[kind_of(path)](path, config)


def kind_of(path: str | os.PathLike[str]) -> Kind:
    """Return the kind of checkpoint at a path: a directory of ours or of Hugging Face, a GGUF file,
    or a folder whose only weights are one. Raises `CheckpointError` if it is none of them."""
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: {foreign.missing(str(path))}")
    if (path / MANIFEST).is_file():
        return "Orbax"
    if _is_gguf(path):
        return "GGUF"
    if not path.is_dir():
        raise CheckpointError(f"{path}: {foreign.not_a_directory(path)}")
    if (path / "config.json").is_file():
        return "Hugging Face"
    looked_for = f"{MANIFEST} (written by save), config.json (Hugging Face) and a GGUF file"
    reason = foreign.without_weights(path) or f"not a checkpoint: looked for {looked_for}"
    raise CheckpointError(f"{path}: {reason}")


def auxiliary_files_of(path: Path) -> tuple[Config, AuxiliaryFiles, tuple[int, ...]]:
    """The config, the files beside the weights, and the end tokens of a checkpoint, whose weights
    may be absent unless it is a GGUF file. Raises `CheckpointError`."""
    if _is_gguf(path):
        opened = open_gguf(path)
        return opened.config, opened.auxiliary_files, opened.eos_token_ids
    return read_auxiliary_files(path)


def _is_gguf(path: Path) -> bool:
    """Whether this is a GGUF file, or a folder whose only weights are in one."""
    if path.is_dir():
        return bool(gguf_files(path)) and not any(path.glob("*.safetensors"))
    return path.is_file() and is_gguf(path)
