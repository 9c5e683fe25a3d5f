"""LoRA adapters, resident beside the weights: each row has its own, or none.

Where all of them leave the lower layers and the student's keys and values as they are, keys and
values of a prompt do not depend on them, and the programs of prefill that run no upper layer do not
see them.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from ...errors import UsageError
from ...model.config import Config
from ...model.low_rank import Adapted, LayerAdapters, Terms, insert
from ...model.params import ServingBlock, ServingQKV
from ...model.quantization import values_of
from ..engine.model_runner_base import Adapter
from ..engine.options import EngineOptions
from .conversion import Conversion
from .layout import Layout
from .serving_form import Weights


def check_adapters(
    config: Config, served: Config, options: EngineOptions, mesh: Mesh | None
) -> None:
    """Raise `UsageError` for a model, `config`, that has no room for adapters as it is `served`."""
    reason = None
    if mesh is not None and mesh.is_multi_process:
        reason = "`enable_lora` runs in one process"
    elif config.shared_kv_heads is not None and served.num_upper_layers:
        reason = "`enable_lora` does not go with upper layers that mix shared values"
    if reason is not None:
        raise UsageError(
            f"{reason}; one adapter can be merged at load (`adapter`)", option="enable_lora"
        )
    if options.lora_upper_only and not served.num_upper_layers:
        reason = "is for the upper layers of SwiftKV, and this model runs without"
    elif options.lora_upper_only and runs_upper_layers(served):
        reason = "does not go with an exact head or prompt attention layers: prompts run those"
    if reason is not None:
        raise UsageError(f"`lora_upper_only` {reason}; leave it out", option="lora_upper_only")


def runs_upper_layers(served: Config) -> bool:
    """Return whether keys and values of every prompt come from upper layers too."""
    return served.exact_head > 0 or served.prompt_attention_layers > 0


def adapter_places(layout: Layout, options: EngineOptions, dtype: Any) -> tuple[LayerAdapters, ...]:
    """The `ShapeDtypeStruct` of every array of the places for adapters, for each layer. On a mesh
    outputs or inputs are split as those of the matrices are."""
    served = layout.config
    count, rank = options.max_loras, options.max_lora_rank
    head = served.head_dim
    first = {group[0] for group in served.kv_groups}

    def terms(outputs: _Axis, inputs: _Axis) -> Terms:
        a, b = (count, rank, inputs.size), (outputs.size, count, rank)
        of_a, of_b = layout.split(inputs.units, 2), layout.split(outputs.units, 0)
        return Terms(
            jax.ShapeDtypeStruct(a, dtype, sharding=of_a),
            jax.ShapeDtypeStruct(b, dtype, sharding=of_b),
        )

    D, F = _Axis(served.embed_dim, 1), _Axis(served.mlp_dim, served.mlp_dim)
    M, K = (_Axis(heads * head, heads) for heads in (served.num_heads, served.num_kv_heads))

    def layer(number: int) -> LayerAdapters:
        is_upper = number >= served.num_lower_layers
        if options.lora_upper_only and not is_upper:
            return LayerAdapters()
        found = LayerAdapters(q=terms(M, D), o=terms(D, M))
        if not served.num_experts:
            mlp = {"gate": terms(F, D), "up": terms(F, D), "down": terms(D, F)}
            found = dataclasses.replace(found, **mlp)
        if is_upper and served.has_two_caches:
            found = dataclasses.replace(found, own_q=terms(M, D))
        if not options.lora_upper_only and (not is_upper or number in first):
            found = dataclasses.replace(found, k=terms(K, D), v=terms(K, D))
        return found

    return tuple(layer(number) for number in range(served.num_layers))


class _Axis(NamedTuple):
    size: int
    units: int
    """Parts that stay whole where it is split over devices: heads."""


def init_adapters(layout: Layout, options: EngineOptions, dtype: Any) -> tuple[LayerAdapters, ...]:
    """Empty places for adapters."""
    return jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding),
        adapter_places(layout, options, dtype),
    )


def insert_adapter(places: tuple[LayerAdapters, ...]) -> Any:
    """The program, to be compiled, that puts an adapter into one of `places`, arrays or their
    shapes with shardings."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, places)
    return jax.jit(insert, donate_argnames="layers", out_shardings=shardings)


def no_adapter(layers: tuple[LayerAdapters, ...]) -> tuple[LayerAdapters, ...]:
    """An adapter that adds nothing, in NumPy, for the places `layers`."""

    def zeros(terms: Terms) -> Terms:
        _, rank, inputs = terms.a.shape
        dtype = terms.a.dtype
        return Terms(np.zeros((rank, inputs), dtype), np.zeros((terms.b.shape[0], rank), dtype))

    return jax.tree.map(zeros, layers, is_leaf=lambda leaf: isinstance(leaf, Terms))


def read_adapter(convert: Conversion, path: Path, places: tuple[LayerAdapters, ...]) -> Adapter:
    """Read an adapter that PEFT saved in a directory, in NumPy, for the `places` beside the weights
    that `convert` makes. Raises `CheckpointError` and `ConfigError`."""
    from ...checkpoints.adapter_factors import read_factors

    config, served = convert.shapes.config, convert.served
    copies = served.num_kv_heads // config.num_kv_heads  # on a mesh
    if not served.num_upper_layers:
        config = config.cut(config.num_layers)
    some = places[-1].o
    assert some is not None
    _, max_rank, _ = some.a.shape
    upper_only = places[0].o is None
    found = read_factors(config, path, max_rank=max_rank, upper_only=upper_only, dtype=some.a.dtype)
    made = no_adapter(places)
    for layer, factors in zip(made, found, strict=True):
        for name, (a, b) in factors.items():
            if (terms := getattr(layer, name)) is not None:  # `own_q` may have no place
                if name in "kv":
                    heads = b.reshape(config.num_kv_heads, -1, b.shape[1])
                    b = heads.repeat(copies, axis=0).reshape(-1, b.shape[1])
                terms.a[: len(a)], terms.b[:, : b.shape[1]] = a, b
    return Adapter(made, _prompt_digest(served, found))


def _prompt_digest(
    served: Config, layers: Sequence[Mapping[str, tuple[np.ndarray, np.ndarray]]]
) -> bytes:
    """`Adapter.prompt_digest` of the factors of each layer."""
    every = range(served.num_layers if runs_upper_layers(served) else served.num_lower_layers)
    digest, is_seen = hashlib.blake2b(digest_size=32), False
    for number, factors in enumerate(layers):
        for name, (a, b) in factors.items():
            if (number in every or name in "kv") and b.any():
                is_seen = True
                digest.update(repr((number, name, a.shape, b.shape)).encode())
                digest.update(a.tobytes())
                digest.update(b.tobytes())
    return digest.digest() if is_seen else b""


def with_one_place(weights: Weights, adapter: Int[Array, "B 1"] | None) -> Weights:
    """The weights with the places of one adapter alone where there is one row, whose `adapter` is
    given: a loop over steps would copy them out of all places in each."""
    if adapter is None or adapter.size > 1:
        return weights
    places = jax.tree.map(
        lambda terms: terms.of_row(adapter),
        weights.adapters,
        is_leaf=lambda leaf: isinstance(leaf, Terms),
    )
    return dataclasses.replace(weights, adapters=places)


def with_adapters(config: Config, weights: Weights, adapter: Int[Array, "A _"] | None) -> Weights:
    """The weights with `Adapted` matrices, `adapter` being that field, where there are places for
    adapters; None changes nothing. Weights that are adapted get the adapters of other rows."""
    if adapter is None:
        return weights
    layers, num_lower = weights.adapters, config.num_lower_layers
    upper = layers[num_lower:]

    def adapted(matrix: Any, *terms: Terms | None, groups: int = 1) -> Any:
        given = tuple(one for one in terms if one is not None)
        if matrix is None or not given:
            return matrix
        matrix = matrix.matrix if isinstance(matrix, Adapted) else matrix
        return Adapted(matrix, given, adapter, groups)

    def block(block: ServingBlock, layer: LayerAdapters) -> ServingBlock:
        return dataclasses.replace(
            block,
            o=adapted(block.o, layer.o),
            gate_up=adapted(block.gate_up, layer.gate, layer.up),
            down=adapted(block.down, layer.down),
        )

    def qkv(qkv: ServingQKV, q: Terms | None, k: Terms | None, v: Terms | None) -> ServingQKV:
        groups, joined, *_ = values_of(qkv.heads).shape
        terms = (q, k, v) if joined > 2 else (k, v)
        heads = adapted(qkv.heads, *terms, groups=groups)
        return dataclasses.replace(qkv, heads=heads, q=adapted(qkv.q, q))

    def own(one: ServingQKV, layer: LayerAdapters) -> ServingQKV:
        return qkv(one, layer.own_q if config.has_two_caches else layer.q, None, None)

    lower = zip(weights.lower_qkv, layers[:num_lower], strict=True)
    first = [layers[group[0]] for group in config.kv_groups]
    projected = first[config.prompt_attention_layers :]
    of_groups = [*(layer.k for layer in projected), *(layer.v for layer in projected)]
    return dataclasses.replace(
        weights,
        lower=tuple(map(block, weights.lower, layers)),
        lower_qkv=tuple(qkv(one, layer.q, layer.k, layer.v) for one, layer in lower),
        kv=adapted(weights.kv, *of_groups),
        upper=tuple(map(block, weights.upper, upper)),
        upper_q=tuple(
            dataclasses.replace(one, q=adapted(one.q, layer.q))
            for one, layer in zip(weights.upper_q, upper, strict=False)
        ),
        upper_qkv=tuple(map(own, weights.upper_qkv, upper)),
        prompt_qkv=tuple(
            qkv(one, layer.q, layer.k, layer.v)
            for one, layer in zip(weights.prompt_qkv, upper, strict=False)
        ),
    )
