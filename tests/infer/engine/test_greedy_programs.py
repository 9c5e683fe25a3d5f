"""Greedy sequences have decode programs of their own on a GPU: rows that need the whole sampler
come and go, and every answer is that of the request alone."""

import dataclasses
import functools
import itertools

import pytest

from swiftkv_jax.errors import UsageError
from swiftkv_jax.infer.engine.engine import Engine
from swiftkv_jax.infer.engine.requests import Request
from swiftkv_jax.infer.engine.sampling_params import SamplingParams
from swiftkv_jax.infer.runner.build import build_model_runner
from swiftkv_jax.infer.runner.lowering import DecodeProgram
from swiftkv_jax.infer.runner.model_runner import ModelRunner
from tests.infer.engine.test_engine import collect, model, options, prompts_of

PLAIN = SamplingParams(max_tokens=50, ignore_eos=True)
PENALTIES = [
    {"repetition_penalty": 3.0},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 2.0},
    {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 1.0},
]


@functools.cache
def engine_with(*kinds: str) -> Engine[ModelRunner]:
    chosen = options(chunks=(16,), decode_rows=(4,), scoring=False)
    runner = build_model_runner(model(), chosen)
    runner.shapes = dataclasses.replace(runner.shapes, decode_kinds=kinds)
    return Engine(runner, config=runner.config, eos_token_ids=(), options=chosen)


def alone(request: Request) -> list[int]:
    """The answer to one request in an engine whose only decode program has the whole sampler."""
    return collect(engine_with("sampling"), [request])[0][0]


def test_rows_with_penalties_join_greedy_rows(monkeypatch):
    """Twice two of them, the second time in slots that were used: the calls that they are in run
    the whole sampler, those before, between and after them the greedy program."""
    engine, kinds = engine_with("sampling", "greedy"), []
    decode = engine.model_runner._decode

    def recorded(program, slots):
        kinds.append(program.kind)
        return decode(program, slots)

    monkeypatch.setattr(engine.model_runner, "_decode", recorded)
    prompts, requests = prompts_of(8, 6), {}
    outputs: dict[int, list[int]] = {}
    unfinished = set()

    def add(prompt, params: SamplingParams) -> None:
        id = engine.add_request(request := Request(prompt, params))
        requests[id], outputs[id] = request, []
        unfinished.add(id)

    def step_until(done) -> None:
        while not done():
            for event in engine.step():
                outputs[event.request_id].extend(event.token_ids)
                if event.finish_reason:
                    unfinished.remove(event.request_id)

    for prompt in prompts[:2]:
        add(prompt, PLAIN)
    for pair in itertools.batched(zip(prompts[2:], PENALTIES, strict=True), 2):
        emitted = len(outputs[0])
        step_until(lambda emitted=emitted: len(outputs[0]) >= emitted + 6)
        for prompt, penalties in pair:
            add(prompt, dataclasses.replace(PLAIN, max_tokens=12, **penalties))
        step_until(lambda: len(unfinished) == 2)
    step_until(lambda: not unfinished)
    assert [kind for kind, _ in itertools.groupby(kinds)] == [
        "greedy",
        *["sampling", "greedy"] * 2,
    ]
    for id, request in requests.items():
        assert outputs[id] == alone(request), request
        plain = dataclasses.replace(PLAIN, max_tokens=request.params.max_tokens)
        differs = alone(Request(request.prompt, plain)) != outputs[id]
        assert differs == request.params.has_penalty, request


def test_an_engine_without_sampling_compiles_greedy_programs_alone():
    chosen = options(chunks=(16,), decode_rows=(4,), scoring=False, sampling=False)
    engine = Engine.from_model(model(), chosen)
    kinds = {
        program.kind
        for program in engine.model_runner._compiled
        if isinstance(program, DecodeProgram)
    }
    assert kinds == {"greedy"}
    request = Request(prompts_of(8, 1)[0], PLAIN)
    assert collect(engine, [request])[0][0] == alone(request)
    with pytest.raises(UsageError, match="`sampling`=True"):
        engine.add_request(Request([5], SamplingParams(max_tokens=2, temperature=1.0)))
