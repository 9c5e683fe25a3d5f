"""Published shapes, cut as the SwiftKV authors cut them: for planning and measuring without a
checkpoint."""

from __future__ import annotations

import dataclasses

from .config import Config, LayerKind, Rope, RopeScaling

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

PRESETS = {"llama-3.1-8b": LLAMA_8B, "llama-3.1-70b": LLAMA_70B, "llama-3.1-405b": LLAMA_405B}
"""Names for `--model` where no weights are read."""
