"""A delta in closed form: the upper layers' keys and values by least squares from the hidden
state that enters layer K, on some ten thousand tokens of text, without training.

`maps` fits what stands in for MLPs between that state and the projections, `moments` gathers second
moments in one pass of the teacher per batch, `solve` has the formulas, `delta` makes the delta from
them, and `attenuation` scales its queries where they need it.

Cost: one forward pass, of which the products for the moments are a few percent, and a factorisation
of one D x D matrix per upper layer on the host, 2D x 2D with taps; for each map a pass before that,
through the lower layers and those up to the map's; where `attenuation` is needed, a pass over
`SLOPE_TOKENS`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp

from ..errors import ConfigError
from ..model.attention import Attention
from ..model.batch import Batch
from ..model.config import Config
from ..model.cut import ungrouped
from ..model.params import Llama
from .attenuation import scale_delta_queries
from .delta import Fit, FittedLayer, LayerFit, fit_delta
from .maps import fit_maps
from .moments import add_batch, zero_moments

__all__ = [
    "MIN_TOKENS_PER_DIMENSION",
    "SLOPE_TOKENS",
    "Fit",
    "LayerFit",
    "calibrate",
    "check_groups",
    "scale_delta_queries",
    "warn_of_few_tokens",
]

SLOPE_TOKENS = 2**14
"""Number of tokens, the first ones, on which queries are compared with the teacher's
(`attenuation`)."""
MIN_TOKENS_PER_DIMENSION = 32
"""Calibration tokens per entry of the hidden state below which `warn_of_few_tokens`
does."""

logger = logging.getLogger(__name__)


def check_groups(config: Config) -> None:
    """Raise `ConfigError` if layers of `config` share caches and their keys have norms: the closed
    form folds a shared basis of keys into queries, which a norm between them prevents."""
    if config.key_value_group_size > 1 and config.qk_norm is not None:
        raise ConfigError(
            f"key_value_group_size={config.key_value_group_size}: there is no closed form for "
            f"groups of layers whose keys have norms; train them from their first layer or their "
            f"mean (swiftkv train --init leader or authors), or take groups of 1"
        )


def calibrate(
    config: Config,
    llama: Llama,
    batches: Iterable[Batch],
    *,
    attention: Attention,
    track: Callable[[Iterator[FittedLayer]], Iterator[FittedLayer]] = iter,
) -> Fit:
    """The delta of the cut of `config` in closed form, from `batches` of one shape.

    `llama` is split at that cut and, like the batches, on the mesh of `attention`. A batch is asked
    for while the one before is computed, and no other waits; with
    `Config.prompt_attention_layers` all are kept. `track` is given the layers, which
    are solved one at a time, and passes them on. Raises
    `ConfigError` where `check_groups` does, and `ValueError` if the teacher's upper projections
    were dropped or the batches hold no token.
    """
    check_groups(config)
    mlps = None
    if config.prompt_attention_layers:
        mlps, batches = fit_maps(config, llama, batches, attention=attention)
    moments = zero_moments(config, attention.mesh)
    teacher = ungrouped(config)
    first = list[Batch]()
    first_tokens = 0
    for batch in batches:
        if config.has_two_caches and first_tokens < SLOPE_TOKENS:
            first.append(_first_tokens(batch, SLOPE_TOKENS - first_tokens))
            first_tokens += int((batch.segment_ids > 0).sum())
        jax.block_until_ready(moments)
        moments = add_batch(teacher, attention, moments, llama, batch, mlps)
    if not moments.tokens > 0:
        raise ValueError("there is no token to calibrate on")
    fit = fit_delta(config, llama, moments, attention.mesh, mlps=mlps, track=track)
    if config.has_two_caches:
        delta = scale_delta_queries(fit.config, llama, fit.delta, first, attention=attention)
        fit = fit._replace(delta=delta)
    warn_of_few_tokens(config, fit.tokens)
    return fit


def warn_of_few_tokens(config: Config, tokens: int) -> None:
    """Log a warning if a fit to `tokens` tokens has fewer than `MIN_TOKENS_PER_DIMENSION`."""
    if tokens < MIN_TOKENS_PER_DIMENSION * config.embed_dim:
        logger.warning(
            "calibrated on %d tokens only, for a hidden state of %d entries: below %d for each the "
            "fit follows that text more than the model, and its R2 looks better than it is",
            tokens,
            config.embed_dim,
            MIN_TOKENS_PER_DIMENSION,
        )


@jax.jit
def _first_tokens(batch: Batch, count: int) -> Batch:
    """The batch with its first `count` tokens, row after row; the others are padding."""
    real = batch.segment_ids > 0
    number = jnp.cumsum(real.ravel()).reshape(real.shape)
    segment_ids = jnp.where(number <= count, batch.segment_ids, 0)
    return dataclasses.replace(batch, segment_ids=segment_ids)
