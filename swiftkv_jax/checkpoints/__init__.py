"""Checkpoints, in and out: Hugging Face directories (`hf_read`, `hf_write`), our own (`orbax_io`),
training runs (`training_run`, `states`).

Reading and writing go leaf by leaf (`source`), names are strict (`tensor_map`, from the table in
`params`), every weight has a digest (`digest`), and a directory appears complete or not at all
(`io.files`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from ..config import Config
from ..errors import CheckpointError
from ..model import Model
from . import foreign
from .hf_read import load_hf, open_hf, save_hf
from .orbax_io import MANIFEST, load_orbax, open_orbax, save
from .source import Quantization, Source

__all__ = ["is_orbax", "load", "open_any", "save", "save_hf"]


def load(
    path: str | os.PathLike[str],
    *,
    dtype: Any = None,
    mesh: Mesh | None = None,
    config: Config | None = None,
    quantization: Quantization | None = None,
) -> Model:
    """Load a directory of either kind. Arguments as in `hf_read.load_hf`. Raises
    `CheckpointError`."""
    return (load_orbax if is_orbax(path) else load_hf)(
        path, dtype=dtype, mesh=mesh, config=config, quantization=quantization
    )


def open_any(path: str | os.PathLike[str], config: Config | None = None) -> Source:
    """Open a directory of either kind for reading leaf by leaf. `config` as in
    `hf_read.load_hf`. Raises `CheckpointError`."""
    return (open_orbax if is_orbax(path) else open_hf)(path, config)


def is_orbax(path: str | os.PathLike[str]) -> bool:
    """Whether a directory is ours (True) or Hugging Face's (False). Raises `CheckpointError` if it
    is neither."""
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: {foreign.missing(path)}")
    if not path.is_dir():
        raise CheckpointError(f"{path}: {foreign.not_a_directory(path)}")
    if (path / MANIFEST).is_file():
        return True
    if (path / "config.json").is_file():
        return False
    looked_for = f"{MANIFEST} (written by save) and config.json (Hugging Face)"
    reason = foreign.without_weights(path) or f"not a checkpoint: looked for {looked_for}"
    raise CheckpointError(f"{path}: {reason}")
