"""Preparation of a run before its first step: the model at its cut, the data, and the record of
both."""

from __future__ import annotations

import dataclasses
import logging
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ...calibration import check_groups
from ...checkpoints import load, open_any
from ...checkpoints.auxiliary import load_tokenizer
from ...checkpoints.digest import digest_all
from ...checkpoints.training_run import RECIPE, config_differences
from ...errors import CheckpointError, ConfigError, OutOfMemoryError, UsageError
from ...model.config import Config
from ...model.cut import (
    CUT_FIELDS,
    choose_cut,
    choose_generated_kv,
    describe_cut,
    drop_own,
    has_same_delta,
)
from ...model.model import Model
from ...model.params import llama_shapes, swiftkv_shapes
from ...model.quantization import refuse_quantized
from ...plan.hardware import GIB
from ...process.files import write_json
from ...process.json_files import read_json
from ..data.loader import DatasetMixture
from ..data.prepare import Preparation
from ..data.sources import parse_source, unweighted
from ..recipe import STEERING, Recipe
from ..run_options import RunOptions

logger = logging.getLogger(__name__)

DATA = "data"
"""Folder of the prepared data, in the output folder."""
EVAL_FINGERPRINT = "eval_fingerprint"
"""Field of a run's record: the fingerprint of its held-out data, or null."""


def cut_model(options: RunOptions, found: Config) -> Config:
    """The architecture at the cut of the options, see `cut`.

    Raises `UsageError` for a cut or a length of rows that does not fit the model.
    """
    config = choose_cut(
        drop_own(found, options.generated_kv, options.exact_head),
        options.num_key_value_layers,
        options.key_value_group_size,
        prompt_attention_layers=options.prompt_attention_layers,
        prompt_mlp_neurons=options.prompt_mlp_neurons,
        boundary_taps=options.boundary_taps,
    )
    config = choose_generated_kv(
        config, options.generated_kv, options.exact_tail, options.exact_head
    )
    if options.init == "closed-form" and not has_same_delta(found, config):
        check_closed_form(config)
    if options.max_length > (positions := config.max_position_embeddings):
        default = ", the default" if options.max_length == Recipe.max_length else ""
        raise UsageError(
            f"`max_length`={options.max_length}{default}: this model has {positions} positions"
        )
    if config.num_upper_layers == 0:
        raise UsageError(
            f"`num_key_value_layers`={config.num_layers}: this model has {config.num_layers} "
            f"layers, so nothing is left to distil"
        )
    return config


def check_loss(recipe: Recipe, config: Config) -> None:
    """Raise `UsageError` for a loss that the model, at its cut, cannot have."""
    if not -config.num_layers - 1 <= recipe.hidden_loss_layer <= config.num_layers:
        limits = f"from {-config.num_layers - 1} to {config.num_layers}"
        raise UsageError(f"`hidden_loss_layer`={recipe.hidden_loss_layer}: must be {limits}")
    compared = recipe.objective.layer_index(config.num_layers)
    if (
        compared <= config.num_key_value_layers
        and recipe.hidden_loss_weight
        and recipe.hidden_loss_layer != Recipe.hidden_loss_layer
    ):
        raise UsageError(
            f"`hidden_loss_layer`={recipe.hidden_loss_layer}: teacher and student have the same "
            f"state there; name one above {config.num_key_value_layers}"
        )
    if recipe.kl_top_k is not None and recipe.kl_top_k > config.vocab_size:
        raise UsageError(f"`kl_top_k`={recipe.kl_top_k}: this model has {config.vocab_size} tokens")


def check_closed_form(config: Config) -> None:
    """Raise `UsageError` if there is no closed form for the delta."""
    try:
        check_groups(config)
    except ConfigError as error:
        raise UsageError(str(error)) from None


def load_model(options: RunOptions, config: Config, mesh: Mesh) -> Model:
    """The frozen weights split at the cut, and the checkpoint's delta if it has this cut.

    Raises `OutOfMemoryError` if the host's memory does not suffice, `UsageError` for a quantised
    model.
    """
    try:
        model = load(options.model, dtype=options.dtype, mesh=mesh, config=config)
    except MemoryError:
        dtype = jnp.dtype(options.dtype or jnp.bfloat16)
        count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(llama_shapes(config)))
        size = dtype.itemsize * count / GIB
        raise OutOfMemoryError(
            f"{options.model}: not enough host memory for its {size:.1f} GiB of weights in {dtype}"
        ) from None
    refuse_quantized(model.llama, f"{options.model}: training")
    return model


def open_tokenizer(options: RunOptions) -> Any:
    """The model's tokenizer, without its weights. Raises `UsageError` if it has none."""
    tokenizer = load_tokenizer(Path(options.model), open_any(options.model).auxiliary_files)
    if tokenizer is None:
        raise UsageError(f"`model`={options.model}: it has no tokenizer, so text cannot be read")
    return tokenizer


def load_data(options: RunOptions, tokenizer: Any) -> tuple[DatasetMixture, DatasetMixture | None]:
    """Training data, and held-out data if there is any; prepared once, then kept in the output
    folder. Raises `DataError` and `UsageError`."""
    held_out = None
    if options.eval_data is not None:  # before the training data, which takes longer
        unweighted("eval_data", options.eval_data)
        held_out = _mixture((options.eval_data,), options, tokenizer, held_out=True)
    training = _mixture(options.data, options, tokenizer, held_out=False)
    if held_out is not None and held_out.datasets[0].manifest.fingerprint in {
        dataset.manifest.fingerprint for dataset in training.datasets
    }:
        logger.warning(
            "`eval_data`=%s is training data too: its numbers say nothing about other text",
            options.eval_data,
        )
    return training, held_out


def _mixture(
    texts: tuple[str, ...], options: RunOptions, tokenizer: Any, *, held_out: bool
) -> DatasetMixture:
    sources = [parse_source(text) for text in texts]
    datasets = tuple(
        Preparation(
            source,
            tokenizer,
            options.max_length,
            held_out,
            options.max_unreadable_share,
        ).prepare(options.output_dir / DATA)
        for source in sources
    )
    return DatasetMixture(datasets, tuple(source.weight for source in sources))


def fingerprint(
    recipe: Recipe, model: Model, initial_delta_digest: str, data: DatasetMixture, steps: int
) -> dict[str, Any]:
    """Return what must be the same for a checkpoint to be continued: weights, data, and the
    settings that steer the updates. `initial_delta_digest` is the digest of the delta before the
    first step."""
    return {
        **{name: getattr(recipe, name) for name in STEERING},
        **{name: getattr(model.config, name) for name in CUT_FIELDS},
        "steps": steps,
        "dtype": str(model.dtype),
        "base_model": digest_all(jax.tree.leaves(model.llama)),
        "first_delta": initial_delta_digest,
        "data": data.fingerprint,
    }


def check_trainable(config: Config) -> None:
    """Raise `UsageError` for a student whose layers attend to two caches: training it lost more on
    tokens that depend on the far prompt than scaling it after training (docs/generated-kv.md)."""
    if config.has_two_caches:
        raise UsageError(
            f"`generated_kv`=own with `key_value_group_size`={config.key_value_group_size}: train "
            f"with `generated_kv`=boundary, then run train calibrate --keep-delta --generated-kv "
            f"own on the trained model"
        )


def own_tail(config: Config) -> int | None:
    """The `own_tail` of the data's rows."""
    return None if config.generated_kv == "boundary" else config.exact_tail


def describe_run(options: RunOptions, model: Model, mesh: Mesh) -> str:
    """Two lines: the model and its cut, and the devices."""
    config = model.config
    frozen, trained = (
        sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
        for tree in (model.llama, swiftkv_shapes(config))
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
        f"{options.model}: {frozen:,} frozen and {trained:,} trained parameters; "
        f"{describe_cut(config, config.num_layers)}\n"
        f"{model.dtype} on {mesh.size} x {device.device_kind}{processes}, {axes}{emulated}"
    )


def check_recorded(recipe: Recipe, config: Config, held_out: DatasetMixture | None) -> None:
    """Compare a run that continues with what `write_settings` wrote. Raises `CheckpointError` for
    another architecture, `UsageError` if losses on other held-out rows would be compared."""
    path = recipe.output_dir / RECIPE
    if not path.is_file():
        return
    recorded = read_json(path)
    if different := config_differences(recorded.get("config", {}), config):
        raise CheckpointError(
            f"{recipe.model}: its architecture is not that of the run in {recipe.output_dir}: "
            f"{'; '.join(different)}"
        )
    measured = {name: recorded[name] for name in ("eval_data", "eval_batches") if name in recorded}
    changed = {name: old for name, old in measured.items() if old != getattr(recipe, name)}
    text = _fingerprint(held_out)
    if "eval_data" not in changed and recorded.get(EVAL_FINGERPRINT) != text:
        changed["eval_data"] = "other text"
    if not changed:
        return
    name, old = next(iter(changed.items()))
    if recipe.early_stopping_patience is not None or recipe.load_best_model_at_end:
        raise UsageError(
            f"`{name}`={getattr(recipe, name)}: the run was measured with {old}; "
            f"`early_stopping_patience` and `load_best_model_at_end` compare losses on the same "
            f"rows only"
        )
    logger.warning("`%s` has changed: losses before and from here are not comparable", name)


def _fingerprint(data: DatasetMixture | None) -> str | None:
    return None if data is None else data.fingerprint


def write_settings(
    recipe: Recipe, config: Config, held_out: DatasetMixture | None, steps: int, mfu_of: str
) -> None:
    """Write the resolved recipe into the output folder, for people, `report` and `convert`."""
    settings = dataclasses.asdict(recipe) | {
        "output_dir": str(recipe.output_dir),
        "model": str(Path(recipe.model).absolute()),
        "mesh": str(recipe.mesh),
        "max_steps": steps,
        "config": dataclasses.asdict(config),
        "mfu_of": mfu_of,
        EVAL_FINGERPRINT: _fingerprint(held_out),
        "jax": jax.__version__,
    }
    write_json(recipe.output_dir / RECIPE, settings, canonical=True)


def source_dtype(model: Model) -> jnp.dtype:
    """The dtype of the checkpoint's files, in which the trained model is exported. Raises
    `CheckpointError`."""
    hf = model.auxiliary_files.hf_config
    name = hf.get("torch_dtype") or hf.get("dtype") or model.dtype
    if name not in ("float32", "bfloat16", "float16", model.dtype):
        raise CheckpointError(
            f"config.json: torch_dtype={name!r} is not supported; supported: float32, bfloat16, "
            f"float16"
        )
    return jnp.dtype(name)
