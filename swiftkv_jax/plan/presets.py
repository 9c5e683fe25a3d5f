"""Published shapes, cut as the SwiftKV authors cut them: for planning and measuring without a
checkpoint."""

from __future__ import annotations

import dataclasses

from ..model.config import Config, LayerKind
from ..model.rope_config import Rope, RopeScaling

LLAMA_8B = Config(
    vocab_size=128256,
    embed_dim=4096,
    mlp_dim=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    layer_kinds=(
        LayerKind(
            Rope(
                theta=500_000.0,
                scaling=RopeScaling(
                    rope_type="llama3",
                    factor=8.0,
                    low_freq_factor=1.0,
                    high_freq_factor=4.0,
                    original_max_position_embeddings=8192,
                ),
            )
        ),
    ),
    max_position_embeddings=131072,
    num_key_value_layers=16,
)
"""Llama-3.1-8B (config.json of meta-llama/Llama-3.1-8B-Instruct)."""
LLAMA_70B = dataclasses.replace(
    LLAMA_8B, embed_dim=8192, mlp_dim=28672, num_layers=80, num_heads=64, num_key_value_layers=40
)
"""Llama-3.1-70B and 3.3-70B."""
LLAMA_405B = dataclasses.replace(
    LLAMA_8B, embed_dim=16384, mlp_dim=53248, num_layers=126, num_heads=128, num_key_value_layers=63
)
"""Llama-3.1-405B."""

QWEN3_8B = Config(
    vocab_size=151936,
    embed_dim=4096,
    mlp_dim=12288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    norm_eps=1e-6,
    max_position_embeddings=40960,
    layer_kinds=(LayerKind(Rope(theta=1e6)),),
    family="qwen3",
    qk_norm="head",
    num_key_value_layers=27,
)
"""Qwen3-8B (Qwen/Qwen3-8B), cut as ArcticTraining's branch aqiao/qwen3 cuts it."""
QWEN3_30B_A3B = dataclasses.replace(
    QWEN3_8B,
    embed_dim=2048,
    mlp_dim=768,
    num_layers=48,
    num_kv_heads=4,
    family="qwen3_moe",
    num_experts=128,
    num_experts_per_token=8,
    renormalize_experts=True,
    num_key_value_layers=36,
)
"""Qwen3-30B-A3B (Qwen/Qwen3-30B-A3B): 128 experts in each layer, 8 for a token."""
QWEN25_32B = Config(
    vocab_size=152064,
    embed_dim=5120,
    mlp_dim=27648,
    num_layers=64,
    num_heads=40,
    num_kv_heads=8,
    head_dim=128,
    norm_eps=1e-6,
    max_position_embeddings=32768,
    layer_kinds=(LayerKind(Rope(theta=1e6)),),
    family="qwen2",
    qkv_bias=True,
    num_key_value_layers=48,
)
"""Qwen2.5-32B (Qwen/Qwen2.5-32B-Instruct), cut as ArcticTraining cuts it."""
_GLOBAL = LayerKind(Rope(theta=1e6, scaling=RopeScaling("linear", factor=8.0)))
_LOCAL = LayerKind(Rope(theta=1e4), window=1024)
GEMMA3_12B = Config(
    vocab_size=262208,
    embed_dim=3840,
    mlp_dim=15360,
    num_layers=48,
    num_heads=16,
    num_kv_heads=8,
    head_dim=256,
    norm_eps=1e-6,
    max_position_embeddings=131072,
    tie_word_embeddings=True,
    layer_kinds=(*[_LOCAL] * 5, _GLOBAL) * 8,
    family="gemma3_text",
    qk_norm="head",
    norm_order="both",
    norm_offset=True,
    norm_wide=True,
    activation="gelu_tanh",
    embed_scale=3840**0.5,
    round_embed_scale=True,
    query_scale=256**-0.5,
    num_key_value_layers=24,
)
"""The text model of Gemma 3 12B (google/gemma-3-12b-it): five windows, then a full layer."""
PHI_4 = Config(
    vocab_size=100352,
    embed_dim=5120,
    mlp_dim=17920,
    num_layers=40,
    num_heads=40,
    num_kv_heads=10,
    head_dim=128,
    max_position_embeddings=16384,
    layer_kinds=(LayerKind(Rope(theta=250_000.0)),),
    family="phi3",
    num_key_value_layers=20,
)
"""Phi-4 (microsoft/phi-4)."""

PRESETS = {
    "llama-3.1-8b": LLAMA_8B,
    "llama-3.1-70b": LLAMA_70B,
    "llama-3.1-405b": LLAMA_405B,
    "qwen3-8b": QWEN3_8B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "qwen2.5-32b": QWEN25_32B,
    "gemma-3-12b": GEMMA3_12B,
    "phi-4": PHI_4,
}
"""Names for `--model` where no weights are read."""
