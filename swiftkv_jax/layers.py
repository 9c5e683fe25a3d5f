"""The parts of a Llama layer: normalisation, rotary embeddings, projections, MLP, embedding and
head.

Letters as in `params`; B batch, T positions. Matrix products run in the parameters' dtype (those
with quantised matrices as `quantization.product` says), norms and rotary angles in float32.
"""

from __future__ import annotations

import functools
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .config import Config
from .params import Block, Leaf, ServingBlock
from .quantization import Quantized, as_matrix, product


@runtime_checkable
class Ends(Protocol):
    """The weights before and after the layers: a `Llama`, or one that is unstacked for serving."""

    @property
    def embed(self) -> Leaf: ...  # V D
    @property
    def final_norm(self) -> Leaf: ...  # D
    @property
    def lm_head(self) -> Leaf: ...  # V D; None when tied to `embed`


# The backward pass recomputes these functions from their inputs, which costs little, instead of
# keeping their float32 intermediates. Inside a scan `prevent_cse` is not needed.
_rematerialized = functools.partial(jax.checkpoint, prevent_cse=False)


@functools.partial(_rematerialized, static_argnums=2)
def rms_norm(
    x: Float[Array, "*B D"], scale: Float[Array, " D"], eps: float
) -> Float[Array, "*B D"]:
    """Root-mean-square norm: float32 inside, cast back before the scale is applied, as Hugging
    Face's Llama does."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * scale


def rope_frequencies(config: Config) -> Float[Array, " H_half"]:
    """Radians per position of each rotated pair, after scaling (`RopeScaling` says by which
    rule)."""
    exponent = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    frequency = config.rope_theta**-exponent
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    if scaling.rope_type == "linear":
        return frequency / scaling.factor
    # llama3: share of the stretched frequency falls from 1 to 0 as the turns made within the
    # pretraining length rise from low_freq_factor to high_freq_factor.
    turns = scaling.original_max_position_embeddings * frequency / (2 * jnp.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = jnp.clip(keep, 0.0, 1.0)
    return keep * frequency + (1 - keep) * frequency / scaling.factor


def rope_table(config: Config, positions: Int[Array, "B T"]) -> Float[Array, "2 B T H_half"]:
    """Cosines and sines of every position, float32. Made once per forward pass and shared by all
    layers."""
    angle = positions[..., None].astype(jnp.float32) * rope_frequencies(config)
    return jnp.stack([jnp.cos(angle), jnp.sin(angle)])


@_rematerialized
def apply_rope(
    x: Float[Array, "B T *J N H"], rope: Float[Array, "2 B T H_half"]
) -> Float[Array, "B T *J N H"]:
    """Rotate each head; the first half of H pairs with the second, as in the Hugging Face
    checkpoints."""
    cos, sin = rope.reshape(*rope.shape[:3], *(1,) * (x.ndim - 3), rope.shape[-1])
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def project_heads(
    x: Float[Array, "B T D"],
    weight: Float[Array, "N H D"] | Quantized,
    bias: Float[Array, "N H"] | None,
) -> Float[Array, "B T N H"]:
    """A query, key or value projection."""
    out = product("BTD,NHD->BTNH", x, weight)
    return out if bias is None else out + bias


def mix_values(
    attended: Float[Array, "B T N H"], mix: Float[Array, "K H H"]
) -> Float[Array, "B T N H"]:
    """What attention to the layer's own values returns, from attention to those of its group."""
    heads = attended.reshape(*attended.shape[:2], mix.shape[0], -1, attended.shape[-1])
    return jnp.einsum("BTKRH,KGH->BTKRG", heads, mix).reshape(attended.shape)


def output_and_mlp(
    config: Config,
    block: Block | ServingBlock,
    x: Float[Array, "B T D"],
    attended: Float[Array, "B T N H"],
) -> Float[Array, "B T D"]:
    """All that follows attention: output projection, residual, SwiGLU MLP, residual."""
    with jax.named_scope("attention_output"):
        heads = attended.reshape(*x.shape[:2], -1)
        # M = N H
        out = product("BTM,DM->BTD", heads, as_matrix(block.o))
        x = x + (out if block.o_bias is None else out + block.o_bias)
    with jax.named_scope("mlp"):
        h = rms_norm(x, block.mlp_norm, config.norm_eps)
        return x + product("BTF,DF->BTD", _gated(*_gate_and_up(block, h)), block.down)


def _gate_and_up(
    block: Block | ServingBlock, h: Float[Array, "B T D"]
) -> tuple[Float[Array, "B T F"], Float[Array, "B T F"]]:
    if isinstance(block, ServingBlock):
        both = product("BTD,PFD->BTPF", h, block.gate_up)
        return both[:, :, 0], both[:, :, 1]
    return product("BTD,FD->BTF", h, block.gate), product("BTD,FD->BTF", h, block.up)


@_rematerialized
def _gated(gate: Float[Array, "B T F"], up: Float[Array, "B T F"]) -> Float[Array, "B T F"]:
    return jax.nn.silu(gate) * up


def embed(llama: Ends, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    return llama.embed[tokens]


def head_weights(llama: Ends) -> Float[Array, "V D"]:
    """The output matrix: its own, or the embedding's when they are tied."""
    return llama.embed if llama.lm_head is None else llama.lm_head


def unembed(config: Config, llama: Ends, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
    """Final norm and logits, accumulated and returned in float32."""
    x = rms_norm(x, llama.final_norm, config.norm_eps)
    return jnp.einsum("BTD,VD->BTV", x, head_weights(llama), preferred_element_type=jnp.float32)
