"""The last chunk of a prompt that is alone goes on to its first token: every answer is that of an
engine that decodes it."""

import dataclasses
import functools

import numpy as np
import pytest

from swiftkv_jax.infer.engine.engine import Engine
from swiftkv_jax.infer.engine.options import SpeculativeConfig
from swiftkv_jax.infer.engine.requests import Request
from swiftkv_jax.infer.engine.sampling_params import SamplingParams
from swiftkv_jax.infer.runner.build import build_model_runner
from swiftkv_jax.infer.runner.choose_shapes import choose_shapes
from swiftkv_jax.infer.runner.lowering import DecodeProgram, PrefillProgram
from swiftkv_jax.infer.runner.model_runner import ModelRunner
from tests.infer.engine.mock_requests import ask, drain, prompt_of
from tests.infer.engine.test_engine import collect, model, options
from tests.infer.engine.test_scheduler import answers
from tests.infer.mock_model_runner import continuation, mock_engine

PARAMS = [
    SamplingParams(max_tokens=6, ignore_eos=True),
    SamplingParams(max_tokens=1),
    SamplingParams(max_tokens=6, temperature=1.0, seed=3, logprobs=4),
    SamplingParams(max_tokens=6, repetition_penalty=3.0, frequency_penalty=2.0),
]


@functools.cache
def engine_with(first_tokens: bool) -> Engine[ModelRunner]:
    chosen = options(chunks=(16, 32), decode_rows=(4,), scoring=False)
    runner = build_model_runner(model(), chosen)
    assert not runner.shapes.first_tokens, "on a CPU"
    runner.shapes = dataclasses.replace(runner.shapes, first_tokens=first_tokens)
    return Engine(runner, config=runner.config, eos_token_ids=(), options=chosen)


@pytest.mark.parametrize("length", [2, 16, 17, 18, 32, 40])
def test_answers(length, monkeypatch):
    """Of several lengths: within a chunk, filling one, in two; and again, from cached pages. All
    but the last of 17 tokens fill a chunk, which does not go on: the next size is twice as long."""
    engine, calls = engine_with(True), []
    stats = engine.stats
    before = stats.prefilled_tokens + stats.padding_tokens
    compiled = engine.model_runner._compiled

    def recorded(program, *operands, run):
        calls.append(program)
        return run(*operands)

    for program, run in compiled.items():
        monkeypatch.setitem(compiled, program, functools.partial(recorded, program, run=run))
    for number, params in enumerate(PARAMS):
        random = np.random.default_rng((length, number))
        request = Request(random.integers(61, size=length).tolist(), params)
        for _ in range(2):
            found, expected = (collect(engine_with(kind), [request]) for kind in (True, False))
            assert found == expected
    assert engine.stats.compilations == 0
    if length == 17:
        assert "first_token" not in calls
    else:
        first = calls.index("first_token")
        assert isinstance(calls[first - 1], PrefillProgram)
        assert not any(isinstance(program, DecodeProgram) for program in calls[:first])
        assert calls.count("first_token") >= len(PARAMS)
    tokens = sum(call.tokens for call in calls if isinstance(call, PrefillProgram))
    added = stats.prefilled_tokens + stats.padding_tokens - before
    assert tokens == added + calls.count("first_token")


def test_which_chunks_go_on():
    """Not one that has no room for the last token of the prompt, nor beside others."""
    engine, runner = mock_engine(chunk=8, first_tokens=True)
    for length, calls in (
        (7, ["prefill 6 and go on", "decode 1"]),
        (12, ["prefill 8", "prefill 3 and go on", "decode 1"]),
        (1, ["decode 1"]),
        (9, ["prefill 8", "decode 1"]),
    ):
        runner.calls.clear()
        prompt = prompt_of(length, length)
        assert answers(engine, [ask(prompt, 3)]) == {(0, 0): continuation(prompt, 3)}
        assert runner.calls[: len(calls)] == calls
    runner.calls.clear()
    pair = [prompt_of(seed, 4) for seed in (50, 51)]
    answers(engine, [ask(prompt) for prompt in pair])
    engine.add_request(ask(prompt_of(52, 4), 20, ignore_eos=True))
    engine.step()
    engine.add_request(ask(prompt_of(53, 4)))
    drain(engine)
    assert [call for call in runner.calls if "go on" in call] == ["prefill 3 and go on"]


def test_which_engines_go_on():
    """Students on GPUs and TPUs, unless a prompt's last token keeps its own keys and values, or
    drafts need the text, which `first_token` does not extend."""
    student = engine_with(False).config

    def go_on(config=student, platform="gpu", dp_size=1, **fields) -> bool:
        memory = {"page_bytes": 1024, "weight_bytes": 1024, "memory_limit": None}
        chosen = options(decode_rows=(4 // dp_size,), **fields)
        shapes = choose_shapes(config, chosen, dp_size=dp_size, platform=platform, **memory)
        return shapes.first_tokens

    assert go_on() and go_on(platform="tpu")
    assert not go_on(platform="cpu")
    assert not go_on(dp_size=2)
    assert not go_on(dataclasses.replace(student, generated_kv="own"))
    assert not go_on(student.cut(student.num_layers)), "a teacher"
    assert not go_on(one_size=True)
    assert not go_on(speculative=SpeculativeConfig())
