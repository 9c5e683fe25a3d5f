"""The engine on a model: an answer does not depend on what else runs, on the mesh or on the
chunks."""

import dataclasses
import functools
import itertools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax.infer.engine.engine import Engine
from swiftkv_jax.infer.engine.options import EngineOptions
from swiftkv_jax.infer.engine.requests import NOT_FINITE, Request, RequestOutput, ScoreRequest
from swiftkv_jax.infer.engine.sampling_params import SamplingParams
from swiftkv_jax.infer.runner.build import build_model_runner
from swiftkv_jax.infer.runner.choose_shapes import with_contexts
from swiftkv_jax.infer.runner.lowering import DecodeProgram, PrefillProgram, UpperProgram
from swiftkv_jax.infer.runner.model_runner import ModelRunner
from swiftkv_jax.model.cache import KVCacheDtype, bytes_per_token, cache_dtype
from swiftkv_jax.model.mesh import make_mesh
from tests import tiny

LENGTH = 80
SERVED = [("auto", True), ("auto", False), ("fp8", True), ("int8", True)]  # cache format, SwiftKV


@functools.cache
def model(group: int = 2) -> skv.Model:
    hf = tiny.hf_config(num_hidden_layers=3, num_key_value_layers=1, key_value_group_size=group)
    return tiny.model_of(hf, tiny.tensors_for(hf))


def options(**fields: Any) -> EngineOptions:
    defaults: dict[str, Any] = {
        "max_model_len": LENGTH,
        "max_num_seqs": 4,
        "page_size": 4,
        "decode_steps": 3,
    }
    defaults |= {"chunks": (4, 16), "decode_rows": (4,), "scoring": True}
    return EngineOptions(**defaults | fields)


def small(**fields: Any) -> EngineOptions:
    """Few programs."""
    return options(chunks=(16,), decode_rows=(4,), decode_steps=1, scoring=False, **fields)


@functools.cache
def engine_of(format: str, swiftkv: bool) -> Engine[ModelRunner]:
    """The engine under test, shared by the tests; with int8, that of a Hopper GPU, which has more
    programs and gathers pages for prefill."""
    chosen = options(kv_cache_dtype=format)
    runner = build_model_runner(model(), chosen, swiftkv=swiftkv)
    if format == "int8":
        more = {"decode_kinds": ("sampling", "greedy"), "single_step_rows": 2}
        more |= {"spare_tiles": (0, *runner.shapes.spare_tiles)}
        runner.shapes = with_contexts(dataclasses.replace(runner.shapes, **more))
    return Engine(runner, config=runner.config, eos_token_ids=(), options=chosen)


class Used(dict):
    """The keys that were looked up."""

    def __init__(self, entries):
        super().__init__(entries)
        self.keys_used = set()

    def __getitem__(self, key):
        self.keys_used.add(key)
        return super().__getitem__(key)


@functools.cache
def alone(
    format: str, swiftkv: bool, prompt: tuple[int, ...], params: SamplingParams, stream: int = 0
) -> list[list[int]]:
    """The samples of a prompt, one request at a time, nothing shared, other shapes."""
    return collect(_one_by_one(format, swiftkv), [Request(prompt, params, rng_stream=stream)])[0]


@functools.cache
def _one_by_one(format: str, swiftkv: bool) -> Engine[ModelRunner]:
    one = options(
        kv_cache_dtype=format,
        chunks=(64,),
        decode_steps=1,
        decode_rows=(2,),
        max_num_seqs=2,
        page_size=8,
        scoring=False,
    )
    return Engine.from_model(
        model(), dataclasses.replace(one, enable_prefix_caching=False), swiftkv=swiftkv
    )


def collect(engine: Engine[ModelRunner], requests) -> dict[int, list[list[int]]]:
    outputs: dict[int, dict[int, list[int]]] = {}
    for number, event in engine.run(requests):
        outputs.setdefault(number, {}).setdefault(event.sample, []).extend(event.token_ids)
    return {
        request: [tokens for _, tokens in sorted(samples.items())]
        for request, samples in outputs.items()
    }


def prompts_of(seed: int, count: int, longest: int = 36) -> list[tuple[int, ...]]:
    """Prompts of all lengths; some begin alike."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(61) for _ in range(length)] for length in (0, 3, 9, 16)]
    return [
        (*rng.choice(prefixes), *(rng.randrange(61) for _ in range(rng.randint(1, longest - 16))))
        for _ in range(count)
    ]


# Answers ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "swiftkv"),
    [
        pytest.param(*served, marks=[] if served[0] == "int8" else pytest.mark.long)
        for served in SERVED
    ],
)
def test_soak(format, swiftkv, compilations):
    """Mixed requests that come and are aborted at random: each answer is that of the request alone;
    nothing is compiled, no page leaks."""
    engine, rng = engine_of(format, swiftkv), random.Random(f"{format} {swiftkv}")
    compilations.clear()
    programs = engine.model_runner._compiled = Used(engine.model_runner._compiled)
    live: dict[int, tuple[tuple[int, ...], SamplingParams, int]] = {}
    outputs: dict[tuple[int, int], list[int]] = {}
    finished = []
    for prompt in prompts_of(1, 40):
        params = SamplingParams(max_tokens=rng.randint(1, 10), **rng.choice(MIXTURE))
        stream = rng.randrange(3)
        live[engine.add_request(Request(prompt, params, rng_stream=stream))] = (
            prompt,
            params,
            stream,
        )
        if rng.random() < 0.15:
            engine.abort_request(gone := rng.choice(list(live)))
            live.pop(gone)
        if rng.random() < 0.4:  # as a stop string does: one sample ends, its sibling goes on
            two = [id for id, (_, params, _) in live.items() if params.n == 2]
            engine.abort_request(rng.choice(two or list(live)), 0)
        if rng.random() < 0.2:
            engine.add_request(ScoreRequest(prompt * 2, len(prompt)))
        for event in engine.step() if rng.random() < 0.6 else ():
            note(event, live, outputs, finished)
    while engine.has_work:
        for event in engine.step():
            note(event, live, outputs, finished)
    assert any(id in live and (id, 0) not in finished for id, sample in finished if sample)
    assert compilations == [] and engine.stats.compilations == 0
    assert engine.pages_in_use == 0 and engine.prefix_stats.hits > 0
    assert len(finished) > 30
    if format == "int8":
        used = programs.keys_used
        prefills = {program for program in used if isinstance(program, PrefillProgram)}
        scores = {program for program in used if isinstance(program, UpperProgram)}
        decodes = {program for program in used if isinstance(program, DecodeProgram)}
        assert len({program.tiles for program in prefills if program.tokens == 16}) == 2
        assert {(program.kind, program.single_step) for program in decodes} == {
            *itertools.product(("sampling", "greedy"), (False, True))
        }
        pages = {program.context for program in prefills | scores}
        assert pages == {*engine.model_runner.shapes.contexts} and len(pages) > 1
    for id, sample in finished:
        if id not in live:
            continue  # aborted after it had ended
        prompt, params, stream = live[id]
        assert outputs[id, sample] == alone(format, swiftkv, prompt, params, stream)[sample], (
            prompt,
            params,
        )


MIXTURE: list[dict[str, Any]] = [
    {},
    {},
    {"n": 2},
    {"ignore_eos": True, "logprobs": 3},
    {"temperature": 1.3, "seed": 5},
    {"temperature": 0.8, "top_k": 7, "top_p": 0.9, "n": 2},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.5},
    {"logit_bias": {3: 4.0}, "min_tokens": 1, "stop_token_ids": (7, 11)},
]


def note(event, live, outputs, finished) -> None:
    if event.request_id not in live:
        return  # a score
    outputs.setdefault((event.request_id, event.sample), []).extend(event.token_ids)
    if event.finish_reason:
        finished.append((event.request_id, event.sample))


@pytest.mark.parametrize(
    ("shape", "format"),
    [((2, 2), "fp8"), pytest.param((1, 4), "auto", marks=pytest.mark.long)],
    ids=str,
)
def test_a_mesh_changes_nothing(shape, format):
    dp_size, prompts = shape[0], prompts_of(2, 9)
    requests = [Request(prompt, SamplingParams(max_tokens=7)) for prompt in prompts]
    requests += [Request(prompts[0], SamplingParams(max_tokens=5, n=4 // dp_size, temperature=1.0))]
    scores = [ScoreRequest(prompt * 2, len(prompt), top_logprobs=2) for prompt in prompts]
    engine = Engine.from_model(
        model(), options(kv_cache_dtype=format, decode_rows=(4 // dp_size,)), mesh=make_mesh(shape)
    )
    assert collect(engine, requests) == collect(engine_of(format, True), requests)
    found, expected = (dict(engine.run(scores)) for engine in (engine, engine_of(format, True)))
    for number in range(len(scores)):
        np.testing.assert_allclose(
            logprobs_of(found[number]), logprobs_of(expected[number]), atol=1e-5
        )
    assert engine.pages_in_use == 0 and engine.stats.compilations == 0


def logprobs_of(event: RequestOutput) -> list[float]:
    return [entry.logprob for entry in event.logprobs or ()]


def test_the_end_token_has_its_log_probability():
    """In a run that goes on instead, the entry of the same token."""
    engine, prompt = engine_of("int8", True), prompts_of(5, 1)[0]
    params = SamplingParams(max_tokens=8, logprobs=3)
    whole = [output for _, output in engine.run([Request(prompt, params)])]
    tokens = [token for output in whole for token in output.token_ids]
    entries = [entry for output in whole for entry in output.logprobs or ()]
    at = next(at for at, token in enumerate(tokens) if at and token not in tokens[:at])
    params = SamplingParams(max_tokens=8, logprobs=3, stop_token_ids=(tokens[at],))
    outputs = [output for _, output in engine.run([Request(prompt, params)])]
    assert [token for output in outputs for token in output.token_ids] == tokens[:at]
    assert outputs[-1].stop_token == tokens[at]
    assert outputs[-1].stop_logprob == entries[at]
    assert sum(len(output.logprobs or ()) for output in outputs) == at
    silent = dataclasses.replace(params, logprobs=None)
    assert [o for _, o in engine.run([Request(prompt, silent)])][-1].stop_logprob is None


# Numbers that are none --------------------------------------------------------


NON_FINITE = [
    ("auto", {}),
    pytest.param("auto", {"temperature": 1.0, "top_k": 5, "logprobs": 1}, marks=pytest.mark.long),
    pytest.param("fp8", {}, marks=pytest.mark.long),
    pytest.param("int8", {"repetition_penalty": 1.5}, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("format", "params"), NON_FINITE, ids=str)
def test_a_broken_row_ends_alone(format, params):
    """Token 60 makes the hidden state NaN. A row that has it ends with an error; its pages, used
    again, harm no other row."""
    engine = broken_engine(format)
    bad = [
        Request([1, 2, 60, *range(3, 20)], SamplingParams(max_tokens=9, **params), rng_stream=i)
        for i in range(3)
    ]
    never = SamplingParams(max_tokens=9, logit_bias={60: -100})
    good = [Request(prompt, never) for prompt in prompts_of(6, 24) if 60 not in prompt]
    outputs = list(engine.run([bad[0], *good[:4], bad[1], *good[4:8], bad[2], *good[8:]]))
    ends = {number: output.finish_reason for number, output in outputs if output.finish_reason}
    assert [number for number, reason in ends.items() if reason == "error"] == [0, 5, 10]
    assert not any(output.token_ids for number, output in outputs if number in (0, 5, 10))
    found = {
        number: [token for of, output in outputs if of == number for token in output.token_ids]
        for number in ends
    }
    expected = [alone(format, True, tuple(request.prompt), request.params)[0] for request in good]
    assert [found[number] for number in sorted(found) if number not in (0, 5, 10)] == expected
    longer = ScoreRequest([*range(1, 30), 60, *range(1, 30)], 2)  # broken in its second chunk
    scores = [ScoreRequest([60, 1, 2, 3], 2), longer, ScoreRequest([5, 1, 2, 3], 2)]
    ends = {number: output for number, output in engine.run(scores) if output.finish_reason}
    assert [ends[number].finish_reason for number in range(3)] == ["error", "error", "stop"]
    assert ends[0].error == ends[1].error == NOT_FINITE
    assert np.isfinite(logprobs_of(ends[2])).all()
    assert engine.pages_in_use == 0


@functools.cache
def broken_engine(format: KVCacheDtype) -> Engine[ModelRunner]:
    """An engine with few pages, so that all are used again."""
    base = model()
    embed = base.llama.embed.at[60].set(jnp.nan)
    broken = dataclasses.replace(base, llama=dataclasses.replace(base.llama, embed=embed))
    room = 30 * 4 * bytes_per_token(base.config, cache_dtype(format, base.dtype))
    return Engine.from_model(
        broken, options(kv_cache_dtype=format, kv_cache_memory=room, chunks=(16,))
    )


# Log-probabilities ------------------------------------------------------------


def full_logprobs(tokens, swiftkv: bool) -> np.ndarray:
    """f32[T, V] by the full forward pass, on a row padded to one length: what comes after a
    position does not change it."""
    row = np.zeros((1, LENGTH), np.int32)
    row[0, : len(tokens)] = tokens
    return np.asarray(
        jax.nn.log_softmax(skv.logits(model(), jnp.asarray(row), swiftkv=swiftkv)[0], axis=-1)
    )[: len(tokens)]


@pytest.mark.parametrize("swiftkv", [True, pytest.param(False, marks=pytest.mark.long)])
def test_scores_are_those_of_the_full_forward(swiftkv):
    """With prefixes that prefill, decoding and other scores have left in the cache."""
    engine = engine_of("auto", swiftkv)
    rng = random.Random(3)
    for prompt in prompts_of(3, 12):
        tokens = [*prompt, *prompt]
        list(engine.run([Request(tokens[: len(tokens) // 2], SamplingParams(max_tokens=2))]))
        start = rng.randint(1, len(tokens) - 1)
        ((_, event),) = engine.run([ScoreRequest(tokens, start, top_logprobs=4)])
        expected = full_logprobs(tokens, swiftkv)
        np.testing.assert_allclose(
            logprobs_of(event),
            [expected[at - 1, tokens[at]] for at in range(start, len(tokens))],
            atol=1e-5,
        )
        assert event.token_ids == expected[start - 1 : -1].argmax(axis=-1).tolist()
        for entry, row in zip(event.logprobs or (), expected[start - 1 : -1], strict=True):
            np.testing.assert_allclose(
                [value for _, value in entry.top_logprobs], np.sort(row)[:-5:-1], atol=1e-5
            )


def test_logprobs_of_generated_tokens_are_their_scores():
    engine, prompt = engine_of("auto", True), prompts_of(4, 1)[0]
    params = SamplingParams(max_tokens=9, logprobs=5, temperature=0.9, top_k=5)
    events = [output for _, output in engine.run([Request(prompt, params)])]
    tokens = [token for event in events for token in event.token_ids]
    entries = [entry for event in events for entry in event.logprobs or ()]
    ((_, score),) = engine.run([ScoreRequest([*prompt, *tokens], len(prompt), top_logprobs=5)])
    np.testing.assert_allclose([entry.logprob for entry in entries], logprobs_of(score), atol=1e-5)
    assert [[id for id, _ in entry.top_logprobs] for entry in entries] == [
        [id for id, _ in entry.top_logprobs] for entry in score.logprobs or ()
    ]


# One prefix cache for prefill, decoding, scoring ------------------------------


@pytest.mark.parametrize("swiftkv", [True, False])
def test_pages_of_prefill_decoding_and_scores_are_the_same(swiftkv):
    """A conversation's pages come from prefill, from decoding and from scores; a reuse of each
    gives the fresh answer."""
    engine = engine_of("auto", swiftkv)
    prompt = [60, *prompts_of(5, 1)[0]][:6]
    ((reply,),) = collect(
        engine, [Request(prompt, SamplingParams(max_tokens=12, ignore_eos=True))]
    ).values()
    tokens = [*prompt, *reply, 5, 6, 7]
    ((_, score),) = engine.run([ScoreRequest([*tokens, *range(20, 32)], len(tokens))])
    assert score.num_cached_tokens == 16  # prefill's and decoding's
    tokens += range(20, 32)
    events = [output for _, output in engine.run([Request(tokens, SamplingParams(max_tokens=6))])]
    assert events[0].num_cached_tokens == 32  # and the score's
    expected = alone("auto", swiftkv, tuple(tokens), SamplingParams(max_tokens=6))[0]
    assert [token for event in events for token in event.token_ids] == expected
