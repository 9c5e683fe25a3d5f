"""The architectures of GGUF files: for each, the fields of the `config.json` that its model would
have, and how its tensors differ from those of Hugging Face.

Architectures, keys and names are those of llama.cpp's converter (`conversion/` in
https://github.com/ggml-org/llama.cpp). Constants that no key states are those that it computes with
(`src/models/`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..errors import ConfigError
from .gguf_config import Metadata, common_fields
from .gguf_file import GgufFile
from .hf_layer_kinds import FULL, SLIDING
from .hf_values import shown


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A `general.architecture` of GGUF."""

    read: Callable[[Metadata], dict[str, Any]]
    """Makes the fields of a `config.json` beyond the common ones, and `model_type`."""
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Name within a layer of a Hugging Face tensor -> that in the file, where it is not Llama's."""
    permuted: bool = False
    """Whether rows of queries and keys were reordered for a rotation of neighbours."""
    norm_offset: float = 0.0
    """Number that was added to the scales of norms."""


def architecture_of(file: GgufFile) -> tuple[str, Architecture]:
    """The architecture, and its name. Raises `ConfigError` unless it is one of `ARCHITECTURES`."""
    name = file.metadata.get("general.architecture")
    kind = file.metadata.get("general.type")
    if kind not in (None, "model"):
        raise ConfigError(
            f"general.type={shown(kind)}: not a model; give the GGUF file of the model itself"
        )
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"general.architecture={shown(name)} is not supported; supported: "
            f"{', '.join(ARCHITECTURES)}"
        )
    return name, ARCHITECTURES[name]


def hf_fields(file: GgufFile) -> dict[str, Any]:
    """The fields of a `config.json`, as transformers 4 spells them. Raises `ConfigError` for
    metadata that would change the model and is not implemented."""
    name, architecture = architecture_of(file)
    found = Metadata(file, name)
    fields = common_fields(found) | architecture.read(found)
    found.check()
    return {key: value for key, value in fields.items() if value is not None}


def _biases(found: Metadata) -> dict[str, Any]:
    return {"hidden_act": "silu", "attention_bias": found.has("blk.0.attn_q.bias")}


def _llama(found: Metadata) -> dict[str, Any]:
    window = found.get("attention.sliding_window") or None
    model_type = "llama" if window is None else "mistral"
    return _biases(found) | {"model_type": model_type, "sliding_window": window}


def _qwen2(found: Metadata) -> dict[str, Any]:
    return {"model_type": "qwen2", "hidden_act": "silu", "use_sliding_window": False}


def _qwen3(found: Metadata) -> dict[str, Any]:
    return _biases(found) | {"model_type": "qwen3", "use_sliding_window": False}


def _qwen3_moe(found: Metadata) -> dict[str, Any]:
    return _biases(found) | {
        "model_type": "qwen3_moe",
        "num_experts": found.integer("expert_count"),
        "num_experts_per_tok": found.integer("expert_used_count"),
        "moe_intermediate_size": found.integer("expert_feed_forward_length"),
        # llama.cpp always does, where no key says otherwise.
        "norm_topk_prob": bool(found.get("expert_weights_norm", True)),
    }


def _seed_oss(found: Metadata) -> dict[str, Any]:
    output = found.has("blk.0.attn_output.bias")
    return _biases(found) | {"model_type": "seed_oss", "attention_out_bias": output}


def _granite(found: Metadata) -> dict[str, Any]:
    if not found.get("rope.scaling.finetuned", True):
        raise ConfigError(
            f"{found.prefix}rope.scaling.finetuned=False: a Granite without rotary embeddings is "
            f"not supported in GGUF; get its safetensors"
        )
    return _biases(found) | {
        "model_type": "granite",
        "embedding_multiplier": found.get("embedding_scale", 1.0),
        "residual_multiplier": found.get("residual_scale", 1.0),
        "attention_multiplier": found.get("attention.scale"),
        "logits_scaling": found.get("logit_scale", 1.0),
    }


def _smollm3(found: Metadata) -> dict[str, Any]:
    return _biases(found) | {"model_type": "smollm3", "no_rope_layer_interval": 4}


def _phi3(found: Metadata) -> dict[str, Any]:
    window = found.get("attention.sliding_window") or None
    longest = found.integer("context_length")
    original = found.integer("rope.scaling.original_context_length", longest)
    return {
        "model_type": "phi3",
        "hidden_act": "silu",
        "sliding_window": window,
        "original_max_position_embeddings": original,
    }


def _glm4(found: Metadata) -> dict[str, Any]:
    if found.get("rope.dimension_sections") is not None:
        raise ConfigError(f"{found.prefix}rope.dimension_sections: not supported")
    return _biases(found) | {"model_type": "glm4"}


def _ernie(found: Metadata) -> dict[str, Any]:
    return {"model_type": "ernie4_5", "hidden_act": "silu", "use_bias": False}


def _olmo2(found: Metadata) -> dict[str, Any]:
    """OLMo 2, and OLMo 3, which has windows."""
    window = found.get("attention.sliding_window") or None
    if window is None:
        return _biases(found) | {"model_type": "olmo2"}
    types = _layer_types(found, lambda layer: (layer + 1) % 4 != 0)
    return _biases(found) | {
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": types,
    }


def _gemma(found: Metadata, largest: int) -> dict[str, Any]:
    """Fields of Gemma 2 and 3. The largest model, which has `largest` layers, scales its scores by
    the hidden size over the number of heads; all others by the width of a head."""
    heads = found.integer("attention.head_count")
    width = found.integer("embedding_length")
    head_dim = found.integer("attention.key_length", width // heads)
    layers = found.integer("block_count")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width // heads if layers == largest else head_dim,
        "attention_bias": False,
    }


def _gemma2(found: Metadata) -> dict[str, Any]:
    return _gemma(found, 46) | {
        "model_type": "gemma2",
        "sliding_window": found.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": found.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": found.get("final_logit_softcapping", 30.0),
        "layer_types": _layer_types(found, lambda layer: layer % 2 == 0),
    }


def _gemma3(found: Metadata) -> dict[str, Any]:
    return _gemma(found, 62) | {
        "model_type": "gemma3_text",
        "sliding_window": found.integer("attention.sliding_window"),
        "rope_theta": found.get("rope.freq_base", 1e6),
        "rope_local_base_freq": found.get("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": found.get("final_logit_softcapping"),
        "layer_types": _layer_types(found, lambda layer: (layer + 1) % 6 != 0),
    }


def _layer_types(found: Metadata, sliding: Callable[[int], bool]) -> list[str]:
    """The type of each layer, as the file's list of windowed ones says, its period, or else as
    `sliding`."""
    layers = range(found.integer("block_count"))
    pattern = found.get("attention.sliding_window_pattern")
    if pattern is None:
        flags = [sliding(layer) for layer in layers]
    elif isinstance(pattern, np.ndarray):
        flags = [bool(flag) for flag in pattern]
    else:
        flags = [bool((layer + 1) % pattern) for layer in layers]
    if len(flags) != len(layers):
        raise ConfigError(
            f"{found.prefix}attention.sliding_window_pattern has {len(flags)} entries for "
            f"{len(layers)} layers"
        )
    return [SLIDING if flag else FULL for flag in flags]


_HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GEMMA_NORMS = _POST_NORMS | {"pre_feedforward_layernorm": "ffn_norm"}
_GATE_UP = {"mlp.gate_up_proj": "ffn_up"}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(_llama, permuted=True),
    "qwen2": Architecture(_qwen2),
    "qwen3": Architecture(_qwen3, _HEAD_NORMS),
    "qwen3moe": Architecture(_qwen3_moe, _HEAD_NORMS | {"mlp.gate": "ffn_gate_inp"}),
    "seed_oss": Architecture(_seed_oss, {"post_attention_layernorm": "post_attention_norm"}),
    "granite": Architecture(_granite, permuted=True),
    "smollm3": Architecture(_smollm3, permuted=True),
    "phi3": Architecture(_phi3, _GATE_UP | {"self_attn.qkv_proj": "attn_qkv"}),
    "glm4": Architecture(
        _glm4,
        _GATE_UP
        | {
            "post_self_attn_layernorm": "post_attention_norm",
            "post_mlp_layernorm": "post_ffw_norm",
        },
    ),
    "ernie4_5": Architecture(_ernie),
    "olmo2": Architecture(_olmo2, _HEAD_NORMS | _POST_NORMS),
    "gemma2": Architecture(_gemma2, _GEMMA_NORMS, norm_offset=1.0),
    "gemma3": Architecture(_gemma3, _HEAD_NORMS | _GEMMA_NORMS, norm_offset=1.0),
}
