"""Tiny random checkpoints, as Hugging Face tensors and as our models. Shares no code with the
package's own reader."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from swiftkv_jax import Model
from swiftkv_jax.checkpoints.hf_config import config_from_hf
from swiftkv_jax.model.config import Config, LayerKind
from swiftkv_jax.model.params import QKV, Block, Llama, SwiftKV


def hf_config(**overrides) -> dict[str, Any]:
    """The fields of a tiny SwiftKV `config.json`: 6 layers, 2 of them lower, 4 query and 2
    key/value heads of 8."""
    config = {
        "model_type": "llama_swiftkv",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "swiftkv": True,
        "num_key_value_layers": 2,
        "key_value_group_size": 1,
    }
    return config | overrides


def tensors_for(hf: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor such a checkpoint holds, random: matrices keep the size of what they multiply,
    norms are near one."""
    rng = np.random.default_rng(seed)
    D, F, V, H = hf["hidden_size"], hf["intermediate_size"], hf["vocab_size"], hf["head_dim"]
    N, K, bias = hf["num_attention_heads"], hf["num_key_value_heads"], hf["attention_bias"]
    L, lower, group = (
        hf["num_hidden_layers"],
        hf["num_key_value_layers"] or hf["num_hidden_layers"],
        hf["key_value_group_size"],
    )
    tensors = {}

    def norm(name: str) -> None:
        tensors[f"{name}.weight"] = rng.uniform(0.5, 1.5, D).astype(np.float32)

    def matrix(name: str, rows: int, columns: int, with_bias: bool = False) -> None:
        tensors[f"{name}.weight"] = (rng.normal(size=(rows, columns)) / np.sqrt(columns)).astype(
            np.float32
        )
        if with_bias:
            tensors[f"{name}.bias"] = rng.normal(size=rows).astype(np.float32)

    matrix("model.embed_tokens", V, D)
    tensors["model.embed_tokens.weight"] *= np.float32(np.sqrt(D))
    for j in range(L):
        layer = f"model.layers.{j}"
        norm(f"{layer}.input_layernorm")
        norm(f"{layer}.post_attention_layernorm")
        for name, rows in ("q", N * H), ("k", K * H), ("v", K * H):
            matrix(f"{layer}.self_attn.{name}_proj", rows, D, bias)
            if j >= lower and (name == "q" or (j - lower) % group == 0):
                matrix(f"{layer}.self_attn.{name}_proj_swiftkv", rows, D, bias)
        matrix(f"{layer}.self_attn.o_proj", D, N * H, bias)
        matrix(f"{layer}.mlp.gate_proj", F, D)
        matrix(f"{layer}.mlp.up_proj", F, D)
        matrix(f"{layer}.mlp.down_proj", D, F)
    norm("model.norm")
    if lower < L:
        norm("model.norm_swiftkv")
    if not hf["tie_word_embeddings"]:
        matrix("lm_head", V, D)
    if hf.get("shared_kv_heads") is not None:
        for j in range(lower, L):
            mix = np.eye(H) + rng.normal(size=(K, H, H)) / np.sqrt(H)
            tensors[f"model.layers.{j}.self_attn.mix_swiftkv.weight"] = mix.astype(np.float32)
    return tensors


def model_of(hf: Mapping[str, Any], tensors: Mapping[str, np.ndarray], dtype=jnp.float32) -> Model:
    """Our model of a Hugging Face config and its tensors; no delta where all layers keep their keys
    and values."""
    config = config_from_hf(hf)
    lower, upper = range(config.num_lower_layers), range(config.num_lower_layers, config.num_layers)
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim

    def stack(layers, name: str, *tail: int):
        rows = [tensors[f"model.layers.{j}.{name}"] for j in layers]
        shape = (len(rows), *tail)
        return jnp.asarray(np.stack(rows).reshape(shape) if rows else np.zeros(shape), dtype)

    def block(layers) -> Block:
        D, F = config.embed_dim, config.mlp_dim
        return Block(
            attn_norm=stack(layers, "input_layernorm.weight", D),
            o=stack(layers, "self_attn.o_proj.weight", D, N, H),
            mlp_norm=stack(layers, "post_attention_layernorm.weight", D),
            gate=stack(layers, "mlp.gate_proj.weight", F, D),
            up=stack(layers, "mlp.up_proj.weight", F, D),
            down=stack(layers, "mlp.down_proj.weight", D, F),
            o_bias=stack(layers, "self_attn.o_proj.bias", D) if config.qkv_bias else None,
        )

    def projections(q_layers, kv_layers, suffix: str) -> dict[str, jax.Array]:
        fields = {}
        for name, layers, heads in ("q", q_layers, N), ("k", kv_layers, K), ("v", kv_layers, K):
            fields[name] = stack(
                layers, f"self_attn.{name}_proj{suffix}.weight", heads, H, config.embed_dim
            )
            if config.qkv_bias:
                fields[f"{name}_bias"] = stack(
                    layers, f"self_attn.{name}_proj{suffix}.bias", heads, H
                )
        return fields

    def array(name: str) -> jax.Array:
        return jnp.asarray(tensors[name], dtype)

    llama = Llama(
        embed=array("model.embed_tokens.weight"),
        lower=block(lower),
        lower_qkv=QKV(**projections(lower, lower, "")),
        upper=block(upper),
        upper_qkv=QKV(**projections(upper, upper, "")),
        final_norm=array("model.norm.weight"),
        lm_head=None if config.tie_word_embeddings else array("lm_head.weight"),
    )
    swiftkv = None
    if upper:
        leaders = upper[:: config.key_value_group_size]
        swiftkv = SwiftKV(
            norm=array("model.norm_swiftkv.weight"),
            **projections(upper, leaders, "_swiftkv"),
            mix=None
            if config.shared_kv_heads is None
            else stack(upper, "self_attn.mix_swiftkv.weight", K, H, H),
        )
    return Model(llama=llama, swiftkv=swiftkv, config=config)


def rotating(config: Config, dims: int) -> Config:
    """The config with heads of which only the first `dims` entries rotate."""
    (kind,) = config.layer_kinds
    assert kind.rope is not None
    rope = dataclasses.replace(kind.rope, fraction=dims / config.head_dim)
    return dataclasses.replace(config, layer_kinds=(LayerKind(rope, kind.window),))


def tokens_for(hf: Mapping[str, Any], rows: int, length: int, seed: int = 1) -> np.ndarray:
    """Random token ids, i32[rows, length]."""
    return (
        np.random.default_rng(seed).integers(0, hf["vocab_size"], (rows, length)).astype(np.int32)
    )
