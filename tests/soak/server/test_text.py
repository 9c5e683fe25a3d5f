"""Text of 10,000 random streams of tokens, and what the hostile ones among them cost."""

import random
import time

import pytest
from transformers import AutoTokenizer

from swiftkv_jax import demo
from swiftkv_jax.infer.engine.requests import Request, RequestOutput, Timing
from swiftkv_jax.infer.engine.sampling_params import SamplingParams
from swiftkv_jax.serve.errors import APIError
from swiftkv_jax.serve.http.auth import Keys
from swiftkv_jax.serve.service.generation import Choice
from tests.soak.server.bounds import HOSTILE_SECONDS_PER_TOKEN, MAX_CORRELATION

STREAMS, LONG, COMPARISONS = 10_000, 4_096, 100_000


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo.LLAMA)


def text_of(tokenizer, ids: list[int], sizes) -> str:
    """What a client gets whose tokens come in parts of these sizes."""
    request = Request([1], SamplingParams(max_tokens=len(ids)))
    choice, at, text = Choice(0, tokenizer, request, False), 0, ""
    while at < len(ids):
        part = ids[at : at + next(sizes)]
        at += len(part)
        reason = "length" if at >= len(ids) else None
        choice.push(RequestOutput(0, 0, part, None, reason, Timing(), 0))
        text += choice.take().text
    return text


def test_streams_are_their_whole(tokenizer):
    """Whatever the sizes of their parts; where the bytes are Unicode, it is what they spell."""
    rng = random.Random(0)
    vocabulary = tokenizer.get_vocab()
    bytes_ = [index for token, index in vocabulary.items() if len(token) == 1]
    words = sorted(vocabulary.values())
    pieces = ["naïve", " 漢字", " 🤖", "e\u0301", "👩‍👩‍👧", "\u202e", "\n\n", "한국"]
    broken = 0
    for _ in range(STREAMS):
        ids: list[int] = []
        for _ in range(rng.randint(1, 12)):
            match rng.randrange(4):
                case 0:
                    ids += rng.choices(bytes_, k=rng.randint(1, 6))
                case 1:
                    ids += rng.choices(words, k=3)
                case _:
                    ids += tokenizer(rng.choice(pieces), add_special_tokens=False)["input_ids"]
        ids = [one for one in ids if one not in tokenizer.all_special_ids] or [bytes_[0]]
        one_by_one = text_of(tokenizer, ids, iter([1] * len(ids)))
        in_parts = text_of(tokenizer, ids, iter(lambda: rng.randint(1, 8), None))
        assert in_parts == one_by_one, ids
        whole = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        broken += "\ufffd" in whole
        assert one_by_one == whole, ids
    assert STREAMS / 10 < broken < STREAMS


def test_hostile_tokens_cost_what_others_do(tokenizer, soak):
    """A `logit_bias` may force one token for ever."""
    vocabulary = tokenizer.get_vocab()
    lone = max(index for token, index in vocabulary.items() if len(token) == 1)
    continuation = tokenizer("é", add_special_tokens=False)["input_ids"][-1:]
    usual = (tokenizer("the quick brown fox ", add_special_tokens=False)["input_ids"] * LONG)[:LONG]
    seconds = {}
    for name, ids in (
        ("usual text", usual),
        ("a lone byte", [lone] * LONG),
        ("a byte that continues", continuation * LONG),
        ("all bytes in turn", [one for one in vocabulary.values()][:256] * (LONG // 256)),
    ):
        begun = time.perf_counter()
        text_of(tokenizer, ids, iter([8] * LONG))
        seconds[name] = (time.perf_counter() - begun) / LONG
    # Of quadratic work it would be some hundred times as much.
    usual_seconds = seconds["usual text"]
    soak.record("text", hostile_us=1e6 * max(seconds.values()), usual_us=1e6 * usual_seconds)
    assert max(seconds.values()) <= soak.limit(HOSTILE_SECONDS_PER_TOKEN)
    assert max(seconds.values()) < 20 * seconds["usual text"]


def test_the_time_of_a_refusal_tells_nothing_of_a_key(soak):
    """A wrong key that begins as the right one does is refused as fast as any."""
    key, rng = "k" * 64, random.Random(0)
    keys = Keys({"a": key})
    lengths, times = [], []
    for _ in range(COMPARISONS):
        length = rng.randrange(64)
        wrong = key[:length] + "x" * (64 - length)
        headers = {b"authorization": b"Bearer " + wrong.encode()}
        begun = time.perf_counter_ns()
        try:
            keys.client_of(headers)
        except APIError:
            taken = time.perf_counter_ns() - begun
        else:
            raise AssertionError("a wrong key was let in")
        lengths.append(length)
        times.append(taken)
    r = correlation(lengths, times)
    soak.record("keys", r=r)
    assert abs(r) < MAX_CORRELATION
    # The same measure finds a comparison that stops at the first difference.
    r = correlation(lengths, [first_difference(key, length) for length in lengths])
    assert r > 0.05


def first_difference(key: str, length: int) -> int:
    """ns that a comparison takes which stops there."""
    wrong = key[:length] + "x" * (len(key) - length)
    begun = time.perf_counter_ns()
    for one, other in zip(key, wrong, strict=True):
        if one != other:
            break
    return time.perf_counter_ns() - begun


def correlation(lengths: list[int], times: list[int]) -> float:
    """Pearson's, without the slowest hundredth: interruptions."""
    limit = sorted(times)[int(0.99 * len(times))]
    pairs = [
        (length, taken) for length, taken in zip(lengths, times, strict=True) if taken <= limit
    ]
    xs, ys = zip(*pairs, strict=True)
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    covariance = sum((a - x) * (b - y) for a, b in pairs)
    spread = sum((a - x) ** 2 for a in xs) * sum((b - y) ** 2 for b in ys)
    return covariance / spread**0.5 if spread else 0.0
