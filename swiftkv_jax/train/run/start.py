"""The delta that a run starts from, and the record of it in the output folder."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import Mesh

from ...calibration import (
    MIN_TOKENS_PER_DIMENSION,
    SLOPE_TOKENS,
    LayerFit,
    calibrate,
    scale_delta_queries,
)
from ...checkpoints.digest import digest_all
from ...checkpoints.source import Source
from ...model.attention import Attention
from ...model.batch import Batch
from ...model.config import Config
from ...model.initialization import Start, init_swiftkv
from ...model.model import Model
from ...model.sharding import batch_sharding, swiftkv_shardings
from ...process.distributed import is_main_process
from ...process.files import write_json
from ...process.json_files import read_json
from ..data.loader import DatasetMixture, batches, rows_with_tokens
from ..recipe import Recipe
from ..run_options import RunOptions
from .batch_sharder import BatchSharder
from .progress import track

logger = logging.getLogger(__name__)

START = "start.json"
"""The record of a run's initial delta, in its output folder."""
TOKENS_PER_DIMENSION = 256
"""Calibration tokens per entry of the hidden state, by default."""
CPU_TOKENS = 2**15
"""Calibration tokens on a CPU, by default, if they are fewer and enough for a fit that is not
warned of."""
FITTED_PER_MEASURED = 8
"""Rows that are fitted to for each that is measured, where there is no held-out text."""


def start_of_run(
    recipe: Recipe,
    source: Source,
    model: Model,
    data: DatasetMixture,
    mesh: Mesh,
    *,
    continues: bool,
) -> tuple[Model, str]:
    """The model with its initial delta, and the digest of that: the delta of `source`, the
    checkpoint, if it has one of this cut, else one as the recipe's `init` says. If the run
    continues, only the record is read, and the model has no delta."""
    record = recipe.output_dir / START
    if model.swiftkv is None:
        model = dataclasses.replace(model, auxiliary_files=model.auxiliary_files.of_new_student())
    if continues and record.is_file():
        found = read_json(record)
        if found["init"] != recipe.init:
            logger.warning("`init`=%s: the run continues, from %s", recipe.init, found["init"])
        heads = found["shared_kv_heads"] and tuple(map(tuple, found["shared_kv_heads"]))
        config = dataclasses.replace(model.config, shared_kv_heads=heads)
        return dataclasses.replace(model, config=config, swiftkv=None), found["digest"]
    if model.swiftkv is None:
        if source.has_delta:
            logger.warning("the model's delta is of another cut; a new one replaces it")
        layers = ()
        if recipe.init == "closed-form":
            model, layers = fitted_delta(recipe, model, data, mesh)
        else:
            model = copied_delta(recipe.init, model, mesh)
    else:
        if source.config.generated_kv == "own" and model.config.generated_kv == "boundary":
            logger.warning(
                "`generated_kv`=boundary: the model was made for own, with keys or queries scaled "
                "for it, and the run begins with them"
            )
        if recipe.init != Recipe.init:
            logger.warning(
                "`init`=%s: the model has a delta, which the run begins with", recipe.init
            )
        if recipe.calibration_tokens is not None:
            logger.warning(
                "`calibration_tokens`=%d: the model has a delta, which the run begins with",
                recipe.calibration_tokens,
            )
        layers = ()
    digest = digest_all(jax.tree.leaves(model.swiftkv))
    if is_main_process():
        write_json(
            record,
            {
                "init": recipe.init,
                "shared_kv_heads": model.config.shared_kv_heads,
                "digest": digest,
                "layers": [dataclasses.asdict(layer) for layer in layers],
            },
        )
    return model, digest


def copied_delta(start: Start, model: Model, mesh: Mesh) -> Model:
    """The model with copies of the teacher's projections."""
    init = jax.jit(
        init_swiftkv,
        static_argnums=0,
        static_argnames="start",
        out_shardings=swiftkv_shardings(model.config, mesh),
    )
    return dataclasses.replace(model, swiftkv=init(model.config, model.llama, start=start))


def fitted_delta(
    options: RunOptions, model: Model, data: DatasetMixture, mesh: Mesh
) -> tuple[Model, tuple[LayerFit, ...]]:
    """The model with a delta in closed form, and how well it fits. The rows are those that training
    begins with."""
    config = model.config
    tokens = calibration_tokens(options, config, mesh)
    if tokens < calibration_tokens(options, config):
        logger.info(f"the fit is to {tokens:,} tokens, as on a CPU: more by `calibration_tokens`")
    found = _batches(options, data, mesh, tokens)
    fit = calibrate(
        config,
        model.llama,
        found,
        attention=Attention(mesh, options.attention),
        track=lambda layers: track(layers, "solving", config.num_upper_layers, "layer"),
    )
    short = f", all of the data ({tokens} asked for)" if fit.tokens < tokens else ""
    logger.info("fitted to %d tokens%s", fit.tokens, short)
    logger.info("%s", describe_fit(fit.layers))
    return dataclasses.replace(model, config=fit.config, swiftkv=fit.delta), fit.layers


def scale_queries(options: RunOptions, model: Model, data: DatasetMixture, mesh: Mesh) -> Model:
    """The model with its queries scaled for shared keys beside tokens' own keys
    (`calibration.attenuation`), measured on the rows that training begins with."""
    delta = model.swiftkv
    assert delta is not None
    batches = _batches(options, data, mesh, SLOPE_TOKENS)
    attention = Attention(mesh, options.attention)
    delta = scale_delta_queries(model.config, model.llama, delta, batches, attention=attention)
    return dataclasses.replace(model, swiftkv=delta)


def calibration_tokens(options: RunOptions, config: Config, mesh: Mesh | None = None) -> int:
    """Return the number of tokens in the options, or `TOKENS_PER_DIMENSION` for each entry of the
    hidden state; on a mesh of CPUs no more than `CPU_TOKENS`, or what a fit needs at least."""
    if options.calibration_tokens is not None:
        return options.calibration_tokens
    tokens = TOKENS_PER_DIMENSION * config.embed_dim
    if mesh is None or mesh.devices.flat[0].platform != "cpu":
        return tokens
    return min(tokens, max(CPU_TOKENS, MIN_TOKENS_PER_DIMENSION * config.embed_dim))


def _batches(options: RunOptions, data: DatasetMixture, mesh: Mesh, tokens: int) -> Iterator[Batch]:
    """The first `tokens` tokens that training reads, or an epoch of them: the same ones whatever
    the size of a batch."""
    fitted = rows_with_tokens(data, options.seed, tokens)
    sharder = BatchSharder(batch_sharding(mesh), (options.micro_batch_size,))
    reading = batches(
        data,
        sharder.num_rows,
        positions=sharder.positions,
        seed=options.seed,
        rows=range(fitted.rows),
    )
    total = math.ceil(fitted.rows / sharder.num_rows)
    with contextlib.closing(reading):
        for number, local in enumerate(track(reading, "calibrating", total)):
            rows = number * sharder.num_rows + np.array(sharder.positions)[:, None]
            at = np.arange(local.batch.tokens.shape[1])
            left_out = (rows == fitted.rows - 1) & (at >= fitted.last)
            segment_ids = np.where(left_out, 0, local.batch.segment_ids)
            yield sharder.shard(dataclasses.replace(local.batch, segment_ids=segment_ids))


def rows_left(options: RunOptions, data: DatasetMixture, tokens: int) -> range | None:
    """Rows to measure on that follow those of `tokens` tokens, about one for each
    `FITTED_PER_MEASURED` of them; None if the data ends with them."""
    fitted = rows_with_tokens(data, options.seed, tokens).rows
    wanted = max(1, round(fitted / FITTED_PER_MEASURED))
    wanted = min(wanted, data.num_distinct_rows - fitted)
    return range(fitted, fitted + wanted) if wanted > 0 else None


def describe_fit(layers: tuple[LayerFit, ...]) -> str:
    """A table: what share of each upper layer's keys and values the input of layer K explains, and
    what share of that its group keeps."""
    lines = ["layer  R2 of K  R2 of V  K kept  V kept"]
    lines += [
        f"{fit.layer:>5}  {fit.r2_k:7.3f}  {fit.r2_v:7.3f}  {fit.kept_k:6.3f}  {fit.kept_v:6.3f}"
        for fit in layers
    ]
    return "\n".join(lines)
