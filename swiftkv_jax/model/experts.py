"""The MLP of a mixture of experts: a router sends each token to a few of many small MLPs.

    probabilities = softmax(router h)                       E numbers a token, in float32
    out = sum over its k likeliest experts e of probability_e mlp_e(h)

Pairs of a token and one of its experts are sorted by expert; then each of the MLP's products is one
of groups of rows (`pallas_kernels.grouped_product`). On a mesh whole experts are split over
`model`, and tokens as everywhere else.

Letters as in `params`; R tokens of one device, k experts of a token, P = R k pairs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from ..pallas_kernels import grouped_product as grouped
from .attention import Attention
from .config import Config
from .mesh import MODEL, dp_size, row_axes
from .params import Block, Leaf, ServingBlock
from .quantization import Quantized, values_of

Activate = Callable[[Array, Array], Array]


def mixture(
    config: Config,
    block: Block | ServingBlock,
    h: Float[Array, "B T D"],
    activate: Activate,
    attention: Attention,
) -> Float[Array, "B T D"]:
    """The mixture of experts of one layer, on the mesh of `attention`; `activate(gate, up)` is the
    middle of the experts' MLPs.

    Softmax over all experts, then the likeliest: as transformers' Qwen3-MoE
    (`models/qwen3_moe/modeling_qwen3_moe.py`), but probabilities and the sum over a token's experts
    of one device are in float32, whatever the dtype of the model.
    """
    mesh = attention.mesh
    inputs: grouped.Inputs = "first" if isinstance(block, ServingBlock) else "last"
    run = functools.partial(_run, config, activate, inputs, attention.implementation == "xla")
    weights = block.router, (block.expert_gate, block.expert_up, block.expert_down)
    if mesh is None:
        return run(h, *weights, 0)
    shards = 1
    of_experts = of_rows = PartitionSpec()
    if config.num_experts % mesh.shape[MODEL] == 0:
        shards = mesh.shape[MODEL]
        of_experts = PartitionSpec(MODEL)
    if h.shape[0] % dp_size(mesh) == 0:
        of_rows = PartitionSpec(row_axes(mesh))

    def local(h, router, experts):
        if shards == 1:
            return run(h, router, experts, 0)
        first = jax.lax.axis_index(MODEL) * (config.num_experts // shards)
        return jax.lax.psum(run(h, router, experts, first), MODEL)

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(of_rows, PartitionSpec(), of_experts),
        out_specs=of_rows,
        check_vma=False,
    )(h, *weights)


def _run(
    config: Config,
    activate: Activate,
    inputs: grouped.Inputs,
    plain: bool,
    h: Float[Array, "B T D"],
    router: Float[Array, "E D"],
    experts: tuple[Leaf, Leaf, Leaf],
    first: Int[Array, ""] | int,
) -> Float[Array, "B T D"]:
    """The part of the sum over the experts of this device, of which number 0 is expert `first` of
    the model. `plain` forbids kernels."""
    x = h.reshape(-1, h.shape[-1])
    probabilities, chosen = route(config, x, router)
    num_experts = values_of(experts[0]).shape[0]
    expert = (chosen - first).reshape(-1)
    expert = jnp.where((expert >= 0) & (expert < num_experts), expert, num_experts)
    how = "xla" if plain else grouped.choose_grouped((config.embed_dim, config.mlp_dim), x.dtype)
    if how == "tpu":
        out = _by_rows(activate, inputs, x, expert, experts, config.num_experts_per_token)
    else:
        out = _by_blocks(activate, inputs, how, x, expert, experts, config.num_experts_per_token)
    out = out.reshape(*chosen.shape, -1).astype(jnp.float32) * probabilities[..., None]
    return out.sum(axis=1).astype(h.dtype).reshape(h.shape)


def route(
    config: Config, x: Float[Array, "R D"], router: Float[Array, "E D"]
) -> tuple[Float[Array, "R k"], Int[Array, "R k"]]:
    """The experts of each token, likeliest first, and their probabilities, float32."""
    logits = jnp.einsum("RD,ED->RE", x, router, preferred_element_type=jnp.float32)
    probabilities, chosen = jax.lax.top_k(
        jax.nn.softmax(logits, axis=-1), config.num_experts_per_token
    )
    if config.renormalize_experts:
        probabilities = probabilities / probabilities.sum(axis=-1, keepdims=True)
    return probabilities, chosen


def _by_rows(activate: Activate, inputs, x, expert, experts, per_token: int):
    """The output of each pair's expert, P D: products of the pairs in order of their experts. 0 for
    pairs of other devices' experts."""
    num_experts = values_of(experts[0]).shape[0]
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=num_experts).astype(jnp.int32)
    of_row = jnp.minimum(expert[order], num_experts - 1)

    def product(x, weight):
        values = values_of(weight).astype(x.dtype)
        dtype = _dtype_of_sums(x, weight)
        out = grouped.rows_product(x, values, sizes, inputs, dtype)
        return _rescaled(out, weight, of_row, x.dtype)

    # Rows after the last group hold arbitrary numbers, in the backward pass too: they belong to no
    # token.
    token = jnp.where(expert[order] < num_experts, order // per_token, x.shape[0])
    rows = x.at[token].get(mode="fill", fill_value=0)
    out = _mlp(activate, product, rows, experts)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size))
    return jnp.where((expert < num_experts)[:, None], out[place], 0)


def _by_blocks(activate: Activate, inputs, how, x, expert, experts, per_token: int):
    """`_by_rows` in blocks of one expert each."""
    blocks = grouped.blocks_of_groups(expert, values_of(experts[0]).shape[0], how)

    def product(x, weight):
        dtype = _dtype_of_sums(x, weight)
        out = grouped.block_product(x, values_of(weight), blocks, inputs, how, dtype)
        return _rescaled(out, weight, blocks.group, x.dtype)

    rows = x.at[blocks.row // per_token].get(mode="fill", fill_value=0)
    out = _mlp(activate, product, rows, experts).reshape(-1, x.shape[1])
    return out.at[blocks.place].get(mode="fill", fill_value=0)


def _mlp(activate: Activate, product, x, experts):
    gate, up, down = experts
    return product(activate(product(x, gate), product(x, up)), down)


def _dtype_of_sums(x: Array, weight: Leaf) -> jnp.dtype:
    """Return the dtype of sums, as in `quantization.product`: without their scale sums may exceed
    float16."""
    quantized = isinstance(weight, Quantized)
    return jnp.promote_types(x.dtype, jnp.bfloat16) if quantized else x.dtype


def _rescaled(out: Float[Array, "*R O"], weight: Leaf, expert: Int[Array, " N"], dtype) -> Array:
    """Products with the values of 8-bit weights, times the scales of each row's, or block's,
    expert."""
    if not isinstance(weight, Quantized):
        return out
    scale = weight.scale[expert]
    if out.ndim > 2:
        scale = scale[:, None]
    return (out * scale).astype(dtype)
