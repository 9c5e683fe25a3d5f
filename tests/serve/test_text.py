"""Text of a choice and of its tokens, where characters take several tokens."""

import random

import pytest
from transformers import AutoTokenizer

from swiftkv_jax import demo
from swiftkv_jax.infer.engine.requests import Logprob, Request, RequestOutput, Timing
from swiftkv_jax.infer.engine.sampling_params import SamplingParams
from swiftkv_jax.serve.api.logprobs import CompletionLogprobs
from swiftkv_jax.serve.service.generation import Choice
from swiftkv_jax.serve.text.token_text import TokenSpellings

TEXT = "naïve – 漢字 🤖 stop here, or 🤖 there"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo.LLAMA)


def outputs(ids: list[int], rng: random.Random) -> list[RequestOutput]:
    """Tokens as decode calls of any size bring them; the last one says that it ends."""
    found, at = [], 0
    while at < len(ids):
        size = rng.randint(1, 8)
        part, at = ids[at : at + size], at + size
        logprobs = [Logprob(-float(token)) for token in part]
        reason = "length" if at >= len(ids) else None
        found.append(RequestOutput(0, 0, part, logprobs, reason, Timing(), 0))
    return found


@pytest.mark.parametrize("stop", [(), ("🤖",), (" here", "st"), ("字 ",)])
def test_parts_of_a_choice_are_its_whole(tokenizer, stop):
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    end = min((TEXT.index(one) for one in stop), default=len(TEXT))
    for seed in range(30):
        rng = random.Random(seed)
        request = Request([1], SamplingParams(max_tokens=100, stop=stop, logprobs=0))
        choice = Choice(0, tokenizer, request, False)
        deltas = []
        for output in outputs(ids, rng):
            if choice.finish_reason is None:
                choice.push(output)
                deltas.append(choice.take())
        assert "".join(delta.text for delta in deltas) == TEXT[:end]
        tokens = sum((delta.token_ids for delta in deltas), [])
        assert tokens == ids[: choice.num_tokens]
        logprobs = [one.logprob for delta in deltas for one in delta.logprobs]
        assert logprobs == [-float(token) for token in tokens]
        assert choice.finish_reason == ("stop" if stop else "length")
        assert not any("\ufffd" in delta.text for delta in deltas)


@pytest.mark.parametrize("as_ids", [False, True])
def test_offsets_of_tokens_index_the_text(tokenizer, as_ids):
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    lists = CompletionLogprobs(TokenSpellings(tokenizer, as_ids=as_ids), with_special=False)
    half = len(ids) // 2
    offsets = []
    for part in (ids[:half], ids[half:]):
        offsets += lists.of(part, [Logprob(0.0)] * len(part))["text_offset"]
    for at, offset in enumerate(offsets):
        before = tokenizer.decode(ids[:at])
        assert offset == len(before.rstrip("\ufffd"))


def test_special_tokens_have_an_offset_but_no_length_in_a_text_without_them(tokenizer):
    begin, ids = tokenizer.bos_token_id, tokenizer("a b", add_special_tokens=False)["input_ids"]
    for with_special, first in ((False, 0), (True, len(tokenizer.bos_token))):
        lists = CompletionLogprobs(TokenSpellings(tokenizer), with_special=with_special)
        found = lists.of([begin, *ids], [Logprob(0.0)] * (len(ids) + 1))["text_offset"]
        assert found[:2] == [0, first]
