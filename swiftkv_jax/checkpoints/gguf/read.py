"""Read a GGUF file as if it were a Hugging Face directory: `config` makes its config.json, and
`tokenizer` its tokenizer's files. Its tensors have the names of Hugging Face checkpoints here, and
the changes that llama.cpp's converter makes to them are reversed."""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, ConfigError
from ...model.config import Config
from ...model.model import AuxiliaryFiles
from ..families.gguf import Architecture
from ..hf_config import config_from_hf
from ..hf_read import source_of
from ..interleaved import Interleaved
from ..source import Source
from ..tensor_map import MappedLeaf, check_no_problems, differences, leaves
from .config import ROPE_TENSORS, architecture_of, hf_fields
from .file import GgufFile, GgufTensor, StoredBlocks, is_model_name, one_of, read_gguf, shards
from .tokenizer import end_tokens, tokenizer_files


def open_gguf(path: Path, config: Config | None = None) -> Source:
    """Check a file's metadata, and its tensors' names, shapes and types; read no weights yet.
    `config` as in `checkpoints.load`."""
    if path.is_dir():
        path = one_of(gguf_files(path), path)
    file, fields, auxiliary_files, eos_token_ids = _read(path, _stamps(path))
    try:
        file_config = config_from_hf(fields)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    _, architecture = architecture_of(file)
    found = _read_tensors(path, file, architecture, file_config, leaves(file_config))
    return source_of(path, file_config, auxiliary_files, eos_token_ids, found, config=config)


def _stamps(path: Path) -> tuple[tuple[int, int], ...]:
    """Times and sizes of the parts of a file, which change with them."""
    return tuple(
        (part.stat().st_mtime_ns, part.stat().st_size) for part in shards(path) if part.is_file()
    )


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
    """Count the types in which the tensors of a GGUF file are stored, the commonest first:
    `Q4_K x 120, F32 x 61`."""
    file, *_ = _read(path, _stamps(path))
    counts = collections.Counter(tensor.type_name for tensor in file.tensors.values())
    return ", ".join(f"{name} x {count}" for name, count in counts.most_common())


def has_coded_embedding(path: Path) -> bool:
    """Say whether the embedding of a GGUF file is in blocks (`StoredBlocks.is_coded`)."""
    file, *_ = _read(path, _stamps(path))
    return file.tensors[f"{_OUTSIDE['model.embed_tokens']}.weight"].is_coded


def gguf_files(folder: Path) -> list[Path]:
    """The GGUF files of a folder that may hold a model."""
    return [file for file in sorted(folder.glob("*.gguf")) if is_model_name(file.name)]


# Tensors ----------------------------------------------------------------------

_OUTSIDE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
# Names within a layer, of Llama and of what other families have besides.
_WITHIN = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj")


def _read_tensors(
    path: Path,
    file: GgufFile,
    architecture: Architecture,
    config: Config,
    expected: Iterable[MappedLeaf],
) -> list[GgufTensor]:
    """The tensors that `expected` names. Raises `CheckpointError` unless the file has exactly
    those, in their shapes; one error names every kind of difference by the file's names."""
    theirs = {
        name: (*_name_in_file(name, architecture), leaf)
        for leaf in expected
        for name in leaf.tensors
    }
    wanted = {
        stored: ((config.num_experts,) * (expert is not None) + leaf.stored_shape, ())
        for stored, expert, leaf in theirs.values()
    }
    weights = {name: file.tensors[name] for name in file.tensors if name not in ROPE_TENSORS}
    found = {name: (tensor.shape, tensor.type_name) for name, tensor in weights.items()}
    check_no_problems(path, differences(wanted, found))
    return [
        _tensor(name, file.tensors[stored], expert, architecture, config)
        for name, (stored, expert, _) in theirs.items()
    ]


def _name_in_file(name: str, architecture: Architecture) -> tuple[str, int | None]:
    """The file's name of a Hugging Face tensor, and its place in a stack of experts."""
    if (layer := _LAYER.fullmatch(name)) is None:
        module, _, kind = name.rpartition(".")
        return f"{_OUTSIDE[module]}.{kind}", None
    number, module, kind = layer.groups()
    if (expert := _EXPERT.fullmatch(module)) is not None:
        return f"blk.{number}.ffn_{expert[2]}_exps.{kind}", int(expert[1])
    within = architecture.names.get(module) or _WITHIN.get(module)
    if within is None:
        raise CheckpointError(f"{name}: no name of it in GGUF is known")
    return f"blk.{number}.{within}.{kind}", None


def _tensor(
    name: str, stored: StoredBlocks, expert: int | None, architecture: Architecture, config: Config
) -> GgufTensor:
    turned = architecture.permuted and re.search(r"\.[qk]_proj\.", name)
    return GgufTensor(
        name,
        stored,
        expert,
        interleaved=Interleaved(config.head_dim, config.head_dim) if turned else None,
        added=architecture.norm_offset if "norm" in name else 0.0,
    )
