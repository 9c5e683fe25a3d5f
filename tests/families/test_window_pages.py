"""A model whose layers all have a window gives back pages while requests run."""

import dataclasses

import numpy as np
import pytest

from swiftkv_jax import Model
from swiftkv_jax.cache import KVCacheDtype, bytes_per_token, cache_dtype
from swiftkv_jax.infer import Engine, EngineOptions, Request, SamplingParams

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
            **options,
        ),
    )


@pytest.mark.parametrize("format", ["auto", pytest.param("int8", marks=pytest.mark.long)])
def test_answers_do_not_depend_on_pages_that_went_back(format, load):
    """Many requests in as few pages as one may fill, against each alone without sharing."""
    model = dataclasses.replace(load("mistral-window"), eos_token_ids=())
    rows = np.concatenate([tokens(), tokens()[:, ::-1]]).tolist()
    params = SamplingParams(max_tokens=50, temperature=0.0)
    requests = [Request(row[:length], params) for row in rows for length in (40, 23, 40)]
    alone = served(model, 64, format, enable_prefix_caching=False)
    expected = [alone_tokens(alone, request) for request in requests]
    engine = served(model, LENGTH // 8, format)
    found: dict[int, list[int]] = {}
    for number, output in engine.run(requests):
        found.setdefault(number, []).extend(output.token_ids)
    assert [found[number] for number in range(len(requests))] == expected
    assert engine.prefix_stats.hits > 0 and engine.pages_in_use == 0


def alone_tokens(engine: Engine, request: Request) -> list[int]:
    return [token for _, output in engine.run([request]) for token in output.token_ids]
