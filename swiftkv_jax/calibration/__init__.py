"""A delta in closed form: the upper layers' keys and values by least squares from the hidden
state that enters layer K, on some ten thousand tokens of text, without training.

`moments` gathers second moments in one pass of the teacher per batch, `solve` has the formulas,
`delta` makes the delta from them, and `attenuation` scales its queries where they need it.

Cost: one forward pass, of which the products for the moments are a few percent, and a factorisation
of one D x D matrix per upper layer on the host; where `attenuation` is needed, a second pass over
`SLOPE_TOKENS`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ..attention import Attention
from ..batch import Batch
from ..config import Config
from ..errors import ConfigError
from ..params import Llama
from .attenuation import scale_delta_queries
from .delta import Fit, LayerFit, fit_delta
from .moments import add_batch, zero_moments

__all__ = [
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
    config: Config, llama: Llama, batches: Iterable[Batch], *, attention: Attention
) -> Fit:
    """The delta of the cut of `config` in closed form, from `batches` of one shape.

    `llama` is split at that cut and, like the batches, on the mesh of `attention`. Raises
    `ConfigError` where `check_groups` does, and `ValueError` if the teacher's upper projections
    were dropped or the batches hold no token.
    """
    check_groups(config)
    moments, first, first_tokens = zero_moments(config, attention.mesh), list[Batch](), 0
    for batch in batches:
        if config.has_two_caches and first_tokens < SLOPE_TOKENS:
            first.append(batch)
            first_tokens += _row_tokens(batch)
        moments = add_batch(config, attention, moments, llama, batch)
    if not moments.tokens > 0:
        raise ValueError("there is no token to calibrate on")
    fit = fit_delta(config, llama, moments, attention.mesh)
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


def _row_tokens(batch: Batch) -> int:
    """Positions of a batch's rows, without rows of padding: how many those are depends on the
    mesh."""
    return int((batch.segment_ids[:, 0] > 0).sum()) * batch.tokens.shape[1]
