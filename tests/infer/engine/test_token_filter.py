"""Tokens that are allowed, and words that are forbidden, within a grammar or without."""

import contextlib
import random

import numpy as np
import pytest

from swiftkv_jax import UsageError
from swiftkv_jax.infer.engine.grammar import fill_rows, mask_words
from swiftkv_jax.infer.engine.requests import Request
from swiftkv_jax.infer.engine.sampling_params import SamplingParams
from swiftkv_jax.infer.structured.token_filter import TokenFilter
from tests.infer.engine.test_grammar import Digits, expected
from tests.infer.engine.test_scheduler import answers, check_empty
from tests.infer.mock_model_runner import VOCAB, mock_engine


def allowed_by(*matchers) -> list[list[int]]:
    masks = np.zeros((len(matchers), mask_words(VOCAB)), np.uint32)
    fill_rows(dict(enumerate(matchers)), masks)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    assert not bits[:, VOCAB:].any()
    return [np.nonzero(row)[0].tolist() for row in bits]


@pytest.mark.parametrize("seed", range(3))
def test_against_the_definition(seed):
    rng = random.Random(seed)
    for _ in range(30):
        allowed = sorted(rng.sample(range(VOCAB), rng.randint(1, VOCAB)))
        words = [[rng.randrange(4) for _ in range(rng.randint(1, 4))] for _ in range(4)]
        one = TokenFilter(VOCAB, allowed_token_ids=allowed, bad_words=words)
        text: list[int] = []
        for _ in range(20):
            possible = [
                token
                for token in allowed
                if not any([*text, token][-len(word) :] == word for word in words)
            ]
            assert allowed_by(one) == [possible]
            assert bool(one.error) == (not possible) and not one.is_ended
            token = rng.choice([*possible, 0, 1, 2, 3])
            before = one.copy()
            one.accept(token)
            if len(text) > 2:
                assert allowed_by(before) == [possible], "a copy has a state of its own"
            text.append(token)


def test_kinds_are_filled_together():
    grammar = Digits(4)
    free, bound = TokenFilter(VOCAB, bad_words=[[5]]), TokenFilter(VOCAB, grammar=grammar)
    both = TokenFilter(VOCAB, allowed_token_ids=[13, 14], grammar=grammar)
    every = [token for token in range(VOCAB) if token != 5]
    assert allowed_by(free, grammar, bound, both) == [every, [13], [13], [13]]
    after = both.copy()
    after.accept(13)
    assert allowed_by(after, both) == [[14], [13]] and not grammar.accepted
    after.accept(14)
    allowed_by(after)
    assert "no token is allowed" in after.error and not both.error


def test_in_the_engine():
    """Beside free sequences and grammars; one that has nothing left ends with an error."""
    engine, _ = mock_engine(structured_outputs=True, slots=8)
    few = TokenFilter(VOCAB, allowed_token_ids=[7, 8, 9], bad_words=[[7, 8], [9, 9]])
    stuck = TokenFilter(VOCAB, allowed_token_ids=[7, 8], bad_words=[[7, 8], [8, 7], [7, 7], [8, 8]])
    params = SamplingParams(max_tokens=12)
    requests = [
        Request([3, 4], params),
        Request([3, 4], SamplingParams(max_tokens=30, n=2), grammar=few),
        Request([5, 6], params, grammar=Digits(7)),
        Request([3, 9], params, grammar=stuck),
    ]
    found = answers(engine, requests)
    assert found[2, 0] == expected(7)
    for sample in range(2):
        text = found[1, sample]
        assert len(text) == 30 and set(text) <= {7, 8, 9}
        assert not {(7, 8), (9, 9)} & set(zip(text, text[1:], strict=False))
    assert len(found[3, 0]) == 1
    check_empty(engine)


def test_end_tokens_alone_cannot_fill_a_minimum():
    """The mask of `min_tokens` would leave nothing, which looks like logits that are not finite."""
    engine, _ = mock_engine(structured_outputs=True)
    params = SamplingParams(max_tokens=4, min_tokens=1, stop_token_ids=(7, 8))
    for allowed, fits in ([7, 8], False), ([7], False), ([7, 9], True):
        request = Request([1], params, grammar=TokenFilter(VOCAB, allowed_token_ids=allowed))
        refused = pytest.raises(UsageError, match="`min_tokens`=1")
        with contextlib.nullcontext() if fits else refused:
            engine.add_request(request)
