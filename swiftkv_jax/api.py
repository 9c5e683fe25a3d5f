"""The public functions: short compositions of the modules that do the work."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import Array, ArrayLike, Float, Int

from .errors import UsageError
from .kernel_check import (
    KernelConfig,
    checked_implementation,
    forward_configs,
    training_configs,
)
from .model import transformer
from .model.attention import Attention
from .model.batch import Batch, unpacked_batch
from .model.config import Config, GeneratedKV
from .model.cut import choose_generated_kv
from .model.layers import unembed
from .model.mesh import dp_size, mesh_of
from .model.model import Model, check_model, cut_of
from .model.params import Llama, SwiftKV
from .model.quantization import refuse_quantized
from .model.sharding import batch_sharding
from .model.stacks import cast, split_layers
from .pallas_kernels import Implementation

if TYPE_CHECKING:  # imported where it is used: `load` needs neither scipy nor training
    from .calibration import LayerFit


def load(
    path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    dtype: jnp.dtype | str | None = None,
    mesh: Mesh | None = None,
    quantization: Literal["none", "fp8", "int8"] | None = None,
    adapter: str | os.PathLike[str] | None = None,
) -> Model:
    """Load a Hugging Face directory (of a family in docs/models.md, or SwiftKV as the authors
    publish it), a GGUF file, a directory written by `save`, or a model of the Hugging Face Hub.

    Where nothing is at `path` and it is spelled ORGANISATION/NAME, that repository is downloaded
    into the Hub's cache, at `revision`: a branch, a tag or a commit.
    `dtype` None is bfloat16 on accelerators and float32 on a CPU. With `mesh` (axes `data` and
    `model`) each weight is read straight into its shards. `quantization` fp8 or int8 quantises the
    layers' matrices per output channel while they are read, `"none"` dequantises those of a
    quantised checkpoint, and None takes them as they are, or decoded to `dtype` where the format is
    not one of these two; see `quantization.Scheme` for how products then run. A quantised model is
    for inference. `adapter` is a LoRA adapter of PEFT, a directory or a name on the Hub, which is
    merged while the weights are read. Raises `CheckpointError` for anything missing, damaged or
    unsupported.
    """
    from . import checkpoints
    from .checkpoints.hub import local_path

    path = local_path(path, revision)
    if adapter is not None:
        adapter = local_path(adapter, weights=False)
    return checkpoints.load(
        path, dtype=dtype, mesh=mesh, quantization=quantization, adapter=adapter
    )


def save(model: Model, path: str | os.PathLike[str]) -> None:
    """Write a model with Orbax, leaf by leaf, with a digest for each. Nothing appears at `path`
    until all is written.

    Raises `UsageError` if `path` exists.
    """
    from . import checkpoints

    checkpoints.save(model, path)


def save_hf(
    model: Model,
    path: str | os.PathLike[str],
    *,
    format: Literal["full", "delta", "expanded"] = "full",
) -> None:
    """Write safetensors and a config.json. Nothing appears at `path` until all is written.

    `full` holds teacher and delta, which the authors' stack loads unless layers share a calibrated
    basis (`SwiftKV.mix`); `delta` only what was trained; `expanded` gives every upper layer the
    keys and values that it makes of its group's, for loaders without groups or mixes. Raises
    `UsageError` if `path` exists.
    """
    from . import checkpoints

    checkpoints.save_hf(model, path, format=format)


def logits(
    model: Model,
    tokens: Int[ArrayLike, "B T"] | Sequence[Sequence[int]],
    *,
    swiftkv: bool | None = None,
    prompt_lengths: Int[ArrayLike, " B"] | Sequence[int] | None = None,
) -> Float[Array, "B T V"]:
    """Logits of every position of whole rows, float32, all layers for all tokens.

    `swiftkv` False is the teacher, True the student, None the student if there is a delta. For a
    student whose `config.generated_kv` is `own`, tokens from `prompt_lengths` - `config.exact_tail`
    on keep their own keys and values in the upper layers; None takes each whole row for a prompt.
    Raises `ValueError` for the student of a model without a delta, for the teacher of one whose
    upper projections were dropped, and if `tokens` are not rows of token ids that the model can
    take or `prompt_lengths` not a length for each.
    """
    check_model(model)
    config = model.config
    delta = model.swiftkv if model.uses_swiftkv(swiftkv) else None
    attention = _attention(model, gradient=False)
    tokens = _rows(config, tokens)
    lengths = _prompt_lengths(tokens, prompt_lengths)
    if delta is None:
        lengths = None
    return _logits(config, attention, model.llama, delta, tokens, lengths)


def _attention(model: Model, *, gradient: bool) -> Attention:
    """Attention for whole rows on the devices of the model, by kernels that have been checked."""
    mesh = mesh_of(model.llama.embed)
    embed = model.llama.embed
    configs = (training_configs if gradient else forward_configs)(model.config, embed.dtype, mesh)
    return Attention(mesh, _checked(tuple(configs), jax.local_devices()[0]))


@functools.cache
def _checked(configs: tuple[KernelConfig, ...], device: Any) -> Implementation | None:
    """`checked_implementation`, whose verdicts are read only once in a process."""
    return checked_implementation(None, configs, device)


def _rows(config: Config, tokens: Any) -> Int[Array, "B T"]:
    """`tokens`, arrays or lists, as an array. Ids are checked unless they are traced or other
    processes hold some of them."""
    try:
        tokens = jnp.asarray(tokens)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            "`tokens` must be rows of token ids, whole numbers, all rows of one length"
        ) from error
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise UsageError(
            f"`tokens` must be rows of token ids (integers, batch x length), got {tokens.dtype} "
            f"of shape {tokens.shape}"
        )
    if tokens.shape[1] > config.max_position_embeddings:
        raise UsageError(
            f"`tokens` has rows of {tokens.shape[1]} tokens; the model has "
            f"{config.max_position_embeddings} positions: shorten the rows"
        )
    if not isinstance(tokens, Tracer) and tokens.is_fully_addressable:
        ids = np.asarray(tokens)
        if (outside := ids[(ids < 0) | (ids >= config.vocab_size)]).size:
            raise UsageError(
                f"`tokens`: token id {outside[0]} is outside the vocabulary of {config.vocab_size}"
            )
    return tokens


def _prompt_lengths(tokens: Int[Array, "B T"], lengths: Any) -> Int[Array, " B"]:
    """`prompt_lengths` as an array; those of whole rows for None."""
    rows, columns = tokens.shape
    if lengths is None:
        return jnp.full(rows, columns, jnp.int32)
    try:
        lengths = jnp.asarray(lengths)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError("`prompt_lengths` must be whole numbers, one for each row") from error
    if lengths.shape != (rows,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise UsageError(
            f"`prompt_lengths` must be a whole number for each of the {rows} rows, got "
            f"{lengths.dtype} of shape {lengths.shape}"
        )
    if not isinstance(lengths, Tracer) and lengths.is_fully_addressable:
        values = np.asarray(lengths)
        if (outside := values[(values < 0) | (values > columns)]).size:
            raise UsageError(
                f"`prompt_lengths`: {outside[0]} must be from 0 to the {columns} tokens of a row"
            )
    return lengths


def _weights(tokens: Int[Array, "B T"], loss_mask: Any) -> Float[Array, "B T"]:
    """`loss_mask` as an array."""
    try:
        mask = jnp.asarray(loss_mask, jnp.float32)
    except (TypeError, ValueError) as error:
        raise UsageError("`loss_mask` must be rows of numbers, as those of `tokens`") from error
    if mask.shape != tokens.shape:
        raise UsageError(
            f"`loss_mask` must have the shape of `tokens`, {tokens.shape}, got {mask.shape}"
        )
    return mask


@functools.partial(jax.jit, static_argnums=(0, 1))
def _logits(
    config: Config,
    attention: Attention,
    llama: Llama,
    delta: SwiftKV | None,
    tokens: Int[Array, "B T"],
    prompt_lengths: Int[Array, " B"] | None,
):
    batch = _with_own(config, unpacked_batch(tokens), prompt_lengths)
    if delta is None:
        hidden = transformer.teacher(config, llama, batch, attention=attention)
    else:
        delta = cast(delta, llama.embed.dtype)  # that of a master copy is wider
        hidden = transformer.student(
            config, llama, delta, batch, attention=attention, own=batch.own
        )
    return unembed(config, llama, hidden)


def _with_own(config: Config, batch: Batch, prompt_lengths: Int[Array, " B"] | None) -> Batch:
    """The batch with `own` set for the tokens that keep their own upper keys and values, if there
    are any."""
    if prompt_lengths is None or config.generated_kv == "boundary":
        return batch
    first = jnp.asarray(prompt_lengths) - config.exact_tail
    return dataclasses.replace(batch, own=batch.positions >= first[:, None])


def distill_loss(
    model: Model,
    tokens: Int[ArrayLike, "B T"] | Sequence[Sequence[int]],
    loss_mask: Float[ArrayLike, "B T"],
    *,
    temperature: float = 2.0,
    hidden_weight: float = 1.0,
    hidden_layer: int = -2,
    prompt_lengths: Int[ArrayLike, " B"] | Sequence[int] | None = None,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The loss of the authors' trainer (ArcticTraining `projects/swiftkv/train.py`), and its two
    parts.

    logits_loss is the mean over all B T positions of loss_mask * temperature^2 * KL(teacher ||
    student), hidden_loss the mean squared difference of `hidden_states[hidden_layer]` over all
    positions and dimensions, loss their sum with `hidden_weight`. `loss_mask[b, t]` weighs the
    prediction made at position t, `prompt_lengths` are those of `logits`. Differentiable in
    `model.swiftkv`; the frozen weights get no gradient. Raises `ValueError` for a model without a
    delta, and for tokens and `prompt_lengths` as `logits` does.
    """
    from .train.loss.objective import Objective

    check_model(model)
    if model.swiftkv is None:
        raise ValueError("distill_loss needs a model with a delta: add one with add_swiftkv")
    refuse_quantized((model.llama, model.swiftkv), "distill_loss")
    tokens = _rows(model.config, tokens)
    batch = unpacked_batch(tokens, _weights(tokens, loss_mask))
    batch = _with_own(model.config, batch, _prompt_lengths(tokens, prompt_lengths))
    sums = _distill_sums()(
        model.config,
        model.swiftkv,
        model.llama,
        batch,
        objective=Objective(temperature=temperature, hidden_layer=hidden_layer),
        attention=_attention(model, gradient=True),
    )
    metrics = {
        "logits_loss": sums.divergence / tokens.size,
        "hidden_loss": sums.hidden / tokens.size,
    }
    return metrics["logits_loss"] + hidden_weight * metrics["hidden_loss"], metrics


class Calibrated(NamedTuple):
    """Result of `calibrate`."""

    model: Model
    layers: tuple[LayerFit, ...]
    """Fit of the keys and values of the upper layers, except those of
    `prompt_attention_layers`, which stay the teacher's."""


def calibrate(
    model: Model,
    data: Sequence[str] | Sequence[Sequence[int]] | Int[ArrayLike, "B T"],
    num_key_value_layers: int,
    key_value_group_size: int = 1,
    *,
    prompt_attention_layers: int = 0,
    prompt_mlp_neurons: int = 0,
    boundary_taps: int = 0,
    generated_kv: GeneratedKV | None = None,
    exact_tail: int | None = None,
    exact_head: int | None = None,
    max_length: int = 2048,
    batch_size: int = 1,
) -> Calibrated:
    """A student in closed form, without training: the upper layers' keys and values by least
    squares from the hidden state that enters the first of them (see `calibration`), improved by
    the attention of `prompt_attention_layers`, their `prompt_mlp_neurons` and `boundary_taps` (see
    `Config`).

    `data` are texts, for a model with a tokenizer, or rows of token ids; about 256 tokens per entry
    of the hidden state suffice. They are packed into rows of at most `max_length` tokens, of which
    `batch_size` run at a time. On a mesh, rows of padding fill each batch up to a multiple of the
    devices along `data` and `fsdp`: the student is the same on every mesh and with every
    `batch_size`, to rounding. Any delta that the model has is left behind. `generated_kv`,
    `exact_tail` and `exact_head` are what the student is fitted to and served with
    (`Config.generated_kv`); None is as the model says. Raises `ConfigError` if the cut does not
    fit, `UsageError` if these or `batch_size` do not, for a quantised model and for data that are
    neither or without tokens, and `ValueError` if the teacher's upper projections were dropped.
    """
    from . import calibration
    from .train.data.batches import calibration_batches

    config = cut_of(
        model,
        num_key_value_layers,
        key_value_group_size,
        prompt_attention_layers,
        prompt_mlp_neurons,
        boundary_taps,
        generated_kv=generated_kv,
        exact_head=exact_head,
    )
    config = choose_generated_kv(config, generated_kv, exact_tail, exact_head)
    refuse_quantized(model.llama, "calibrate")
    if config.num_upper_layers == 0:
        raise UsageError(f"`num_key_value_layers`={num_key_value_layers}: no layer is left to fit")
    length = min(max_length, config.max_position_embeddings)
    llama = split_layers(config, model.llama)
    attention = _attention(model, gradient=False)
    batches = calibration_batches(
        data,
        model.tokenizer,
        config.vocab_size,
        length,
        batch_size,
        dp_size=dp_size(attention.mesh),
    )
    if attention.mesh is not None:
        where = batch_sharding(attention.mesh)
        batches = (jax.device_put(batch, where) for batch in batches)
    fit = calibration.calibrate(config, llama, batches, attention=attention)
    fitted = dataclasses.replace(
        model,
        config=fit.config,
        llama=llama,
        swiftkv=fit.delta,
        auxiliary_files=model.auxiliary_files.of_new_student(),
    )
    return Calibrated(fitted, fit.layers)


@functools.cache
def _distill_sums() -> Callable[..., Any]:
    """`train.distill.distill_sums`, compiled; imported when a loss is asked for."""
    from .train.loss.distill import distill_sums

    return jax.jit(distill_sums, static_argnames=("config", "objective", "attention"))
