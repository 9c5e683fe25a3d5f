"""An engine whose tokens keep their own upper keys and values: answers and scores are those of
`own_kv_oracle` and of whole sequences, whatever the chunks, the neighbours and the cache hold."""

import dataclasses
import itertools
import random
from typing import Any

import jax
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax.checkpoints import load
from swiftkv_jax.infer.engine.engine import Engine
from swiftkv_jax.infer.engine.requests import ScoreRequest
from swiftkv_jax.infer.runner import build
from swiftkv_jax.model.config import LayerKind
from swiftkv_jax.model.mesh import make_mesh
from tests import own_kv_oracle
from tests.infer.engine.own_kv_engines import (
    FLOAT32,
    LONG,
    MODES,
    TAIL,
    engine_of,
    greedy,
    mode_of,
    model,
    options,
    oracle_logprobs,
    prompts_of,
    run,
)

# Against the oracle -----------------------------------------------------------

HOW: dict[str, dict[str, Any]] = {
    "alone": {},
    "tiny chunks": {"chunks": (4,), "decode_steps": 1},
    "one chunk": {"chunks": (64,), "page_size": 8},
    "no prefix cache": {"enable_prefix_caching": False},
    "one at a time": {"max_num_seqs": 1, "decode_rows": (1,)},
    "gathered": {"decode_steps": 1},
    **{
        f"{dp}x{tp}": {"decode_rows": (4 // dp,), "chunks": (16,)}
        for dp, tp in ((2, 2), (1, 4), (2, 1), (1, 2))
    },
}
"""Options of an engine: rows, heads or both split over devices, other shapes, and pages of which a
chunk reads a copy, as where attention would widen the whole pool."""
CASES = [
    *[("tail 6", "alone"), ("own g=2", "alone"), ("tail 6 g=4", "alone")],
    *[("tail 6", "2x2"), ("tail 6 g=2", "1x4"), ("tail 6 g=4", "tiny chunks")],
]
MORE = [
    *itertools.product(("own", "tail 1", "own g=4", "tail 1 g=2"), ("alone",)),
    *itertools.product(("own", "tail 6", "own g=4", "tail 6 g=2"), list(HOW)[1:5]),
    *itertools.product(("tail 6", "own", "own g=2", "tail 6 g=4"), ("2x1", "1x2")),
    *[("tail 6 g=4", "gathered"), ("own g=2", "gathered"), ("tail 6 g=2", "2x2")],
]


@pytest.mark.short("own g=2-alone", "tail 6 g=2-1x4", "tail 6 g=4-tiny chunks")
@pytest.mark.parametrize(
    ("mode", "how"), [*CASES, *(pytest.param(*case, marks=LONG) for case in MORE)]
)
def test_answers_and_scores_are_the_oracles(mode, how, monkeypatch):
    """Of several sequences in each chunk and call, over cached pages too."""
    if how == "gathered":
        monkeypatch.setattr(build, "_widens_pool", lambda *args: True)
    mesh = make_mesh(how) if "x" in how else None
    engine = engine_of(mode)
    if how != "alone":
        served = model(mode_of(mode).shape)
        engine = Engine.from_model(served, options(mode, **HOW[how]), mesh=mesh)
    shapes = engine.model_runner.shapes
    assert (shapes.contexts[-1] is not None) == (how == "gathered")
    rng, prompts = random.Random(1), prompts_of(6, 7)
    requests: list[Any] = [greedy(prompt) for prompt in prompts]
    rows = [(*prompt, *prompt[:6]) for prompt in prompts]
    requests += [ScoreRequest(row, rng.randint(1, len(row) - 1)) for row in rows]
    for request, answer in zip(requests, run(engine, requests), strict=True):
        check_logprobs(request, answer, oracle_logprobs(mode, request, answer[0]))
    assert (engine.prefix_stats.hits > 0) == engine.options.enable_prefix_caching
    assert engine.pages_in_use == 0 and engine.stats.compilations == 0


EIGHT_BITS = {("tail 6", "fp8"), ("tail 6 g=2", "int8")}
"""Each format, and with and without groups."""


@pytest.mark.short("tail 6-fp8")
@pytest.mark.parametrize(
    ("mode", "format"),
    [
        pytest.param(*case, marks=[] if case in EIGHT_BITS else LONG)
        for case in itertools.product(("tail 6", "tail 6 g=2", "own", "own g=4"), ("fp8", "int8"))
    ],
)
def test_a_cache_in_eight_bits_is_the_oracles(mode, format):
    """Answers and scores, in chunks and in calls of three steps, cold and over cached pages, are
    those of entries that the oracle rounds.

    Rows with an entry so near a tie that float32 may round it to the other side are left out: that
    would move log-probabilities by thousandths.
    """
    engine = engine_of(mode, ("kv_cache_dtype", format), ("chunks", (8,)))
    prompts = prompts_of(23, 8)
    requests = [greedy(prompt) for prompt in prompts]
    requests += [ScoreRequest((*prompt, *prompt[:6]), len(prompt)) for prompt in prompts]
    answers = [*run(engine, requests), *run(engine, requests)]
    compared = 0
    for request, answer in zip(requests * 2, answers, strict=True):
        stored = own_kv_oracle.EightBits(format)
        expected = oracle_logprobs(mode, request, answer[0], stored=stored)
        if stored.nearest_tie > FLOAT32:
            check_logprobs(request, answer, expected)
            compared += 1
    # Of g=4 there are three times as many entries
    assert (
        compared > len(answers) * (0.3 if mode == "own g=4" else 0.6)
        and engine.prefix_stats.hits > 0
    )


def check_logprobs(request, answer: tuple[list[int], list[float]], expected: np.ndarray) -> None:
    """An answer is greedy and it, or what is scored, has the log-probabilities of `expected`."""
    tokens, logprobs = answer
    if isinstance(request, ScoreRequest):
        tokens = request.tokens[request.start :]
    else:
        assert len(tokens) == request.params.max_tokens
        np.testing.assert_array_equal(tokens, expected.argmax(axis=-1))
    np.testing.assert_allclose(logprobs, expected[range(len(expected)), tokens], atol=3e-5)


# What must not matter ---------------------------------------------------------


@pytest.mark.parametrize(
    "mode",
    [
        "tail 6 g=4",
        *(
            pytest.param(mode, marks=LONG)
            for mode in ("tail 6", "own", "boundary", "tail 1", "own g=4", "boundary g=4")
        ),
    ],
)
def test_answers_do_not_depend_on_the_cache(mode):
    """A conversation of three turns, each of which contains the answers before it, over a cold
    cache and over one that holds the earlier turns, scores and other continuations of them."""
    warm, cold = engine_of(mode), engine_of(mode, ("enable_prefix_caching", False))
    conversation = list(prompts_of(3, 1)[0])
    for turn in range(3):
        request = greedy(conversation)
        ((tokens, logprobs),) = run(cold, [request])
        for _ in range(2):
            ((found, again),) = run(warm, [request])
            assert found == tokens, turn
            np.testing.assert_allclose(again, logprobs, atol=2e-5)
        expected = oracle_logprobs(mode, request, tokens)
        check_logprobs(request, (tokens, logprobs), expected)
        # The same tokens with other prompts: what is own there must not reach the next turn.
        row = [*conversation, *tokens, 1, 2, 3]
        for start in (3, len(conversation), len(row) - 1):
            one, other = (run(engine, [ScoreRequest(row, start)])[0][1] for engine in (warm, cold))
            np.testing.assert_allclose(one, other, atol=2e-5)
        run(warm, [greedy(row[:cut]) for cut in range(5, len(row), 4)])
        conversation += [*tokens, *range(turn, turn + 5)]
    assert warm.prefix_stats.hits > 0 == cold.prefix_stats.hits
    assert warm.pages_in_use == 0


@pytest.mark.long
@pytest.mark.parametrize("format", ["int8", pytest.param("fp8", marks=LONG)])
def test_quantised_weights_with_two_caches(format, tmp_path):
    """Heads are put into the order of the cache's; answers have the log-probabilities of whole
    rows."""
    skv.save_hf(model("g=2"), tmp_path / "model")
    quantised = load(tmp_path / "model", dtype="float32", quantization=format)
    engine = Engine.from_model(quantised, options("tail 6", scoring=False))
    config = dataclasses.replace(quantised.config, generated_kv="own", exact_tail=TAIL)
    whole = dataclasses.replace(quantised, config=config)
    for prompt in prompts_of(14, 3):
        ((tokens, logprobs),) = run(engine, [greedy(prompt)])
        row = np.array([[*prompt, *tokens]], np.int32)
        logits = skv.logits(whole, row, prompt_lengths=[len(prompt)])[0, len(prompt) - 1 : -1]
        expected = np.asarray(jax.nn.log_softmax(logits, axis=-1))
        np.testing.assert_allclose(logprobs, expected[range(len(tokens)), tokens], atol=1e-4)


# Modes ------------------------------------------------------------------------


@pytest.mark.long
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


@pytest.mark.long
def test_mode_of_the_checkpoint_and_of_the_options():
    prompt = prompts_of(9, 1)[0]
    config = dataclasses.replace(model().config, generated_kv="own", exact_tail=TAIL)
    own = dataclasses.replace(model(), config=config)
    found = {mode: run(engine_of(mode), [greedy(prompt, 8)])[0][0] for mode in MODES}
    assert len(set(map(tuple, found.values()))) > 2
    assert skv.generate(own, prompt, max_tokens=8) == found["tail 6"]
    assert skv.generate(own, prompt, max_tokens=8, exact_tail=1) == found["tail 1"]
    assert skv.generate(own, prompt, max_tokens=8, generated_kv="boundary") == found["boundary"]


@LONG
def test_a_teacher_is_the_same_in_all_modes():
    prompt = prompts_of(9, 1)[0]
    plain, own = (
        skv.generate(model(), prompt, max_tokens=8, swiftkv=False, generated_kv=kv)
        for kv in (None, "own")
    )
    assert plain == own


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
    grouped = model("g=2")
    windows = dataclasses.replace(grouped.config, layer_kinds=(LayerKind(window=2),))
    with_windows = dataclasses.replace(grouped, config=windows)
    with pytest.raises(skv.UsageError, match="needs upper layers without windows"):
        skv.generate(with_windows, [1, 2], max_tokens=2, generated_kv="own")
    slim = dataclasses.replace(model(), llama=dataclasses.replace(model().llama, upper_qkv=None))
    with pytest.raises(skv.UsageError, match="needs the teacher's upper k and v"):
        skv.generate(slim, [1, 2], max_tokens=2, generated_kv="own")
    upper: Any = grouped.llama.upper_qkv
    without_q = dataclasses.replace(grouped.llama, upper_qkv=dataclasses.replace(upper, q=None))
    with pytest.raises(skv.UsageError, match="needs the teacher's upper q, k and v"):
        skv.generate(
            dataclasses.replace(grouped, llama=without_q), [1], max_tokens=2, generated_kv="own"
        )
