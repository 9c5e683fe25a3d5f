"""An engine whose tokens keep their own upper keys and values: answers and scores are those of
`own_kv_oracle` and of whole sequences, whatever the chunks, the neighbours and the cache hold."""

import dataclasses
import functools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax.cache import bytes_per_token
from swiftkv_jax.infer.engine.engine import Engine
from swiftkv_jax.infer.engine.options import EngineOptions
from swiftkv_jax.infer.engine.requests import Request, ScoreRequest
from swiftkv_jax.infer.engine.sampling_params import SamplingParams
from swiftkv_jax.infer.runner.model_runner import ModelRunner
from swiftkv_jax.mesh import make_mesh
from tests import own_kv_oracle, tiny

LENGTH, TAIL = 64, 6
HF = tiny.hf_config(num_hidden_layers=4, num_key_value_layers=2)
TENSORS = tiny.tensors_for(HF)
LONG = pytest.mark.long
MODES = {"boundary": (None, 0), "own": ("own", 0), "tail 1": ("own", 1), "tail 6": ("own", TAIL)}


@functools.cache
def model() -> skv.Model:
    return tiny.model_of(HF, TENSORS)


def options(mode: str = "tail 6", **fields: Any) -> EngineOptions:
    kv, tail = MODES[mode]
    defaults: dict[str, Any] = {
        "max_model_len": LENGTH,
        "max_num_seqs": 4,
        "page_size": 4,
        "decode_steps": 3,
        "chunks": (4, 16),
        "decode_rows": (4,),
        "scoring": True,
        "generated_kv": kv,
        "exact_tail": tail or None,
    }
    return EngineOptions(**defaults | fields)


@functools.cache
def engine_of(mode: str, *fields: tuple[str, Any]) -> Engine[ModelRunner]:
    return Engine.from_model(model(), options(mode, **dict(fields)))


def prompts_of(seed: int, count: int, longest: int = 24) -> list[tuple[int, ...]]:
    """Prompts of all lengths; some begin alike."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(61) for _ in range(length)] for length in (0, 3, 9, 16)]
    return [
        (*rng.choice(prefixes), *(rng.randrange(61) for _ in range(rng.randint(1, longest - 16))))
        for _ in range(count)
    ]


def run(engine: Engine, requests) -> list[tuple[list[int], list[float]]]:
    """(tokens, their log-probabilities) of each request."""
    found: list[tuple[list[int], list[float]]] = [([], []) for _ in requests]
    for number, output in engine.run(requests):
        found[number][0].extend(output.token_ids)
        found[number][1].extend(entry.logprob for entry in output.logprobs or ())
    return found


def greedy(prompt, count: int = 5, **fields: Any) -> Request:
    return Request(prompt, SamplingParams(max_tokens=count, ignore_eos=True, logprobs=0), **fields)


@functools.cache
def forward():
    return jax.jit(
        lambda tokens, lengths, config: skv.logits(
            dataclasses.replace(model(), config=config), tokens, prompt_lengths=lengths
        ),
        static_argnums=2,
    )


def full_logprobs(mode: str, tokens, prompt_length: int) -> np.ndarray:
    """f32[T, V] by the full forward pass of a row padded to one length."""
    kv, tail = MODES[mode]
    config = dataclasses.replace(model().config, generated_kv=kv or "boundary", exact_tail=tail)
    row = np.zeros((1, LENGTH), np.int32)
    row[0, : len(tokens)] = tokens
    logits = forward()(row, jnp.array([prompt_length]), config)
    return np.asarray(jax.nn.log_softmax(logits[0], axis=-1))[: len(tokens)]


def check_answer(mode: str, prompt, answer: tuple[list[int], list[float]], atol: float = 2e-5):
    """The answer is greedy, and its log-probabilities are those of whole rows."""
    tokens, logprobs = answer
    row = full_logprobs(mode, [*prompt, *tokens], len(prompt))[len(prompt) - 1 : -1]
    np.testing.assert_allclose(logprobs, row[range(len(tokens)), tokens], atol=atol)
    np.testing.assert_allclose(logprobs, row.max(axis=-1), atol=atol)


# Against the oracle -----------------------------------------------------------


@pytest.mark.parametrize("mode", ["own", pytest.param("tail 1", marks=LONG), "tail 6"])
def test_answers_are_the_oracles(mode):
    prompts = prompts_of(0, 6)
    for prompt, (tokens, logprobs) in zip(
        prompts, run(engine_of(mode), [greedy(prompt) for prompt in prompts]), strict=True
    ):
        expected, likelihoods = own_kv_oracle.greedy(
            HF, TENSORS, prompt, exact_tail=MODES[mode][1], max_tokens=5
        )
        assert tokens == expected
        np.testing.assert_allclose(logprobs, likelihoods, atol=3e-5)


@pytest.mark.parametrize("mode", ["own", pytest.param("tail 1", marks=LONG), "tail 6"])
def test_scores_are_the_oracles(mode):
    rng = random.Random(1)
    rows = [(*prompt, *prompt) for prompt in prompts_of(1, 5, longest=20)]
    starts = [rng.randint(1, len(row) - 1) for row in rows]
    scores = [ScoreRequest(row, start) for row, start in zip(rows, starts, strict=True)]
    found = run(engine_of(mode), scores)
    for row, start, (_, logprobs) in zip(rows, starts, found, strict=True):
        own = np.arange(len(row)) >= start - MODES[mode][1]
        logits = own_kv_oracle.logits(HF, TENSORS, row, own)
        expected = np.asarray(jax.nn.log_softmax(logits, axis=-1))
        np.testing.assert_allclose(
            logprobs, [expected[at - 1, row[at]] for at in range(start, len(row))], atol=3e-5
        )


# What must not matter ---------------------------------------------------------

FIELDS: dict[str, dict[str, Any]] = {
    "tiny chunks": {"chunks": (4,), "decode_steps": 1},
    "one chunk": {"chunks": (64,), "page_size": 8},
    "no prefix cache": {"enable_prefix_caching": False},
    "one at a time": {"max_num_seqs": 1, "decode_rows": (1,)},
}


@pytest.mark.parametrize(
    ("mode", "fields"),
    [
        ("tail 6", "tiny chunks"),
        *(
            pytest.param(mode, fields, marks=LONG)
            for mode in ("own", "tail 6")
            for fields in FIELDS
        ),
    ],
)
def test_shapes_change_nothing(mode, fields):
    engine = Engine.from_model(model(), options(mode, **FIELDS[fields]))
    prompts = prompts_of(2, 8)
    requests = [greedy(prompt) for prompt in prompts]
    requests += [ScoreRequest((*prompt, *prompt), len(prompt)) for prompt in prompts]
    found, expected = run(engine, requests), run(engine_of(mode), requests)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one[0] == other[0], number
        np.testing.assert_allclose(one[1], other[1], atol=2e-5)
    for prompt, answer in zip(prompts, found, strict=False):
        check_answer(mode, prompt, answer)
    assert engine.pages_in_use == 0 and engine.stats.compilations == 0


@pytest.mark.parametrize(
    "mode", ["own", "tail 6", *(pytest.param(mode, marks=LONG) for mode in ("boundary", "tail 1"))]
)
def test_answers_do_not_depend_on_the_cache(mode):
    """A conversation of three turns, each of which contains the answers before it, over a cold
    cache and over one that holds the earlier turns, scores and other continuations of them."""
    warm = Engine.from_model(model(), options(mode))
    cold = Engine.from_model(model(), options(mode, enable_prefix_caching=False))
    conversation = list(prompts_of(3, 1)[0])
    for turn in range(3):
        ((tokens, logprobs),) = run(cold, [greedy(conversation)])
        for _ in range(2):
            ((found, again),) = run(warm, [greedy(conversation)])
            assert found == tokens, turn
            np.testing.assert_allclose(again, logprobs, atol=2e-5)
        check_answer(mode, conversation, (tokens, logprobs))
        # The same tokens with other prompts: what is own there must not reach the next turn.
        row = [*conversation, *tokens, 1, 2, 3]
        for start in (3, len(conversation), len(row) - 1):
            one, other = (run(engine, [ScoreRequest(row, start)])[0][1] for engine in (warm, cold))
            np.testing.assert_allclose(one, other, atol=2e-5)
        run(warm, [greedy(row[:cut]) for cut in range(5, len(row), 4)])
        conversation += [*tokens, *range(turn, turn + 5)]
    assert warm.prefix_stats.hits > 0 == cold.prefix_stats.hits
    assert warm.pages_in_use == 0


def test_samples_share_their_prompt():
    """They copy the page that is partly filled, own keys and values included; each answer has the
    log-probabilities of whole rows."""
    params = SamplingParams(max_tokens=6, n=3, temperature=1.0, seed=3, ignore_eos=True, logprobs=0)
    for prompt in prompts_of(4, 4):
        outputs = [output for _, output in engine_of("tail 6").run([Request(prompt, params)])]
        for sample in range(3):
            mine = [output for output in outputs if output.sample == sample]
            tokens = [token for output in mine for token in output.token_ids]
            logprobs = [entry.logprob for output in mine for entry in output.logprobs or ()]
            row = full_logprobs("tail 6", [*prompt, *tokens], len(prompt))[len(prompt) - 1 : -1]
            np.testing.assert_allclose(logprobs, row[range(6), tokens], atol=2e-5)


@pytest.mark.parametrize("format", ["int8", pytest.param("fp8", marks=LONG)])
def test_a_cache_in_eight_bits(format):
    """Nearly the same log-probabilities, and the same ones cold and warm."""
    engine = engine_of("tail 6", ("kv_cache_dtype", format))
    prompts = prompts_of(5, 6)
    requests = [ScoreRequest((*prompt, *prompt), len(prompt)) for prompt in prompts]
    exact, first, second = (run(e, requests) for e in (engine_of("tail 6"), engine, engine))
    for one, two, three in zip(exact, first, second, strict=True):
        np.testing.assert_allclose(two[1], three[1], atol=1e-5)
        np.testing.assert_allclose(two[1], one[1], atol=0.3)
    assert engine.prefix_stats.hits > 0


@pytest.mark.parametrize("shape", [(2, 1), pytest.param((1, 2), marks=LONG)], ids=str)
def test_a_mesh_changes_nothing(shape):
    engine = Engine.from_model(
        model(), options(decode_rows=(4 // shape[0],)), mesh=make_mesh(shape)
    )
    prompts = prompts_of(6, 7)
    requests = [greedy(prompt) for prompt in prompts]
    requests += [ScoreRequest((*prompt, *prompt), len(prompt)) for prompt in prompts]
    for one, other in zip(run(engine, requests), run(engine_of("tail 6"), requests), strict=True):
        assert one[0] == other[0]
        np.testing.assert_allclose(one[1], other[1], atol=2e-5)


# Modes ------------------------------------------------------------------------


def test_modes_differ():
    """Otherwise the comparisons above prove less than they seem to."""
    prompt = prompts_of(7, 1)[0]
    found = [
        run(engine_of(mode), [ScoreRequest([*prompt, *prompt], len(prompt))]) for mode in MODES
    ]
    logprobs = [scores for ((_, scores),) in found]
    for i, one in enumerate(logprobs):
        for other in logprobs[:i]:
            assert np.abs(np.subtract(one, other)).max() > 1e-3


SOAKED = {"own": 0.4, "tail 6": 0.4, "boundary": 0.2}
"""Share of each mode."""


def test_soak(compilations):
    """Requests of all modes that come and are aborted at random: each answer is that of the request
    alone in an engine of its mode. `make test-soak` has a longer one."""
    soak(rounds=60, seed=0, compilations=compilations)


def soak(*, rounds: int, seed: int, compilations: list[str], **fields: Any) -> None:
    engine = mixed_engine(*fields.items())
    rng = random.Random(seed)
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
        mode = rng.choices(list(SOAKED), list(SOAKED.values()))[0]
        kv, tail = MODES[mode]
        chosen: dict[str, Any] = {"generated_kv": kv, "exact_tail": tail or None}
        if outputs and rng.random() < 0.3:  # a later turn of what another request has answered
            number, sample = rng.choice(list(outputs))
            if number in live and isinstance(live[number][1], Request):
                prompt = (*live[number][1].prompt, *outputs[number, sample][0], *prompt)[:40]
        if rng.random() < 0.3:
            request = ScoreRequest(prompt * 2, rng.randint(1, 2 * len(prompt) - 1), **chosen)
            request = dataclasses.replace(request, tokens=request.tokens[:LENGTH])
            request = dataclasses.replace(
                request, start=min(request.start, len(request.tokens) - 1)
            )
        else:
            params = SamplingParams(
                max_tokens=rng.randint(1, 10), logprobs=0, n=rng.choice([1, 1, 2])
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
    checked = [
        (live[number], outputs[number, sample]) for number, sample in finished if number in live
    ]
    assert len(checked) > rounds / 2 and {mode for (mode, _), _ in checked} == set(SOAKED)
    for (mode, request), found in checked:
        alone = dataclasses.replace(request, generated_kv=None, exact_tail=None)
        if isinstance(alone, Request):
            alone = dataclasses.replace(alone, params=dataclasses.replace(alone.params, n=1))
        ((tokens, logprobs),) = run(alone_engine(mode, *fields.items()), [alone])
        assert found[0] == tokens, (mode, request)
        np.testing.assert_allclose(found[1], logprobs, atol=2e-5)


@functools.cache
def mixed_engine(*fields: tuple[str, Any]) -> Engine[ModelRunner]:
    """An engine for all modes, with few pages, so that they are used again."""
    room = 60 * 4 * bytes_per_token(model().config, jnp.float32)
    chosen = options("boundary", mixed_generated_kv=True, kv_cache_memory=room, **dict(fields))
    return Engine.from_model(model(), chosen)


@functools.cache
def alone_engine(mode: str, *fields: tuple[str, Any]) -> Engine[ModelRunner]:
    return Engine.from_model(model(), options(mode, enable_prefix_caching=False, **dict(fields)))


def test_requests_choose_their_mode():
    """Each in one engine, next to each other and over each other's pages."""
    engine = mixed_engine()
    rng, requests, expected = random.Random(8), [], []
    for prompt in prompts_of(8, 24):
        mode = rng.choice(list(MODES))
        kv, tail = MODES[mode]
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


def test_mode_of_the_checkpoint_and_of_the_options():
    prompt = prompts_of(9, 1)[0]
    config = dataclasses.replace(model().config, generated_kv="own", exact_tail=TAIL)
    own = dataclasses.replace(model(), config=config)
    found = {
        mode: skv.generate(model(), prompt, max_tokens=8, generated_kv=kv, exact_tail=tail or None)
        for mode, (kv, tail) in MODES.items()
    }
    assert skv.generate(own, prompt, max_tokens=8) == found["tail 6"]
    assert skv.generate(own, prompt, max_tokens=8, exact_tail=1) == found["tail 1"]
    assert skv.generate(own, prompt, max_tokens=8, generated_kv="boundary") == found["boundary"]
    teacher = skv.generate(model(), prompt, max_tokens=8, swiftkv=False)
    assert skv.generate(own, prompt, max_tokens=8, swiftkv=False) == teacher


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"generated_kv": "mine"}, "`generated_kv`='mine' is not one of boundary, own"),
        ({"exact_tail": 4}, "`exact_tail`=4 needs `generated_kv`=own"),
        ({"exact_tail": -1, "generated_kv": "own"}, "`exact_tail`=-1 must be"),
        ({"exact_tail": 4, "generated_kv": "boundary"}, "`exact_tail`=4 needs"),
    ],
)
def test_bad_options_are_refused(fields, message):
    with pytest.raises(skv.UsageError, match=message):
        skv.generate(model(), [1, 2], max_tokens=2, **fields)


def test_models_without_room_or_weights_are_refused():
    hf = tiny.hf_config(key_value_group_size=2)
    grouped = tiny.model_of(hf, tiny.tensors_for(hf))
    with pytest.raises(skv.UsageError, match="needs key_value_group_size=1, not 2"):
        skv.generate(grouped, [1, 2], max_tokens=2, generated_kv="own")
    with pytest.raises(skv.UsageError, match="needs key_value_group_size=1, not 2"):
        Engine.from_model(grouped, options("boundary", mixed_generated_kv=True))
    slim = dataclasses.replace(model(), llama=dataclasses.replace(model().llama, upper_qkv=None))
    with pytest.raises(skv.UsageError, match="needs the teacher's upper k and v"):
        skv.generate(slim, [1, 2], max_tokens=2, generated_kv="own")


def test_requests_cannot_choose_unless_the_engine_lets_them():
    with pytest.raises(skv.UsageError, match="mixed_generated_kv"):
        engine_of("tail 6").add_request(greedy([1, 2], generated_kv="own"))
    engine = mixed_engine()
    with pytest.raises(skv.UsageError, match="`exact_tail`=3 of a request needs"):
        engine.add_request(greedy([1, 2], exact_tail=3))
