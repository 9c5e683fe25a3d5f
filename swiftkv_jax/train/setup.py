"""What a run needs before its first step: the model cut in two, the data, and a record of both."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ..checkpoints import load, open_any
from ..checkpoints.auxiliary import load_tokenizer
from ..checkpoints.digest import digest_all
from ..checkpoints.training_run import RECIPE
from ..cli.exit import log
from ..config import Config
from ..errors import CheckpointError, ConfigError, UsageError
from ..io.files import write_json
from ..model import Model
from ..params import init_swiftkv
from ..quantization import refuse_quantized
from ..sharding import swiftkv_shardings
from .data.loader import RowMixture
from .data.prepare import prepare
from .data.sources import STDLIB, parse_source
from .recipe import Recipe

DATA = "data"
"""Prepared data, in the output folder."""


def choose_cut(recipe: Recipe, found: Config) -> Config:
    """The architecture at the cut that the recipe asks for; its own cut, or half the layers, where
    it asks for none.

    Raises `UsageError` for settings that do not fit the model.
    """
    has_delta = found.num_upper_layers > 0
    layers = recipe.num_key_value_layers or (
        found.num_key_value_layers if has_delta else max(1, found.num_layers // 2)
    )
    same_layers = has_delta and layers == found.num_key_value_layers
    group = recipe.key_value_group_size or (found.key_value_group_size if same_layers else 1)
    try:
        config = found.cut(layers, group)
    except ConfigError as error:
        raise UsageError(
            f"--num-key-value-layers {layers} with --key-value-group-size {group}: {error}"
        ) from None
    if recipe.max_length > config.max_position_embeddings:
        raise UsageError(
            f"--max-length {recipe.max_length}: this model has {config.max_position_embeddings} "
            f"positions"
        )
    if not -config.num_layers - 1 <= recipe.hidden_loss_layer <= config.num_layers:
        limits = f"from {-config.num_layers - 1} to {config.num_layers}"
        raise UsageError(f"--hidden-loss-layer {recipe.hidden_loss_layer}: must be {limits}")
    if recipe.kl_top_k is not None and recipe.kl_top_k > config.vocab_size:
        raise UsageError(f"--kl-top-k {recipe.kl_top_k}: this model has {config.vocab_size} tokens")
    if config.num_upper_layers == 0:
        raise UsageError(
            f"--num-key-value-layers {layers}: this model has {config.num_layers} layers, so "
            f"nothing is left to distil"
        )
    return config


def load_model(recipe: Recipe, config: Config, mesh: Mesh) -> Model:
    """The frozen weights split at the cut, and a delta: the checkpoint's own if it has this cut,
    else a fresh one."""
    model = load(recipe.model, dtype=recipe.dtype, mesh=mesh, config=config)
    refuse_quantized(model.llama, f"{recipe.model}: training")
    if model.swiftkv is None:
        init = jax.jit(
            init_swiftkv, static_argnums=0, out_shardings=swiftkv_shardings(config, mesh)
        )
        model = dataclasses.replace(model, swiftkv=init(config, model.llama))
    return model


def open_tokenizer(recipe: Recipe) -> Any:
    """The model's tokenizer, without its weights. Raises `UsageError` if it has none."""
    tokenizer = load_tokenizer(Path(recipe.model), open_any(recipe.model).auxiliary_files)
    if tokenizer is None:
        raise UsageError(f"--model {recipe.model}: it has no tokenizer, so text cannot be read")
    return tokenizer


def load_data(recipe: Recipe, tokenizer: Any) -> tuple[RowMixture, RowMixture | None]:
    """Training rows, and held-out rows if there are any; made once, then kept in the output
    folder."""
    training = _mixture(recipe.data, recipe, tokenizer, held_out=False)
    if recipe.eval_data is None:
        return training, None
    held_out = _mixture((recipe.eval_data,), recipe, tokenizer, held_out=True)
    if held_out.stores[0].manifest.fingerprint in {
        store.manifest.fingerprint for store in training.stores
    }:
        say(
            f"warning: --eval-data {recipe.eval_data} is training data too: its numbers say "
            f"nothing about other text"
        )
    return training, held_out


def _mixture(
    texts: tuple[str, ...], recipe: Recipe, tokenizer: Any, *, held_out: bool
) -> RowMixture:
    sources = [parse_source(text) for text in texts]
    stores = [
        prepare(
            source,
            tokenizer,
            recipe.max_length,
            recipe.output_dir / DATA,
            held_out=held_out and source.path == STDLIB,
            max_unreadable_share=recipe.max_unreadable_share,
        )
        for source in sources
    ]
    return RowMixture(tuple(stores), tuple(source.weight for source in sources))


def fingerprint(recipe: Recipe, model: Model, rows: RowMixture, steps: int) -> dict[str, Any]:
    """What must be the same for a checkpoint to be continued: weights, data, and the settings that
    steer the updates.

    Not the mesh, the micro-batches or what is recomputed: they change nothing but rounding.
    """
    settings = (
        "batch_size max_length learning_rate lr_schedule warmup_ratio max_grad_norm "
        "temperature kl kl_top_k "
    )
    settings += "hidden_loss_weight hidden_loss_layer seed"
    return {name: getattr(recipe, name) for name in settings.split()} | {
        "steps": steps,
        "dtype": str(model.dtype),
        "num_key_value_layers": model.config.num_key_value_layers,
        "key_value_group_size": model.config.key_value_group_size,
        "base_model": digest_all(jax.tree.leaves(model.llama)),
        "first_delta": digest_all(jax.tree.leaves(model.swiftkv)),
        "data": rows.fingerprint,
    }


def describe(recipe: Recipe, model: Model, mesh: Mesh) -> str:
    config = model.config
    frozen, trained = (
        sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (model.llama, model.swiftkv)
    )
    device = mesh.devices.flat[0]
    emulated = (
        " (emulated: for trying out, not for speed)"
        if device.platform == "cpu" and mesh.size > 1
        else ""
    )
    axes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
    processes = "" if jax.process_count() == 1 else f" in {jax.process_count()} processes"
    return (
        f"{recipe.model}: {frozen:,} frozen and {trained:,} trained parameters; "
        f"{config.num_key_value_layers} of {config.num_layers} "
        f"layers own their keys and values, the others share in groups of "
        f"{config.key_value_group_size}\n"
        f"{model.dtype} on {mesh.size} x {device.device_kind}{processes}, {axes}{emulated}"
    )


def write_settings(recipe: Recipe, config: Config, steps: int, mfu_of: str) -> None:
    """The resolved recipe beside the run, for whoever finds it later, and for `convert`."""
    settings = dataclasses.asdict(recipe) | {
        "output_dir": str(recipe.output_dir),
        "model": str(Path(recipe.model).absolute()),
        "mesh": str(recipe.mesh),
        "max_steps": steps,
        "config": dataclasses.asdict(config),
        "mfu_of": mfu_of,
        "jax": jax.__version__,
    }
    write_json(recipe.output_dir / RECIPE, settings, canonical=True)


def source_dtype(model: Model) -> jnp.dtype:
    """The dtype the checkpoint came in: what the run read widened is written as it was. Raises
    `CheckpointError`."""
    hf = model.auxiliary_files.hf_config
    name = hf.get("torch_dtype") or hf.get("dtype") or model.dtype
    if name not in ("float32", "bfloat16", "float16", model.dtype):
        raise CheckpointError(
            f"config.json: torch_dtype={name!r} is not supported; supported: float32, bfloat16, "
            f"float16"
        )
    return jnp.dtype(name)


def say(message: str) -> None:
    """`cli.log`, once for all processes."""
    if jax.process_index() == 0:
        log(message)
