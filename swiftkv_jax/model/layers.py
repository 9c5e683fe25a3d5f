"""The parts of a layer: norms, projections, MLP, embedding and head; the rotation is in `rope`.

Letters as in `params`; B batch, T positions. Matrix products run in the parameters' dtype (those
with quantised matrices as `quantization.product` says), norms in float32.
"""

from __future__ import annotations

import functools
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from .attention import DEFAULT, Attention
from .config import Activation, Config
from .experts import mixture
from .low_rank import Adapted
from .mesh import FSDP, MODEL
from .params import Block, Leaf, PromptMLP, ServingBlock
from .quantization import (
    NormOptions,
    Quantized,
    QuantizedRows,
    as_matrix,
    merge_outputs,
    product,
    quantized_norm,
    quantized_swiglu,
    values_of,
)


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


@functools.partial(_rematerialized, static_argnums=(2, 3, 4))
def rms_norm(
    x: Float[Array, "*B D"],
    scale: Float[Array, "*_ D"],
    eps: float,
    offset: bool,
    wide: bool,
) -> Float[Array, "*B D"]:
    """Root-mean-square norm: float32 inside, cast back before the scale is applied, as Hugging
    Face's Llama does; with `wide` after it. `offset`: the scale is one more than `scale`."""
    normed = x.astype(jnp.float32)
    normed = normed * jax.lax.rsqrt(jnp.mean(jnp.square(normed), axis=-1, keepdims=True) + eps)
    if offset:
        scale = 1.0 + scale.astype(jnp.float32)
    if not wide:
        return normed.astype(x.dtype) * scale.astype(x.dtype)
    return (normed * scale.astype(jnp.float32)).astype(x.dtype)


def norm(
    config: Config, x: Float[Array, "*B D"], scale: Float[Array, "*_ D"] | None
) -> Float[Array, "*B D"]:
    """The model's `rms_norm`; `x` itself if it has none here."""
    if scale is None:
        return x
    return rms_norm(x, scale, config.norm_eps, config.norm_offset, config.norm_wide)


def norm_of_sum(
    config: Config,
    x: Float[Array, "*B D"],
    added: Float[Array, "*B D"] | None,
    scale: Float[Array, " D"] | None,
    weight: Float[Array, "*W"] | Quantized | Adapted | None,
) -> tuple[Float[Array, "*B D"], Float[Array, "*B D"] | QuantizedRows]:
    """(x + added, its `norm` as a product with `weight` takes it); of x where `added` is None."""
    if scale is not None:
        options = NormOptions(config.norm_eps, config.norm_offset, config.norm_wide)
        found = quantized_norm(x, added, scale, options, weight)
        if found is not None:
            return found
    if added is not None:
        x = x + added
    return x, norm(config, x, scale)


def norm_heads(
    config: Config, x: Float[Array, "B T *J N H"], scale: Float[Array, "*J Nq"] | None
) -> Float[Array, "B T *J N H"]:
    """The norm of queries or keys: of each head by itself, or of all heads together."""
    if scale is None:
        return x
    if config.qk_norm == "head":
        return norm(config, x, scale[..., None, :])
    return norm(config, x.reshape(*x.shape[:-2], -1), scale).reshape(x.shape)


def scaled(x: Float[Array, "*B"], factor: float) -> Float[Array, "*B"]:
    """`x` times a constant that is not rounded to the dtype of `x` first."""
    if factor == 1.0:
        return x
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def project_heads(
    x: Float[Array, "B T D"] | QuantizedRows,
    weight: Float[Array, "*N H D"] | Quantized | Adapted,
    bias: Float[Array, "*N H"] | None,
) -> Float[Array, "B T *N H"]:
    """Projections to heads: queries, keys, values, or all of them."""
    # As a matrix: weights of three axes XLA would transpose on a CPU, in every call.
    matrix = merge_outputs(weight)
    heads = values_of(weight).shape[:-1]
    out = product("BTD,MD->BTM", x, matrix).reshape(*x.shape[:2], *heads)
    if bias is None:
        return out
    return out + bias


def mix_values(
    attended: Float[Array, "B T N H"], mix: Float[Array, "K H H"]
) -> Float[Array, "B T N H"]:
    """Turn attention to the values of the group into attention to the layer's own values."""
    heads = attended.reshape(*attended.shape[:2], mix.shape[0], -1, attended.shape[-1])
    return jnp.einsum("BTKRH,KGH->BTKRG", heads, mix).reshape(attended.shape)


def output_and_mlp(
    config: Config,
    block: Block | ServingBlock,
    x: Float[Array, "B T D"],
    attended: Float[Array, "B T N H"],
    attention: Attention = DEFAULT,
) -> Float[Array, "B T D"]:
    """Everything after attention: output projection, residual, gated MLP or mixture of experts,
    residual. Experts run on the mesh of `attention`."""
    attended = attention_output(config, block, attended)
    with jax.named_scope("mlp"):
        gate_up = block.gate_up if isinstance(block, ServingBlock) else None
        x, h = norm_of_sum(config, x, attended, block.mlp_norm, gate_up)

        if block.router is None:
            out = product("BTF,DF->BTD", _activations(config, block, h, attention.mesh), block.down)
        else:

            def activate(gate, up):
                return _gated(gate, up, config.activation)

            assert not isinstance(h, QuantizedRows)
            out = mixture(config, block, h, activate, attention)
        return x + scaled(norm(config, out, block.mlp_post), config.residual_scale)


def attention_output(
    config: Config, block: Block | ServingBlock, attended: Float[Array, "B T N H"]
) -> Float[Array, "B T D"]:
    """Output projection: what attention adds to the hidden state."""
    with jax.named_scope("attention_output"):
        heads = attended.reshape(*attended.shape[:2], -1)
        # M = N H
        out = product("BTM,DM->BTD", heads, as_matrix(block.o))
        if block.o_bias is not None:
            out += block.o_bias
        return scaled(norm(config, out, block.attn_post), config.residual_scale)


def add_mapped(
    config: Config,
    block: Block | ServingBlock,
    x: Float[Array, "B T D"],
    mlp: PromptMLP,
) -> Float[Array, "B T D"]:
    """Apply the stand-in for the MLP of a layer of which prompts run only the attention: a linear
    map of its input, some of its neurons, and the residual."""
    with jax.named_scope("mlp_map"):
        h = norm(config, x, block.mlp_norm)
        out = product("BTD,ED->BTE", h, mlp.map)
        if mlp.gate is not None:
            out = out + product("BTS,DS->BTD", run_neurons(config, h, mlp.gate, mlp.up), mlp.down)
        return x + out


def run_neurons(
    config: Config, h: Float[Array, "B T D"], gate: Float[Array, "S D"], up: Float[Array, "S D"]
) -> Float[Array, "B T S"]:
    """Activations of neurons of an MLP, from its input."""
    return _gated(product("BTD,SD->BTS", h, gate), product("BTD,SD->BTS", h, up), config.activation)


def _activations(
    config: Config,
    block: Block | ServingBlock,
    h: Float[Array, "B T D"] | QuantizedRows,
    mesh: Mesh | None,
) -> Float[Array, "B T F"] | QuantizedRows:
    """Activations of the MLP's neurons, as the product with `down` takes them."""
    if isinstance(block, Block):
        gate, up = product("BTD,FD->BTF", h, block.gate), product("BTD,FD->BTF", h, block.up)
    elif mesh is None or mesh.shape[MODEL] == mesh.shape.get(FSDP, 1) == 1:
        gate_up = product("BTD,MD->BTM", h, merge_outputs(block.gate_up))
        if config.activation == "silu":
            rows = quantized_swiglu(gate_up, block.down)
            if rows is not None:
                return rows
        gate, up = jnp.split(gate_up, 2, -1)
    else:  # merged axes could not stay split
        both = product("BTD,PFD->BTPF", h, block.gate_up)
        gate, up = both[:, :, 0], both[:, :, 1]
    return _gated(gate, up, config.activation)


@functools.partial(_rematerialized, static_argnums=2)
def _gated(
    gate: Float[Array, "*B F"], up: Float[Array, "*B F"], activation: Activation
) -> Float[Array, "*B F"]:
    if activation == "silu":
        return jax.nn.silu(gate) * up
    # Wide: its tanh of a polynomial in bfloat16 would round at every step.
    return jax.nn.gelu(gate.astype(jnp.float32), approximate=True).astype(gate.dtype) * up


def embed(
    config: Config, embedding: Float[Array, "V D"], tokens: Int[Array, "B T"]
) -> Float[Array, "B T D"]:
    """The tokens' rows of the embedding, scaled."""
    scale = config.embed_scale
    if config.round_embed_scale:
        scale = float(np.asarray(scale, embedding.dtype))
    return scaled(embedding[tokens], scale)


def head_weights(llama: Ends) -> Float[Array, "V D"]:
    """The output matrix: its own, or the embedding's when they are tied."""
    return llama.embed if llama.lm_head is None else llama.lm_head


def finish_logits(config: Config, logits: Float[Array, "*B V"]) -> Float[Array, "*B V"]:
    """Logits from products with the output matrix: divided and capped, in float32."""
    if config.logit_divisor != 1.0:
        logits = logits / config.logit_divisor
    if config.logit_cap is not None:
        logits = config.logit_cap * jnp.tanh(logits / config.logit_cap)
    return logits


def unfinished_gradient(
    config: Config, gradient: Float[Array, "*B V"], logits: Float[Array, "*B V"]
) -> Float[Array, "*B V"]:
    """The gradient with respect to the input of `finish_logits`, from the gradient with respect to
    its result `logits`."""
    if config.logit_cap is not None:
        gradient = gradient * (1 - jnp.square(logits / config.logit_cap))
    return gradient if config.logit_divisor == 1.0 else gradient / config.logit_divisor


def unembed(config: Config, llama: Ends, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
    """Final norm and logits, accumulated and returned in float32."""
    x = norm(config, x, llama.final_norm)
    logits = product("BTD,VD->BTV", x, head_weights(llama), jnp.float32)
    return finish_logits(config, logits)
