"""An engine in which each request chooses whether its tokens keep their own keys and values."""

import dataclasses
import functools
import random
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax.infer.engine.engine import Engine
from swiftkv_jax.infer.engine.requests import Request, ScoreRequest
from swiftkv_jax.infer.engine.sampling_params import SamplingParams
from swiftkv_jax.infer.runner.model_runner import ModelRunner
from swiftkv_jax.model.cache import bytes_per_token, cache_dtype
from tests import own_kv_oracle
from tests.infer.engine.own_kv_engines import (
    FLOAT32,
    GROUPED,
    LENGTH,
    MODES,
    engine_of,
    greedy,
    mode_of,
    model,
    options,
    oracle_logprobs,
    prompts_of,
    run,
)
from tests.infer.mock_model_runner import mock_engine

SOAKED = {"own": 0.4, "tail 6": 0.4, "boundary": 0.2}
"""Share of each mode."""


@pytest.mark.long
@pytest.mark.parametrize("shape", ["g=1", "g=2", pytest.param("g=4", marks=pytest.mark.long)])
def test_soak(shape, compilations):
    """Requests of all modes that come and are aborted at random: each answer is that of the request
    alone in an engine of its mode. `make test-soak` has a longer one."""
    soak(rounds=60, seed=0, compilations=compilations, shape=shape)


def soak(
    *, rounds: int, seed: int, compilations: list[str], shape: str = "g=1", **fields: Any
) -> None:
    """`rounds` requests, some of which are preempted. In a cache of 8 bits one in fifty may differ,
    if float32 can round one of its entries, nearly a tie, to either side: a chunk of another size,
    or prefill after a preemption, may do otherwise."""
    engine = mixed_engine(shape, *fields.items())
    suffix = "" if shape == "g=1" else f" {shape}"
    preemptions, rng = engine.stats.preemptions, random.Random(seed)
    compilations.clear()
    live: dict[int, tuple[str, Request | ScoreRequest]] = {}
    outputs: dict[tuple[int, int], tuple[list[int], list[float]]] = {}
    finished: list[tuple[int, int]] = []

    def step() -> None:
        for output in engine.step():
            key = output.request_id, output.sample
            tokens, logprobs = outputs.setdefault(key, ([], []))
            tokens += output.token_ids
            logprobs += [entry.logprob for entry in output.logprobs or ()]
            if output.finish_reason:
                finished.append(key)

    for prompt in prompts_of(seed, rounds):
        mode = rng.choices(list(SOAKED), list(SOAKED.values()))[0] + suffix
        kv, tail, _ = mode_of(mode)
        chosen: dict[str, Any] = {"generated_kv": kv, "exact_tail": tail or None}
        if outputs and rng.random() < 0.5:  # a later turn of what a recent request has answered
            number, sample = rng.choice(list(outputs)[-6:])
            _, earlier = live.get(number, (None, None))
            if isinstance(earlier, Request):
                prompt = (*earlier.prompt, *outputs[number, sample][0], *prompt)[:40]
        if rng.random() < 0.3:
            request = ScoreRequest(prompt * 2, rng.randint(1, 2 * len(prompt) - 1), **chosen)
            request = dataclasses.replace(request, tokens=request.tokens[:LENGTH])
            request = dataclasses.replace(
                request, start=min(request.start, len(request.tokens) - 1)
            )
        else:
            params = SamplingParams(
                max_tokens=rng.randint(1, 16), logprobs=0, n=rng.choice([1, 1, 2])
            )
            request = Request(prompt, params, **chosen)
        live[engine.add_request(request)] = mode, request
        if rng.random() < 0.15:
            engine.abort_request(gone := rng.choice(list(live)))
            live.pop(gone)
        if rng.random() < 0.6:
            step()
    while engine.has_work:
        step()
    assert compilations == [] and engine.stats.compilations == 0
    assert engine.pages_in_use == 0 and engine.prefix_stats.hits > 0
    assert engine.stats.preemptions > preemptions
    checked = [
        (live[number], outputs[number, sample]) for number, sample in finished if number in live
    ]
    assert len(checked) > rounds / 2 and {mode for (mode, _), _ in checked} == {
        name + suffix for name in SOAKED
    }
    differing = []
    for (mode, request), found in checked:
        alone = dataclasses.replace(request, generated_kv=None, exact_tail=None)
        if isinstance(alone, Request):
            alone = dataclasses.replace(alone, params=dataclasses.replace(alone.params, n=1))
        (expected,) = run(alone_engine(mode, *fields.items()), [alone])
        close = np.allclose(found[1], expected[1], rtol=0, atol=2e-5)
        if found[0] != expected[0] or not close:
            differing.append((mode, request, found, expected))
    if (format := fields.get("kv_cache_dtype", "auto")) != "auto":
        assert len(differing) <= len(checked) / 50
        differing = [each for each in differing if not has_tie(format, *each)]
    assert not differing


def has_tie(format: str, mode: str, request, found, expected) -> bool:
    """Whether an entry is so near a tie that float32 may round it to either side."""
    stored = own_kv_oracle.EightBits(format)
    oracle_logprobs(mode, request, found[0], stored=stored)
    return stored.nearest_tie < FLOAT32


@functools.cache
def mixed_engine(shape: str = "g=1", *fields: tuple[str, Any]) -> Engine[ModelRunner]:
    """An engine for all modes, with few pages: they are used again, and requests preempted."""
    dtype = cache_dtype(dict(fields).get("kv_cache_dtype", "auto"), jnp.float32)
    pages = {"g=1": 20, "g=2": 24, "g=4": 36}[shape]
    room = pages * 4 * bytes_per_token(model(shape).config, dtype)
    chosen = options(
        "boundary",
        mixed_generated_kv=True,
        kv_cache_memory=room,
        reserve_tokens=2,
        **dict(fields),
    )
    return Engine.from_model(model(shape), chosen)


@functools.cache
def alone_engine(mode: str, *fields: tuple[str, Any]) -> Engine[ModelRunner]:
    served = model(mode_of(mode).shape)
    return Engine.from_model(served, options(mode, enable_prefix_caching=False, **dict(fields)))


def test_pages_of_own_keys_and_values_are_not_shared():
    """Only whole pages before the first of those tokens; a later turn computes the answer again."""
    mock, _ = mock_engine(page_size=4, mixed_generated_kv=True)
    prompt = list(range(1, 11))
    tail = {"generated_kv": "own", "exact_tail": 3}
    first = Request(prompt, SamplingParams(max_tokens=9, ignore_eos=True), **tail)
    reply = [token for _, output in mock.run([first]) for token in output.token_ids]
    turn = [*prompt, *reply, 5, 6]
    for request, cached in (
        (first, 4),  # positions 0 to 3; own ones begin at 7
        (Request(turn, SamplingParams(max_tokens=4), **tail), 4),
        (Request(turn, SamplingParams(max_tokens=4)), 16),  # what the turn's own prompt has left
        (ScoreRequest(turn, 14, **tail), 8),
    ):
        outputs = [output for _, output in mock.run([request])]
        assert outputs[0].num_cached_tokens == cached, request
    assert mock.pages_in_use == 0


@pytest.mark.parametrize(
    "modes",
    [
        pytest.param(modes, marks=pytest.mark.long)
        for modes in (
            ("boundary g=2", "tail 6 g=2"),
            tuple(MODES),
            tuple(name for name in GROUPED if name.endswith("g=2")),
        )
    ],
    ids=", ".join,
)
def test_requests_choose_their_mode(modes):
    """Each in one engine, next to each other and over each other's pages."""
    engine = mixed_engine(mode_of(modes[0]).shape)
    rng, requests, expected = random.Random(8), [], []
    for prompt in prompts_of(8, 24):
        mode = rng.choice(modes)
        kv, tail, _ = mode_of(mode)
        fields: dict[str, Any] = {"generated_kv": kv, "exact_tail": tail or None}
        if rng.random() < 0.5:
            requests.append(greedy(prompt, **fields))
        else:
            requests.append(ScoreRequest((*prompt, *prompt), len(prompt), **fields))
        plain = dataclasses.replace(requests[-1], generated_kv=None, exact_tail=None)
        expected += run(engine_of(mode), [plain])
    for _ in range(2):
        for one, other in zip(run(engine, requests), expected, strict=True):
            assert one[0] == other[0]
            np.testing.assert_allclose(one[1], other[1], atol=2e-5)
    assert engine.prefix_stats.hits > 0 and engine.pages_in_use == 0


def test_requests_cannot_choose_unless_the_engine_lets_them():
    with pytest.raises(skv.UsageError, match="mixed_generated_kv"):
        engine_of("tail 6").add_request(greedy([1, 2], generated_kv="own"))
    engine = mixed_engine()
    with pytest.raises(skv.UsageError, match="`exact_tail`=3 of a request needs"):
        engine.add_request(greedy([1, 2], exact_tail=3))
