"""Sequences that follow a grammar with drafts of the host: what they emit is what they emit one
token at a time."""

import dataclasses
import functools

import numpy as np
import pytest

from swiftkv_jax.infer.engine.constrained import constrained_call, fill_masks_along
from swiftkv_jax.infer.engine.engine import Engine
from swiftkv_jax.infer.engine.grammar import fill_rows, mask_words
from swiftkv_jax.infer.engine.options import SpeculativeConfig
from swiftkv_jax.infer.engine.requests import Request
from swiftkv_jax.infer.engine.sampling_params import SamplingParams
from swiftkv_jax.infer.structured.structured_outputs import StructuredOutputs
from swiftkv_jax.infer.structured.token_filter import TokenFilter
from tests.infer.engine import test_reasoning_grammar as reasoning
from tests.infer.engine import test_scheduler
from tests.infer.engine.own_kv_engines import model, options
from tests.infer.engine.test_grammar import Among, Digits, expected
from tests.infer.engine.test_scheduler import check_empty
from tests.infer.engine.test_speculation import answers, check_equal
from tests.infer.mock_model_runner import VOCAB, mock_engine
from tests.infer.test_structured_outputs import COMPILER, TOKENIZER


def masks_along(matcher, draft, vocab_size: int = VOCAB) -> tuple[np.ndarray, int]:
    masks = np.zeros((1, len(draft) + 1, mask_words(vocab_size)), np.uint32)
    (count,) = fill_masks_along([matcher], [draft], masks)
    return masks[0], count


def one_by_one(matcher, draft, vocab_size: int = VOCAB) -> np.ndarray:
    rows, state = [], matcher.copy()
    for token in [*draft, None]:
        masks = np.zeros((1, mask_words(vocab_size)), np.uint32)
        fill_rows({0: state}, masks)
        rows.append(masks[0])
        if token is not None:
            state.accept(token)
    return np.array(rows)


X, Y, THINK = reasoning.X, reasoning.Y, reasoning.END
JSON = COMPILER.compile(StructuredOutputs(regex=r'\{"name": "[a-z]{2,9}", "age": [0-9]+\}'))


@pytest.mark.parametrize(
    ("matcher", "draft"),
    [
        (Digits(9), expected(5)),
        (JSON, TOKENIZER('{"name": "abc", "age": 12')["input_ids"]),
        (TokenFilter(VOCAB, bad_words=[[4, 5], [7, 8]]), [4, 3, 7]),
        (TokenFilter(VOCAB, grammar=Digits(9), bad_words=[[13, 15]]), [13]),
    ],
    ids=["digits", "json", "bad words", "bad words in a grammar"],
)
def test_masks_along_a_draft_are_those_of_each_place(matcher, draft):
    masks, count = masks_along(matcher, draft)
    assert count == len(draft)
    np.testing.assert_array_equal(masks, one_by_one(matcher, draft))
    before = one_by_one(matcher, [])
    assert np.array_equal(masks[:1], before), "the matcher is where it was"


def test_a_draft_across_the_end_of_reasoning():
    matcher, draft = reasoning.matcher(), [X, Y, THINK]
    masks, count = masks_along(matcher, draft, reasoning.VOCAB)
    assert count == 3 and masks[3, 0] == 1 << X, "the grammar decides what follows"
    np.testing.assert_array_equal(masks, one_by_one(matcher, draft, reasoning.VOCAB))
    assert matcher.forced() == [] and matcher.copy().grammar.forced() == [X]
    assert masks_along(matcher, [*draft, X], reasoning.VOCAB)[1] == 3, "X ends the text"


@pytest.mark.parametrize(
    ("matcher", "draft", "count"),
    [
        (Digits(9), [13, 14, 19, 16], 2),  # 19 is not allowed
        (Digits(2, eos=None), [13, 14], 1),  # 14 ends the text
        (Digits(9, fails_at=2), [13, 14, 15], 1),  # nothing can follow 14
        (TokenFilter(VOCAB, allowed_token_ids=[3], bad_words=[[3, 3, 3]]), [3, 3, 3], 1),
    ],
    ids=["not allowed", "ends", "fails", "nothing is allowed"],
)
def test_drafts_end_where_the_grammar_does(matcher, draft, count):
    masks, found = masks_along(matcher, draft)
    assert found == count
    np.testing.assert_array_equal(masks[: count + 1], one_by_one(matcher, draft[:count]))
    assert not matcher.error


def test_a_call_has_masks_and_drafts_at_the_right():
    call = constrained_call([], [], 4, VOCAB)
    assert call.width == 4 and not call.failed
    padded = call.operands(2, [])
    assert (padded["drafts"].source == -1).all() and padded["masks"].shape == (2, 4, 4)


def test_forced_tokens_of_a_grammar():
    matcher = JSON.copy()
    assert TOKENIZER.decode(matcher.forced()) == '{"name": "'
    for token in TOKENIZER('{"name": "abcdefghi')["input_ids"]:
        matcher.accept(token)
    assert TOKENIZER.decode(matcher.forced()) == '", "age": '
    assert TokenFilter(VOCAB, grammar=matcher).forced() == matcher.forced()
    assert TokenFilter(VOCAB, bad_words=[[3]]).forced() == []


@pytest.mark.parametrize(("pages", "steps"), [(64, 3), (12, 3), (10, 1)])
def test_forced_tokens_save_steps(pages, steps):
    """Beside sequences without a grammar, and where pages are short."""
    engine, runner = mock_engine(
        structured_outputs=True, width=4, num_pages=pages, slots=3, reserve_tokens=4, steps=steps
    )
    params = SamplingParams(max_tokens=30)
    grammars = [Digits(20), Digits(20, eos=None), Digits(9, fails_at=4)]
    bound = [Request([3, 4, n], params, grammar=one) for n, one in enumerate(grammars)]
    short = Request([3, 4], SamplingParams(max_tokens=8), grammar=Digits(20))
    found = test_scheduler.answers(engine, [*bound, short, Request([9, 1], params)])
    assert [len(found[n, 0]) for n in range(4)] == [20, 20, 4, 8]
    assert all(found[n, 0] == expected(len(found[n, 0])) for n in range(4))
    check_empty(engine)
    calls = [call for call in runner.calls if call.startswith("constrained")]
    assert len(calls) <= 34 and any(call.endswith("of 4") for call in calls)
    assert engine.stats.speculation.accepted_tokens > 10


def test_tokens_a_step_of_a_fixed_schema():
    engine, runner = mock_engine(
        structured_outputs=True,
        width=8,
        max_model_len=256,
        num_pages=256,
        speculative=SpeculativeConfig(),
    )
    texts = {name: {"type": "string", "pattern": "^[a-z]{4}$"} for name in ("title", "summary")}
    schema = {"type": "object", "properties": texts, "required": [*texts]}
    requests = [
        Request(
            [3, number],
            SamplingParams(max_tokens=250),
            grammar=COMPILER.compile(StructuredOutputs(json=schema)),
        )
        for number in range(4)
    ]
    found = test_scheduler.answers(engine, requests)
    assert all("summary" in TOKENIZER.decode(found[number, 0]) for number in range(4))
    steps = sum(int(call.split()[1]) for call in runner.calls if "constrained" in call)
    assert engine.stats.new_tokens / steps > 1.4


@functools.cache
def speculating() -> Engine:
    config = SpeculativeConfig(num_speculative_tokens=3, enable_adaptive_verification=False)
    chosen = options("boundary", scoring=False, chunks=(16,), structured_outputs=True)
    return Engine.from_model(model(), dataclasses.replace(chosen, speculative=config))


def test_tokens_on_a_model_are_those_without_drafts():
    engine, vocab = speculating(), 61
    grammars = [
        Among(tuple(range(vocab))),
        Among((5, 8, 40)),
        Digits(30, vocab_size=vocab),
        TokenFilter(vocab, bad_words=[[5, 8], [8]]),
        TokenFilter(vocab, allowed_token_ids=[3, 4, 5, 6]),
        None,
    ]
    params = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "logprobs": 2, "max_tokens": 24}
    requests = [
        Request(
            [3, 1, 4, 1, 5, number],
            SamplingParams(**params, temperature=temperature, seed=number),
            grammar=grammar,
            speculative=False,
        )
        for number, grammar in enumerate(grammars)
        for temperature in (0, 1.3)
    ]
    plain = answers(engine, requests)
    drafting = [
        dataclasses.replace(one, speculative=True, prediction=plain[number, 0][0])
        for number, one in enumerate(requests)
    ]
    engine.reset_stats()
    check_equal(plain, answers(engine, drafting))
    counted = engine.stats.speculation
    assert counted.accepted_tokens > 150 and engine.stats.compilations == 0
    check_equal(
        plain, answers(engine, [dataclasses.replace(one, prediction=()) for one in drafting])
    )
