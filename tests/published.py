"""The `config.json` of published models, and what is read from each."""

from swiftkv_jax import Config, LayerKind, Rope, RopeScaling

LLAMA3_SCALING = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
COMMON = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "use_cache": True,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
}
LLAMA2_7B = {
    **COMMON,
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rope_scaling": None,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "vocab_size": 32000,
}
LLAMA3_8B = {
    **COMMON,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "transformers_version": "4.40.0.dev0",
    "vocab_size": 128256,
}
LLAMA31_8B = {
    **LLAMA3_8B,
    "eos_token_id": [128001, 128008, 128009],
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "rope_scaling": LLAMA3_SCALING,
    "transformers_version": "4.42.3",
}
LLAMA32_1B = {
    **LLAMA31_8B,
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "rope_scaling": {**LLAMA3_SCALING, "factor": 32.0},
    "tie_word_embeddings": True,
}
LLAMA33_70B = {
    **LLAMA31_8B,
    "head_dim": 128,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
LLAMA31_405B = {
    **LLAMA31_8B,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
    "num_hidden_layers": 126,
}
MISTRAL_7B_V03 = {
    "architectures": ["MistralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.0.dev0",
    "use_cache": True,
    "vocab_size": 32768,
}
SWIFTKV_8B_DEC_2024 = {
    **LLAMA31_8B,
    "_name_or_path": "/data-fast/llama-3.1-8b-instruct",
    "architectures": ["LlamaSwiftKVForCausalLM"],
    "key_value_group_size": 1,
    "model_type": "llama_swiftkv",
    "num_key_value_layers": 16,
    "swiftkv": True,
    "torch_dtype": "float32",
    "transformers_version": "4.44.2",
}
SWIFTKV_8B_AUG_2025 = {k: v for k, v in SWIFTKV_8B_DEC_2024.items() if k != "_name_or_path"} | {
    "head_dim": 128,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.53.0",
}
SWIFTKV_8B_TRANSFORMERS5 = {
    k: v
    for k, v in SWIFTKV_8B_AUG_2025.items()
    if k not in ("torch_dtype", "rope_scaling", "rope_theta")
} | {
    "dtype": "bfloat16",
    "rope_parameters": {**LLAMA3_SCALING, "rope_theta": 500000.0},
    "pad_token_id": None,
    "transformers_version": "5.0.0",
}


def rope(theta: float, scaling: RopeScaling | None = None) -> tuple[LayerKind, ...]:
    return (LayerKind(Rope(theta, scaling)),)


SCALING = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
CONFIG_8B = Config(
    vocab_size=128256,
    embed_dim=4096,
    mlp_dim=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    norm_eps=1e-5,
    layer_kinds=rope(500000.0, SCALING),
    max_position_embeddings=131072,
)
PUBLISHED = {
    "Llama-2-7B": (
        LLAMA2_7B,
        Config(
            32000,
            4096,
            11008,
            32,
            32,
            32,
            128,
            norm_eps=1e-5,
            layer_kinds=rope(10000.0),
            max_position_embeddings=4096,
        ),
    ),
    "Llama-3-8B": (
        LLAMA3_8B,
        Config(
            128256,
            4096,
            14336,
            32,
            32,
            8,
            128,
            norm_eps=1e-5,
            layer_kinds=rope(500000.0),
            max_position_embeddings=8192,
        ),
    ),
    "Llama-3.1-8B": (LLAMA31_8B, CONFIG_8B),
    "Llama-3.2-1B": (
        LLAMA32_1B,
        Config(
            *(128256, 2048, 8192, 16, 32, 8, 64, 1e-5),
            layer_kinds=rope(500000.0, RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)),
            max_position_embeddings=131072,
            tie_word_embeddings=True,
        ),
    ),
    "Llama-3.3-70B": (
        LLAMA33_70B,
        Config(
            128256,
            8192,
            28672,
            80,
            64,
            8,
            128,
            1e-5,
            layer_kinds=rope(500000.0, SCALING),
            max_position_embeddings=131072,
        ),
    ),
    "Mistral-7B-v0.3": (
        MISTRAL_7B_V03,
        Config(
            32768,
            4096,
            14336,
            32,
            32,
            8,
            128,
            norm_eps=1e-5,
            layer_kinds=rope(1e6),
            max_position_embeddings=32768,
        ),
    ),
    "SwiftKV-8B December 2024": (SWIFTKV_8B_DEC_2024, CONFIG_8B.cut(16)),
    "SwiftKV-8B August 2025": (SWIFTKV_8B_AUG_2025, CONFIG_8B.cut(16)),
    "SwiftKV-8B as transformers 5 writes it": (SWIFTKV_8B_TRANSFORMERS5, CONFIG_8B.cut(16)),
}
