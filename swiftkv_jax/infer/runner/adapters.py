"""LoRA adapters of the upper layers, resident beside the weights: each row has its own, or none.

Keys and values of a prompt do not depend on them, so one prefix cache serves all. Prefill runs no
upper layer; only programs that do see them.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding
from jaxtyping import Array, Int

from ...errors import UsageError
from ...model.config import Config
from ...model.low_rank import Adapted, LayerAdapters, Terms, insert
from ..engine.options import EngineOptions
from ..engine.shapes import kv_programs
from .serving_form import Weights

insert_adapter = functools.partial(jax.jit, donate_argnames="layers")(insert)
"""The compiled program that puts an adapter into a place."""


def check_adapters(config: Config, served: Config, mesh: Mesh | None) -> None:
    """Raise `UsageError` for a model, `config`, that has no room for adapters as it is `served`."""
    reason = None
    if not served.num_upper_layers:
        reason = "keeps adapters in the upper layers of SwiftKV, and this model runs without"
    elif mesh is not None and mesh.size > 1:
        reason = "runs on one device"
    elif kv_programs(served) != "boundary" or served.exact_head:
        reason = "needs `generated_kv`=boundary: with own keys and values adapters change the cache"
    elif config.shared_kv_heads is not None or served.prompt_attention_layers:
        reason = "does not go with upper layers that mix shared values or that prompts run"
    if reason is not None:
        raise UsageError(
            f"`enable_lora` {reason}; one adapter can be merged at load (`adapter`)",
            option="enable_lora",
        )


def init_adapters(
    config: Config, options: EngineOptions, dtype: Any, sharding: Sharding | None
) -> tuple[LayerAdapters, ...]:
    """Empty places for the adapters of each upper layer of the served `config`."""
    zeros = functools.partial(jnp.zeros, dtype=dtype, device=sharding)
    count, rank = options.max_loras, options.max_lora_rank

    def terms(outputs: int, inputs: int) -> Terms:
        return Terms(zeros((count, rank, inputs)), zeros((outputs, count, rank)))

    def layer() -> LayerAdapters:
        D, F, M = config.embed_dim, config.mlp_dim, config.num_heads * config.head_dim
        found = LayerAdapters(q=terms(M, D), o=terms(D, M))
        if config.num_experts:
            return found
        return dataclasses.replace(found, gate=terms(F, D), up=terms(F, D), down=terms(D, F))

    return tuple(layer() for _ in range(config.num_upper_layers))


def no_adapter(layers: tuple[LayerAdapters, ...]) -> tuple[LayerAdapters, ...]:
    """An adapter that adds nothing, in NumPy, for the places `layers`."""

    def zeros(terms: Terms) -> Terms:
        _, rank, inputs = terms.a.shape
        dtype = terms.a.dtype
        return Terms(np.zeros((rank, inputs), dtype), np.zeros((terms.b.shape[0], rank), dtype))

    return jax.tree.map(zeros, layers, is_leaf=lambda leaf: isinstance(leaf, Terms))


def read_adapter(
    config: Config, path: Path, layers: tuple[LayerAdapters, ...]
) -> tuple[LayerAdapters, ...]:
    """An adapter that PEFT saved in a directory, in NumPy, for the places `layers` of a model.
    Raises `CheckpointError` and `ConfigError`."""
    from ...checkpoints.upper_adapters import read_upper_adapter

    _, max_rank, _ = layers[0].q.a.shape
    found = read_upper_adapter(config, path, max_rank=max_rank, dtype=layers[0].q.a.dtype)
    made = no_adapter(layers)
    for layer, factors in zip(made, found, strict=True):
        for name, (a, b) in factors.items():
            terms = getattr(layer, name)
            terms.a[: len(a)], terms.b[:, : len(a)] = a, b
    return made


def with_adapters(weights: Weights, adapter: Int[Array, "A _"]) -> Weights:
    """The weights with `Adapted` upper matrices; `adapter` is that field."""

    def adapted(matrix: Any, *terms: Any) -> Any:
        return None if matrix is None else Adapted(matrix, terms, adapter)

    upper, queries = [], []
    layers = zip(weights.upper, weights.upper_q, weights.adapters, strict=True)
    for block, qkv, layer in layers:
        queries.append(dataclasses.replace(qkv, q=adapted(qkv.q, layer.q)))
        block = dataclasses.replace(
            block,
            o=adapted(block.o, layer.o),
            gate_up=adapted(block.gate_up, layer.gate, layer.up),
            down=adapted(block.down, layer.down),
        )
        upper.append(block)
    return dataclasses.replace(weights, upper=tuple(upper), upper_q=tuple(queries))
