"""Teacher and student: the same frozen Llama, with and without SwiftKV.

    tokens -> embed -> lower layers -> x -+-> upper layers with their own q, k, v     = teacher
                                          |
                                          +-> s = RMSNorm(x) -> k, v of every upper group
                                          +-> upper layers with the delta's q on them = student

The layers are those of `decoder_layers`; what is between x and the keys and values is in
`boundary`. Here whole sequences run through stacks of layers (`lax.scan`);
`infer.runner.cached_layers` runs the same layers one by one over a cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .attention import ATTENTION_OUTPUT, DEFAULT, Attention
from .batch import Batch
from .boundary import boundary_kv, first_tokens
from .config import Config, Remat
from .decoder_layers import (
    cross_layer,
    delta_queries,
    self_layer,
    two_cache_layer,
    with_queries,
)
from .layers import embed
from .packed_attention import (
    mixed,
    own_attention,
    packed_attention,
    packed_reader,
    two_cache_attention,
)
from .params import (
    QKV,
    Block,
    Llama,
    SwiftKV,
    require_teacher,
    require_upper_kv,
)
from .rope import Tables, rope_tables, scanned_kinds
from .sharding import (
    all_gather_fsdp,
    all_gather_mix,
    all_gather_vocabulary,
    constrain_activations,
)

LayerHook = Callable[[Array, Array], Any]

# Inside a scan `prevent_cse` is not needed.
_CHECKPOINT = {
    "none": lambda step: step,
    "mlp": functools.partial(
        jax.checkpoint,
        prevent_cse=False,
        policy=jax.checkpoint_policies.save_only_these_names(ATTENTION_OUTPUT),
    ),
    "layer": functools.partial(jax.checkpoint, prevent_cse=False),
}


def run_lower_layers(
    config: Config, llama: Llama, batch: Batch, *, attention: Attention = DEFAULT
) -> tuple[Float[Array, "B T D"], Tables]:
    """Embedding and lower layers, the same for teacher and student: the hidden state that enters
    layer K, and the rotary tables."""
    config = config.at_length(batch.tokens.shape[1])
    mesh = attention.mesh
    tables = rope_tables(config, batch.positions)
    kinds, kind_of = scanned_kinds(config, tables, range(config.num_lower_layers))
    between_layers = functools.partial(
        constrain_activations, mesh, sequence=attention.shard_sequence
    )

    def step(x, layer):
        *weights, kind = layer
        block, qkv = (all_gather_fsdp(mesh, part, layer=True) for part in weights)
        rope, window = kind_of(kind)
        attend = packed_attention(config, attention, batch.segment_ids, window)
        x, _ = self_layer(config, block, qkv, x, rope, attend, attention)
        return between_layers(x), None

    x = between_layers(embed(config, all_gather_vocabulary(mesh, llama.embed), batch.tokens))
    x, _ = jax.lax.scan(step, x, (llama.lower, llama.lower_qkv, kinds))
    return x, tables


def run_upper_layers_teacher(
    config: Config,
    llama: Llama,
    x,
    tables: Tables,
    segment_ids,
    *,
    layer_hook: LayerHook | None = None,
    remat: Remat = "none",
    attention: Attention = DEFAULT,
    count: int | None = None,
):
    """The plain Llama's upper layers, the first `count` of them or all: (x, sum over layers of
    `layer_hook(index, input)`)."""
    upper_qkv = require_teacher(llama, "run it as a plain Llama")
    config = config.at_length(x.shape[1])
    mesh = attention.mesh
    kinds, kind_of = scanned_kinds(
        config, tables, range(config.num_lower_layers, config.num_layers)
    )

    def layer_step(x, layer):
        *weights, kind = layer
        block, qkv = (all_gather_fsdp(mesh, part, layer=True) for part in weights)
        rope, window = kind_of(kind)
        attend = packed_attention(config, attention, segment_ids, window)
        x, _ = self_layer(config, block, qkv, x, rope, attend, attention)
        return constrain_activations(mesh, x, sequence=attention.shard_sequence)

    layers = llama.upper, upper_qkv, kinds
    if count is not None:
        layers = jax.tree.map(lambda stack: stack[:count], layers)
    return _scan_upper(config, layer_step, layers, x, layer_hook, remat, count)


def run_upper_layers_student(
    config: Config,
    llama: Llama,
    delta: SwiftKV,
    x,
    tables: Tables,
    segment_ids,
    *,
    layer_hook: LayerHook | None = None,
    remat: Remat = "none",
    attention: Attention = DEFAULT,
    own: Bool[Array, "B T"] | None = None,
):
    """The student's upper layers on shared keys and values: (x, sum over layers of
    `layer_hook(index, input)`).

    `own` marks the tokens that keep their own keys and values (`Config.generated_kv`); None: none
    but, with `Config.exact_head`, the first of each segment, which always do.
    These are the teacher's projections of the token's hidden state before each layer, and layers
    that share caches attend to them with the teacher's queries. Raises `ValueError` if those
    projections were dropped.
    """
    config = config.at_length(x.shape[1])
    mesh = attention.mesh
    kinds, kind_of = scanned_kinds(
        config, tables, range(config.num_lower_layers, config.num_layers)
    )
    if config.exact_head:
        first = first_tokens(segment_ids)
        own = first if own is None else own | first
    k, v = boundary_kv(config, llama, delta, x, tables, segment_ids, attention=attention)
    k, v = (_repeat_groups(config, a) for a in (k, v))
    run_layer, weights = _student_layer(config, llama, delta, own, attention)

    def layer_step(x, layer):
        weights, mix, k, v, kind = layer
        weights = [all_gather_fsdp(mesh, part, layer=True) for part in weights]
        rope, window = kind_of(kind)
        read = packed_reader(config, attention, segment_ids, window)
        x = run_layer(weights, all_gather_mix(mesh, mix), x, rope, read, k, v)
        return constrain_activations(mesh, x, sequence=attention.shard_sequence)

    return _scan_upper(config, layer_step, (weights, delta.mix, k, v, kinds), x, layer_hook, remat)


def _student_layer(
    config: Config,
    llama: Llama,
    delta: SwiftKV,
    own: Bool[Array, "B T"] | None,
    attention: Attention,
) -> tuple[Callable[..., Float[Array, "B T D"]], tuple[Block | QKV, ...]]:
    """How an upper layer of the student runs, and the stacked weights that it needs:
    `run(weights, mix, x, rope, read, k, v)` with the keys and values of the layer's group."""
    queries = delta_queries(delta)

    def shared_only(weights, mix, x, rope, read, k, v):
        block, queries = weights

        def attend(q):
            return mixed(read(q, k, v), mix)

        return cross_layer(config, block, queries, x, rope, attend, attention)

    def own_or_shared(weights, mix, x, rope, read, k, v):
        block, qkv = weights
        assert own is not None and mix is None
        attend = own_attention(read, own, k, v)
        return self_layer(config, block, qkv, x, rope, attend, attention)[0]

    def two_caches(weights, mix, x, rope, read, k, v):
        block, qkv, queries = weights
        assert own is not None
        attend = two_cache_attention(read, own, k, v, mix)
        return two_cache_layer(config, block, qkv, queries, x, rope, attend, attention)[0]

    if own is None:
        return shared_only, (llama.upper, queries)
    if config.key_value_group_size > 1:
        qkv = require_teacher(llama, "keep the own keys and values of tokens")
        return two_caches, (llama.upper, qkv, queries)
    kv = require_upper_kv(llama, "keep the own keys and values of tokens")
    return own_or_shared, (llama.upper, with_queries(kv, queries))


def _repeat_groups(config: Config, shared: Float[Array, "J B K T H"]) -> Float[Array, "U B K T H"]:
    """The keys or values that each upper layer reads."""
    # A scan slices repeated inputs for free; an index per group would scatter-add whole stacks in
    # the backward pass.
    alone = config.prompt_attention_layers
    repeated = jnp.repeat(shared[alone:] if alone else shared, config.key_value_group_size, axis=0)
    if alone:
        repeated = jnp.concatenate([shared[:alone], repeated])
    if config.shared_kv_heads is None:
        return repeated
    heads = jnp.asarray(config.shared_kv_heads)[:, None, :, None, None]
    return jnp.take_along_axis(repeated, heads, axis=2)


def _scan_upper(
    config: Config,
    layer_step,
    layers,
    x,
    layer_hook: LayerHook | None,
    remat: Remat,
    count: int | None = None,
):
    layer_hook = layer_hook or (lambda index, x: ())

    def step(carry, indexed_layer):
        x, total = carry
        index, layer = indexed_layer
        total = jax.tree.map(jnp.add, total, layer_hook(index, x))
        return (layer_step(x, layer), total), None

    zero = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(layer_hook, jnp.int32(0), x)
    )
    indices = jnp.arange(config.num_lower_layers, config.num_layers)[:count]
    (x, total), _ = jax.lax.scan(_CHECKPOINT[remat](step), (x, zero), (indices, layers))
    return x, total


def teacher(
    config: Config, llama: Llama, batch: Batch, *, attention: Attention = DEFAULT
) -> Float[Array, "B T D"]:
    """The plain Llama: hidden state before the final norm."""
    x, tables = run_lower_layers(config, llama, batch, attention=attention)
    return run_upper_layers_teacher(
        config, llama, x, tables, batch.segment_ids, attention=attention
    )[0]


def student(
    config: Config,
    llama: Llama,
    delta: SwiftKV,
    batch: Batch,
    *,
    attention: Attention = DEFAULT,
    own: Bool[Array, "B T"] | None = None,
) -> Float[Array, "B T D"]:
    """The SwiftKV model: hidden state before the final norm. Every token runs through every layer;
    `own` as in `run_upper_layers_student`."""
    x, tables = run_lower_layers(config, llama, batch, attention=attention)
    return run_upper_layers_student(
        config, llama, delta, x, tables, batch.segment_ids, attention=attention, own=own
    )[0]
