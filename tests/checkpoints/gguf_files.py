"""GGUF files as llama.cpp's converter writes them, made by the package gguf from Hugging Face
tensors. Shares no code with the package's own reader."""

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quants

__all__ = ["GGML_QUANT_SIZES", "GGUFWriter"]

# Names within a layer; those of a family go over them.
WITHIN = {
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
OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
NONE: Mapping[str, Any] = MappingProxyType({})
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """As `LlamaModel.permute` of the converter."""
    halves = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def converted(
    hf: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    names: Mapping[str, str] = NONE,
    permute: bool = False,
    norm_offset: float = 0.0,
) -> dict[str, np.ndarray]:
    """The file's tensors."""
    found, stacks = {}, {}
    for name, values in tensors.items():
        if "norm" in name:
            values = values + np.float32(norm_offset)
        if name in OUTSIDE:
            found[OUTSIDE[name]] = values
            continue
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(\w+)", name)
        assert layer is not None
        number, within, kind = layer.groups()
        for end, count in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if permute and within.endswith(end):
                values = permuted(values, hf[count])
        if expert := re.fullmatch(r"mlp\.experts\.(\d+)\.(\w+)_proj", within):
            stack = stacks.setdefault(f"blk.{number}.ffn_{expert[2]}_exps.{kind}", {})
            stack[int(expert[1])] = values
        else:
            found[f"blk.{number}.{names.get(within) or WITHIN[within]}.{kind}"] = values
    return found | {
        name: np.stack([stack[i] for i in range(len(stack))]) for name, stack in stacks.items()
    }


def common(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that the converter writes for every architecture, without its name."""
    heads = hf["num_attention_heads"]
    keys = {
        "block_count": hf["num_hidden_layers"],
        "context_length": hf["max_position_embeddings"],
        "embedding_length": hf["hidden_size"],
        "feed_forward_length": hf["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": hf["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(hf["rms_norm_eps"]),
        "rope.freq_base": float(hf["rope_theta"]),
    }
    if "head_dim" in hf:
        keys |= dict.fromkeys(("attention.key_length", "attention.value_length"), hf["head_dim"])
    return keys


def write(
    path: Path,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    types: Mapping[str, GGMLQuantizationType] = NONE,
    **options: Any,
) -> Path:
    """A file with `keys` of the architecture, or whole ones where they begin with another word.
    `types` names the types of tensors that are not in float32."""
    writer = GGUFWriter(path, architecture, **options)
    for name, value in keys.items():
        whole = re.match(r"(general|tokenizer|split|quantize)\.", name)
        add(writer, name if whole else f"{architecture}.{name}", value)
    for name, values in tensors.items():
        type_ = types.get(name)
        if type_ is None:
            writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
        else:
            writer.add_tensor(name, quants.quantize(values, type_), raw_dtype=type_)
    finish(writer)
    return path


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))


# Tokenizers -------------------------------------------------------------------


def byte_level() -> list[str]:
    """The characters that stand for the 256 bytes, in the order of GPT-2's vocabulary."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) for byte in shown] + [chr(256 + i) for i in range(len(hidden))]


def byte_pairs(pre: str, merges: list[str], special: Mapping[str, int], **keys) -> dict[str, Any]:
    """Keys of a tokenizer with the bytes, then the results of the merges, then `special`: text ->
    its type."""
    tokens = byte_level() + [merge.replace(" ", "") for merge in merges]
    types = [NORMAL] * len(tokens) + list(special.values())
    found = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens + list(special),
        "token_type": types,
        "merges": merges,
    }
    found |= keys
    return {f"tokenizer.ggml.{name}": value for name, value in found.items()}
