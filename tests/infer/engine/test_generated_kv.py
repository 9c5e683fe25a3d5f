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


@pytest.mark.parametrize("mode", ["own", "tail 1", "tail 6"])
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


@pytest.mark.parametrize("mode", ["own", "tail 1", "tail 6"])
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


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("mode", ["own", "tail 6"])
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


@pytest.mark.parametrize("mode", MODES)
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
            scores = [run(engine, [ScoreRequest(row, start)])[0][1] for engine in (warm, cold)]
            np.testing.assert_allclose(*scores, atol=2e-5)
        run(warm, [greedy(row[:cut]) for cut in range(5, len(row), 4)])
        conversation += [*tokens, *range(turn, turn + 5)]
    assert warm.prefix_stats.hits > 0 == cold.prefix_stats.hits
    assert warm.pages_in_use == 0


@pytest.mark.parametrize("samples", [1, 3])
def test_samples_share_their_prompt(samples):
    """Samples copy the page that is partly filled, own keys and values included."""
    params = SamplingParams(max_tokens=6, n=samples, temperature=1.0, seed=3, ignore_eos=True)
    for prompt in prompts_of(4, 4):
        outputs = [output for _, output in engine_of("tail 6").run([Request(prompt, params)])]
        for sample in range(samples):
            tokens = [t for output in outputs if output.sample == sample for t in output.token_ids]
            alone = SamplingParams(max_tokens=6, temperature=1.0, seed=3, ignore_eos=True)
            if sample == 0:
                ((expected, _),) = run(
                    engine_of("own", ("exact_tail", TAIL)), [Request(prompt, alone)]
                )
                assert tokens == expected
            ((_, scores),) = run(
                engine_of("tail 6"), [ScoreRequest([*prompt, *tokens], len(prompt))]
            )
            row = full_logprobs("tail 6", [*prompt, *tokens], len(prompt))
            expected = row[range(len(prompt) - 1, len(row) - 1), tokens]
            np.testing.assert_allclose(scores, expected, atol=2e-5)


@pytest.mark.parametrize("format", ["int8", "fp8"])
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


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)], ids=str)
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


def test_requests_choose_their_mode():
    """Each in one engine, next to each other and over each other's pages."""
    engine = Engine.from_model(model(), options("boundary", mixed_generated_kv=True))
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
    engine = engine_of("boundary", ("mixed_generated_kv", True))
    with pytest.raises(skv.UsageError, match="`exact_tail`=3 of a request needs"):
        engine.add_request(greedy([1, 2], exact_tail=3))
