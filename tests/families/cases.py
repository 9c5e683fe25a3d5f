"""A tiny model of each family: its `config.json`, spelled as files on the Hub are, and a rule for
its weights. Imports nothing of the package, so that `record.py` can run beside transformers.
"""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

LENGTH, PROMPT, NEW = 40, 20, 12
"""Positions of the recorded logits; of the recorded greedy continuation, its prompt and itself."""
VOCABULARY = 96

BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
QWEN = {
    "hidden_act": "silu",
    "use_cache": True,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
}
# Without Mamba layers and experts. Nothing reads the fields of those, nor `intermediate_size`.
GRANITE4 = {
    "model_type": "granitemoehybrid",
    "layer_types": ["attention"] * 6,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "intermediate_size": 64,
    "shared_intermediate_size": 80,
    "rope_theta": 1e4,
    "rope_scaling": None,
    "attention_bias": False,
    "embedding_multiplier": 12,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.5,
    "logits_scaling": 0.4,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "normalization_function": "rmsnorm",
    "init_method": "mup",
    "mamba_n_heads": 4,
    "mamba_d_head": 24,
    "mamba_d_state": 16,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.01,
}


def _types(full: str, count: int = 6) -> list[str]:
    """`full` has 1 for a full layer, 0 for a windowed one."""
    kinds = {"1": "full_attention", "0": "sliding_attention"}
    return [kinds[flag] for flag in full * (count // len(full))]


MOE = (
    BASE
    | QWEN
    | {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "attention_bias": False,
        "rope_theta": 1e4,
        "rope_scaling": None,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 6,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }
)

CASES: dict[str, dict[str, Any]] = {
    # The window's fields are there, switched off, as in Qwen2.5's files.
    "qwen2": BASE
    | QWEN
    | {
        "model_type": "qwen2",
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": 7,
        "max_window_layers": 2,
        "use_mrope": False,
    },
    "qwen2-window": BASE
    | QWEN
    | {
        "model_type": "qwen2",
        "rope_theta": 1e4,
        "num_key_value_heads": 1,
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 2,
    },
    "qwen3": BASE
    | QWEN
    | {
        "model_type": "qwen3",
        "head_dim": 24,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 6,
        "layer_types": _types("1"),
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
        "dtype": "float32",
    },
    "qwen3-yarn": BASE
    | QWEN
    | {
        "model_type": "qwen3",
        "head_dim": 16,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_theta": 1e4,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    },
    "qwen3-moe": MOE,
    "qwen3-moe-raw": MOE | {"norm_topk_prob": False},
    "mistral-window": BASE
    | {"model_type": "mistral", "rope_theta": 1e4, "sliding_window": 8, "hidden_act": "silu"},
    "seed-oss": BASE
    | {
        "model_type": "seed_oss",
        "rope_theta": 1e4,
        "rope_scaling": {"rope_type": "default"},
        "head_dim": 16,
        "attention_bias": True,
        "attention_out_bias": False,
        "residual_dropout": 0.1,
        "mlp_bias": False,
        "hidden_act": "silu",
    },
    "granite": BASE
    | {
        "model_type": "granite",
        "rope_theta": 1e4,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.5,
        "logits_scaling": 0.4,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    },
    "granite4": BASE | GRANITE4 | {"position_embedding_type": "rope", "head_dim": 16},
    "granite4-unrotated": BASE
    | GRANITE4
    | {"position_embedding_type": None, "num_key_value_heads": 1, "tie_word_embeddings": False},
    "smollm3": BASE
    | {
        "model_type": "smollm3",
        "rope_theta": 1e4,
        "no_rope_layers": [1, 0, 0, 1, 1, 0],
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 6,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    },
    "phi3": BASE
    | {
        "model_type": "phi3",
        "rope_theta": 1e4,
        "rope_scaling": None,
        "original_max_position_embeddings": 256,
        "sliding_window": 12,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "hidden_act": "silu",
    },
    "phi4-mini": BASE
    | {
        "model_type": "phi3",
        "head_dim": 16,
        "hidden_size": 64,
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 16,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.4, 1.7, 2.0],
            "long_factor": [1.0, 1.5, 3.0, 6.0, 9.0, 14.0],
        },
        "sliding_window": 262144,
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "mlp_bias": False,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    },
    "glm4": BASE
    | {
        "model_type": "glm4",
        "head_dim": 16,
        "attention_bias": True,
        "attention_dropout": 0.0,
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
    # The half of each head that rotates is the class's default.
    "glm4-yarn": BASE
    | {
        "model_type": "glm4",
        "head_dim": 24,
        "attention_bias": False,
        "rope_theta": 1e4,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        "hidden_act": "silu",
    },
    "glm": BASE
    | {
        "model_type": "glm",
        "head_dim": 16,
        "num_key_value_heads": 1,
        "attention_bias": True,
        "rope_parameters": {
            "rope_theta": 1e4,
            "rope_type": "default",
            "partial_rotary_factor": 0.75,
        },
        "dtype": "float32",
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    },
    "ernie4.5": BASE
    | {
        "model_type": "ernie4_5",
        "head_dim": 16,
        "rope_theta": 1e4,
        "rope_scaling": None,
        "use_bias": False,
        "tie_word_embeddings": True,
        "use_cache": False,
        "hidden_act": "silu",
    },
    "olmo2": BASE
    | {
        "model_type": "olmo2",
        "rope_theta": 1e4,
        "rope_scaling": None,
        "attention_bias": False,
        "hidden_act": "silu",
    },
    "olmo3": BASE
    | {
        "model_type": "olmo3",
        "num_hidden_layers": 8,
        "attention_bias": False,
        "sliding_window": 6,
        "layer_types": _types("0001", 8),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "hidden_act": "silu",
    },
    "gemma2": BASE
    | {
        "model_type": "gemma2",
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 1e4,
        "query_pre_attn_scalar": 9,
        "sliding_window": 6,
        "sliding_window_size": 6,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "attention_bias": False,
        "cache_implementation": "hybrid",
    },
    "gemma3": BASE
    | {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 9,
        "sliding_window": 6,
        "layer_types": _types("001"),
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e3},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
        },
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "attention_bias": False,
        "use_bidirectional_attention": False,
    },
}


def tensor_for(config: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The tensor of this name: random, and large enough that every feature tells.

    The stream of `RandomState` is the same in every NumPy.
    """
    random = np.random.RandomState(zlib.crc32(f"{config['model_type']} {name}".encode()))
    gemma = config["model_type"].startswith("gemma")
    if "norm" in name:
        values = random.uniform(0.6, 1.6, shape)
        if gemma:
            after = "post_attention" in name or "post_feedforward" in name
            values += 1.5 * after - 1
    elif name.endswith("bias"):
        values = 0.5 * random.standard_normal(shape)
    elif "embed_tokens" in name:
        scale = config.get("embedding_multiplier", np.sqrt(shape[1]) if gemma else 1.0)
        values = random.standard_normal(shape) * _EMBEDDING.get(config["model_type"], 0.5) / scale
    elif "lm_head" in name:
        values = random.standard_normal(shape) * 2 / np.sqrt(shape[-1])
    else:
        query_or_key = "q_proj" in name or "k_proj" in name or "qkv_proj" in name
        strong = _OUTPUT.get(config["model_type"], 1.2)
        output = "o_proj" in name or "down_proj" in name or "output_linear" in name
        gain = 1.6 if query_or_key else strong if output else 1.2
        values = gain * random.standard_normal(shape) / np.sqrt(shape[-1])
    return np.ascontiguousarray(values, np.float32)


_EMBEDDING = {
    "granite": 1.0,
    "granitemoehybrid": 1.0,
    "gemma2": 2.0,
    "gemma3_text": 2.0,
    "glm4": 0.4,
    "phi3": 0.3,
    "qwen2": 0.3,
    "qwen3": 0.3,
    "smollm3": 0.3,
}
_OUTPUT = {"granite": 8.0, "granitemoehybrid": 8.0}


def tokens() -> np.ndarray:
    """i32[2, LENGTH]"""
    return np.random.RandomState(7).randint(3, VOCABULARY, (2, LENGTH)).astype(np.int32)
