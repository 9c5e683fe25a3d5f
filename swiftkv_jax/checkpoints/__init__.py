"""Checkpoints, in and out: Hugging Face directories (`hf_read`, `hf_write`), GGUF files
(`gguf`), our own (`orbax_io`), training runs (`training_run`, `states`), and adapters (`peft`,
`merge`).

Reading and writing go leaf by leaf (`source`), names are strict (`tensor_map`, from the table in
`params`), every weight has a digest (`digest`), and a directory appears complete or not at all
(`process.files`).
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, Literal

from jax.sharding import Mesh

from ..errors import CheckpointError
from ..model.config import Config
from ..model.model import AuxiliaryFiles, Model
from . import foreign, source
from .auxiliary import end_tokens, files_of, load_tokenizer, read_auxiliary_files
from .gguf.file import is_gguf
from .gguf.read import gguf_files, open_gguf
from .hf_read import open_hf
from .hf_write import Format, write_hf
from .merge import with_adapter
from .orbax_io import MANIFEST, open_orbax, write_orbax
from .source import Quantization, Source

Kind = Literal["Orbax", "Hugging Face", "GGUF"]


def load(
    path: str | os.PathLike[str],
    *,
    dtype: Any = None,
    mesh: Mesh | None = None,
    config: Config | None = None,
    quantization: Quantization | None = None,
    adapter: str | os.PathLike[str] | None = None,
) -> Model:
    """Load a checkpoint of any kind. `config` as in `open_any`, `adapter` is the folder of one to
    merge (`merge.with_adapter`), the others as in `source.load`. Raises `CheckpointError` for
    anything missing, damaged or unsupported."""
    opened = open_any(path, config)
    if adapter is not None:
        opened = with_adapter(opened, Path(adapter))
    assert opened.path is not None
    tokenizer = load_tokenizer(opened.path, opened.auxiliary_files)
    ends = end_tokens(opened.eos_token_ids, tokenizer, opened.config.vocab_size)
    opened = dataclasses.replace(opened, eos_token_ids=ends)
    return source.load(
        opened, dtype=dtype, mesh=mesh, tokenizer=tokenizer, quantization=quantization
    )


def open_any(path: str | os.PathLike[str], config: Config | None = None) -> Source:
    """Open a checkpoint of any kind for reading leaf by leaf. `config` asks for another SwiftKV cut
    than the file's, so that a plain Llama goes straight into two stacks; a delta in the file does
    not fit it and is not read. Raises `CheckpointError`."""
    readers = {"Orbax": open_orbax, "Hugging Face": open_hf, "GGUF": open_gguf}
    path = Path(path)
    return readers[kind_of(path)](path, config)


def save(model: Model, path: str | os.PathLike[str]) -> None:
    """Write a model with Orbax (`orbax_io.write_orbax`). Its leaves may be gradients."""
    write_orbax(_source_of(model), path)


def save_hf(model: Model, path: str | os.PathLike[str], *, format: Format = "full") -> None:
    """Write a model as a Hugging Face directory (`hf_write.write_hf`)."""
    write_hf(_source_of(model), path, format=format)


def _source_of(model: Model) -> Source:
    """A model in memory, with the files that are written beside its weights."""
    return dataclasses.replace(source.from_model(model), auxiliary_files=files_of(model))


def kind_of(path: Path) -> Kind:
    """Return the kind of checkpoint at a path: a directory of ours or of Hugging Face, a GGUF file,
    or a folder whose only weights are one. Raises `CheckpointError` if it is none of them."""
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
    """True if this is a GGUF file, or a folder whose only weights are in one."""
    if path.is_dir():
        return bool(gguf_files(path)) and not any(path.glob("*.safetensors"))
    return path.is_file() and is_gguf(path)
