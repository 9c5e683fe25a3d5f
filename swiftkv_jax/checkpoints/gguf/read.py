"""Read a GGUF file as if it were a Hugging Face directory: `config` makes its config.json,
`tensors` its tensors, and `tokenizer` its tokenizer's files."""

from __future__ import annotations

import collections
import functools
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...model.config import Config
from ...model.model import AuxiliaryFiles
from ..hf_config import config_from_hf
from ..hf_read import source_of
from ..source import Source
from ..tensor_map import leaves
from .config import architecture_of, hf_fields
from .file import GgufFile, is_model_name, one_of, read_gguf, shards
from .tensors import read_tensors
from .tokenizer import end_tokens, tokenizer_files


def open_gguf(path: Path, config: Config | None = None) -> Source:
    """Check a file's metadata, and its tensors' names, shapes and types; read no weights yet.
    `config` as in `checkpoints.load`."""
    if path.is_dir():
        path = one_of(gguf_files(path), path)
    stamps = tuple(
        (part.stat().st_mtime_ns, part.stat().st_size) for part in shards(path) if part.is_file()
    )
    file, fields, auxiliary_files, eos_token_ids = _read(path, stamps)
    try:
        file_config = config_from_hf(fields)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    _, architecture = architecture_of(file)
    found = read_tensors(path, file, architecture, file_config, leaves(file_config))
    return source_of(path, file_config, auxiliary_files, eos_token_ids, found, config=config)


@functools.lru_cache(maxsize=1)
def _read(
    path: Path, stamps: tuple[tuple[int, int], ...]
) -> tuple[GgufFile, dict[str, Any], AuxiliaryFiles, tuple[int, ...]]:
    """Read all that stands before the weights, and keep it for the next time: a command opens its
    model several times, and building a tokenizer takes seconds."""
    file = read_gguf(path)
    try:
        fields = hf_fields(file)
        eos_token_ids = end_tokens(file.metadata)
        contents = tokenizer_files(file.metadata, fields["max_position_embeddings"], eos_token_ids)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return file, fields, AuxiliaryFiles(contents, fields), eos_token_ids


def stored_types(path: Path) -> str:
    """How the tensors of a GGUF file are stored, the commonest type first: `Q4_K x 120, F32 x
    61`."""
    counts = collections.Counter(tensor.type_name for tensor in read_gguf(path).tensors.values())
    return ", ".join(f"{name} x {count}" for name, count in counts.most_common())


def gguf_files(folder: Path) -> list[Path]:
    """The GGUF files of a folder that may hold a model."""
    return [file for file in sorted(folder.glob("*.gguf")) if is_model_name(file.name)]
