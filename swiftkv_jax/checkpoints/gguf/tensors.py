"""The tensors of a GGUF file under the names of Hugging Face checkpoints, with the changes that
llama.cpp's converter makes to them reversed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ...errors import CheckpointError
from ...model.config import Config
from ..families.gguf import Architecture
from ..interleaved import Interleaved
from ..tensor_map import MappedLeaf, check_no_problems, differences
from .config import ROPE_TENSORS
from .file import GgufFile, GgufTensor, StoredBlocks

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


def read_tensors(
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
