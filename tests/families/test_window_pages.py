"""A model whose layers all have a window gives back pages while requests run."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax import Model
from swiftkv_jax.infer import Engine, EngineOptions, Request, SamplingParams, ScoreRequest
from swiftkv_jax.model.cache import KVCacheDtype, bytes_per_token, cache_dtype

from .cases import tokens

LENGTH = 96


def served(model: Model, pages: int, format: KVCacheDtype = "auto", **options) -> Engine:
    """Pages of 8 positions."""
    room = pages * 8 * bytes_per_token(model.config, cache_dtype(format, model.dtype))
    return Engine.from_model(
        model,
        EngineOptions(
            max_num_seqs=4,
            max_num_batched_tokens=16,
            page_size=8,
            kv_cache_memory=room,
            kv_cache_dtype=format,
            max_model_len=LENGTH,
            decode_steps=2,
            reserve_tokens=2,
            one_size=True,
            scoring=True,
            **options,
        ),
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("window", "format", "swiftkv"),
    [
        pytest.param(8, "auto", False, marks=pytest.mark.long),
        (7, "auto", True),
        pytest.param(13, "auto", False, marks=pytest.mark.long),
        pytest.param(8, "int8", False, marks=pytest.mark.long),
    ],
)
def test_answers_do_not_depend_on_pages_that_went_back(window, format, swiftkv, load):
    """Many requests in as few pages as one may fill, against each alone without sharing; scores
    too."""
    model = dataclasses.replace(load("mistral-window"), eos_token_ids=())
    kinds = (dataclasses.replace(model.config.layer_kinds[0], window=window),)
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, layer_kinds=kinds))
    if swiftkv:
        model = skv.add_swiftkv(model, num_key_value_layers=2)
    rows = np.concatenate([tokens(), tokens()[:, ::-1]]).tolist()
    params = SamplingParams(max_tokens=50, temperature=0.0)
    two = dataclasses.replace(params, n=2)
    requests: list[Request | ScoreRequest] = [
        Request(row[:length], params) for row in rows for length in (40, 23, 40)
    ]
    requests += [Request(rows[0][:23], two), ScoreRequest(rows[1], 5), ScoreRequest(rows[1], 30)]
    alone = served(model, 64, format, enable_prefix_caching=False)
    expected = [found for request in requests for found in answers(alone, [request])]
    engine = served(model, LENGTH // 8 + 4, format)
    assert answers(engine, requests) == expected
    assert engine.prefix_stats.hits > 0 and engine.pages_in_use == 0


def answers(engine: Engine, requests: Sequence[Request | ScoreRequest]) -> list[list[int]]:
    """Tokens of each sample, and the likeliest tokens of a score."""
    found: dict[tuple[int, int], list[int]] = {}
    for number, output in engine.run(requests):
        found.setdefault((number, output.sample), []).extend(output.token_ids)
    return [found[key] for key in sorted(found)]
