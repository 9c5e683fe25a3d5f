"""Sequences that follow a grammar: in the engine over a model runner without a model, and on a real
one."""

import dataclasses

import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax.errors import UsageError
from swiftkv_jax.infer.engine.engine import Engine
from swiftkv_jax.infer.engine.requests import Request
from swiftkv_jax.infer.engine.sampling_params import SamplingParams
from swiftkv_jax.model.mesh import make_mesh
from tests.infer.engine.test_engine import model, options
from tests.infer.engine.test_scheduler import answers, check_empty
from tests.infer.mock_model_runner import END, VOCAB, continuation, mock_engine


@dataclasses.dataclass
class Digits:
    """A grammar of `count` tokens, each of which is 10 to 19 and follows the one before; then the
    end. With `fails_at` it cannot go on from there."""

    count: int
    fails_at: int = -1
    eos: int | None = END
    vocab_size: int = VOCAB
    accepted: list[int] = dataclasses.field(default_factory=list)

    @staticmethod
    def fill_masks(matchers, masks):
        assert not masks.any()
        for matcher, mask in zip(matchers, masks, strict=True):
            for token in matcher.allowed():
                mask[token // 32] |= np.uint32(1 << token % 32)

    def allowed(self):
        if len(self.accepted) < self.count:
            return [10 + (self.accepted[-1] - 9 if self.accepted else 3) % 10]
        return [self.eos]

    def accept(self, token, /):
        assert token in self.allowed()
        self.accepted.append(token)

    def copy(self):
        return dataclasses.replace(self, accepted=list(self.accepted))

    def forced(self):
        """The tokens that follow, each third of them wrong."""
        whole = [10 + (3 + at) % 10 - (at % 3 == 2) for at in range(self.count)]
        return whole[len(self.accepted) :]

    @property
    def is_ended(self):
        return self.eos is None and len(self.accepted) == self.count

    @property
    def error(self):
        return "it is too hard" if len(self.accepted) == self.fails_at else ""


def expected(count):
    return [10 + (3 + at) % 10 for at in range(count)]


@pytest.mark.parametrize("eos", [END, None])
def test_constrained_beside_free(eos):
    engine, runner = mock_engine(structured_outputs=True, slots=8)
    free = [Request([1 + n, 2], SamplingParams(max_tokens=20)) for n in range(3)]
    grammar = Digits(7, eos=eos)
    bound = [
        Request([3, 4, 5 + n], SamplingParams(max_tokens=20, n=1 + n), grammar=grammar)
        for n in range(2)
    ]
    found = answers(engine, [*free, *bound])
    for number, request in enumerate(free):
        assert found[number, 0] == continuation(request.prompt, 20)
    assert all(found[3 + n, sample] == expected(7) for n in range(2) for sample in range(1 + n))
    check_empty(engine)
    # One token a call, all of them in one call.
    assert runner.calls.count("constrained 3") >= 5 and engine.stats.new_tokens
    assert not grammar.accepted


def test_length_and_reuse_of_slots():
    """A slot is free after an end that the device does not see."""
    engine, _ = mock_engine(structured_outputs=True, slots=1)
    requests = [
        Request([9, n], SamplingParams(max_tokens=9), grammar=Digits(4, eos=None)) for n in range(3)
    ]
    cut = Request([9, 9], SamplingParams(max_tokens=3), grammar=Digits(4))
    last = Request([8, 8], SamplingParams(max_tokens=5))
    outputs = dict((number, output) for number, output in engine.run([*requests, cut, last]))
    assert [outputs[n].finish_reason for n in range(4)] == ["stop", "stop", "stop", "length"]
    assert outputs[0].stop_token is None
    check_empty(engine)


def test_grammar_that_fails():
    """It ends its own sequence alone."""
    engine, _ = mock_engine(structured_outputs=True)
    bad = Request([1, 2], SamplingParams(max_tokens=9, n=2), grammar=Digits(9, fails_at=2))
    good = Request([1, 3], SamplingParams(max_tokens=9), grammar=Digits(5))
    free = Request([1, 4], SamplingParams(max_tokens=9))
    last, tokens = {}, {}
    for number, output in engine.run([bad, good, free]):
        last[number, output.sample] = output
        tokens.setdefault((number, output.sample), []).extend(output.token_ids)
    for sample in range(2):
        assert last[0, sample].finish_reason == "error"
        assert last[0, sample].error == "it is too hard" and tokens[0, sample] == expected(2)
    assert tokens[1, 0] == expected(5) and last[1, 0].stop_token == END
    assert tokens[2, 0] == continuation(free.prompt, 9)
    check_empty(engine)


def test_abort_while_constrained():
    engine, _ = mock_engine(structured_outputs=True)
    request = Request([1, 2], SamplingParams(max_tokens=30, n=2), grammar=Digits(30))
    request_id = engine.add_request(request)
    for _ in range(3):
        engine.step()
    engine.abort_request(request_id, 1)
    engine.step()
    engine.abort_request(request_id)
    while engine.has_work:
        assert not [o for o in engine.step() if o.sample == 1]
    check_empty(engine)


def test_refused():
    engine, _ = mock_engine()
    with pytest.raises(UsageError, match="structured_outputs"):
        engine.add_request(Request([1], SamplingParams(max_tokens=2), grammar=Digits(1)))
    engine, _ = mock_engine(structured_outputs=True)
    for params in (
        SamplingParams(max_tokens=2, ignore_eos=True),
        SamplingParams(max_tokens=2, min_tokens=1),
    ):
        with pytest.raises(UsageError, match="ignore_eos" if params.ignore_eos else "min_tokens"):
            engine.add_request(Request([1], params, grammar=Digits(1)))


@dataclasses.dataclass
class Among:
    """Every token of `tokens`, at any place."""

    tokens: tuple[int, ...]

    fill_masks = staticmethod(Digits.fill_masks)

    def allowed(self):
        return self.tokens

    def accept(self, token, /):
        assert token in self.tokens

    def copy(self):
        return self

    def forced(self):
        return []

    is_ended = False
    error = ""


@pytest.mark.parametrize("mesh", [None, pytest.param((2, 2), marks=pytest.mark.long)])
def test_on_a_model(mesh):
    """Where all tokens are possible the draws are the free ones, penalties and log-probabilities
    too; where few are, the largest of their logits."""
    made, vocab = model(), model().config.vocab_size
    engine = Engine.from_model(
        made,
        options(chunks=(16,), decode_rows=(4 // (2 if mesh else 1),), structured_outputs=True),
        mesh=None if mesh is None else make_mesh(mesh),
    )
    params = SamplingParams(
        max_tokens=9, temperature=1.3, seed=7, top_p=0.9, repetition_penalty=1.2, logprobs=2
    )
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    free, same, few = (
        Request(prompt, params),
        Request(prompt, params, grammar=Among(tuple(range(vocab)))),
        Request(prompt, SamplingParams(max_tokens=6, logprobs=0), grammar=Among((5, 8, 40))),
    )
    outputs = {}
    for number, output in engine.run([free, same, few]):
        tokens, logprobs = outputs.setdefault(number, ([], []))
        tokens += output.token_ids
        logprobs += output.logprobs
    assert outputs[0] == outputs[1] and len(outputs[0][0]) == 9
    tokens, logprobs = outputs[2]
    logits = np.asarray(skv.logits(made, [[*prompt, *tokens]]), np.float32)[0, len(prompt) - 1 :]
    for at, token in enumerate(tokens):
        assert token == max((5, 8, 40), key=lambda one, at=at: logits[at, one])
        shifted = logits[at] - logits[at].max()
        expected = shifted[token] - np.log(np.exp(shifted).sum())
        np.testing.assert_allclose(logprobs[at].logprob, expected, atol=2e-4)
    check_empty(engine)
    assert engine.stats.compilations == 0
