"""Events of the prefix cache: who follows them knows what is cached."""

import dataclasses
import random
from pathlib import Path

import pytest

from swiftkv_jax.infer.engine.cache_events import PageRemoved, PagesStored
from swiftkv_jax.infer.engine.page_pool import page_keys
from swiftkv_jax.infer.engine.requests import ScoreRequest
from tests.infer.engine.test_scheduler import ask, prompt_of
from tests.infer.mock_model_runner import mock_engine


class Follower:
    """What is cached, by the events alone."""

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.cached: set[bytes] = set()
        self.prefixes: dict[bytes, list[int]] = {}
        """Key -> all tokens up to the end of its page, if they are known."""

    def apply(self, event) -> None:
        if isinstance(event, PageRemoved):
            self.cached.remove(event.key)
            return
        assert not self.cached & set(event.keys), "stored twice"
        self.cached |= set(event.keys)
        assert len(event.token_ids) == self.page_size * len(event.keys) > 0
        before = [] if event.parent is None else self.prefixes[event.parent]
        tokens = [*before, *event.token_ids.tolist()]
        digest = bytes([int(event.adapter)]) if event.adapter else b""
        keys = page_keys(tokens, self.page_size, event.cache_salt, prompt_digest=digest)
        assert keys[-len(event.keys) :] == event.keys
        assert event.parent == (keys[-len(event.keys) - 1] if before else None)
        for number, key in enumerate(keys, start=1):
            self.prefixes[key] = tokens[: number * self.page_size]


@pytest.mark.parametrize("seed", range(8))
def test_the_cache_can_be_followed(seed):
    """Through evictions, preemptions, aborts, samples of one prompt, scores, shards, host memory,
    and adapters of which one has the model's pages and one its own."""
    rng = random.Random(seed)
    engine, _ = mock_engine(
        dp_size=1 + seed % 2,
        host_pages={2: 3, 4: 20, 6: 200}.get(seed, 0),
        num_pages=rng.randint(22, 34),
        reserve_tokens=rng.choice([1, 5, 512]),
        window=rng.choice([None, 21]),
        enable_prefix_caching=seed != 5,
        num_adapters=2,
    )
    for name in ("3", "200"):
        engine.adapters.load(name, Path(name))
    events, follower = engine.record_cache_events(), Follower(4)
    prefixes = [prompt_of(number, rng.randint(4, 24)) for number in range(3)]
    live: list[int] = []
    for _ in range(150):
        prompt = [*rng.choice(prefixes), *prompt_of(rng.randrange(6), rng.randint(1, 12))]
        salt, adapter = rng.choice([("", ""), ("", "3"), ("a", ""), ("", "200"), ("a", "200")])
        if rng.random() < 0.3:
            score = ScoreRequest(prompt, rng.randint(1, 4), 0, salt, adapter=adapter)
            live.append(engine.add_request(score))
        elif rng.random() < 0.5:
            request = ask(prompt, rng.randint(1, 20), n=rng.randint(1, 2))
            request = dataclasses.replace(request, cache_salt=salt, adapter=adapter)
            live.append(engine.add_request(request))
        if rng.random() < 0.1 and live:
            engine.abort_request(rng.choice(live))
        engine.step()
        for event in events.take():
            follower.apply(event)
        cached = {key for pool in engine.pools for key in pool._page_of}
        cached.update(*(pool.host._slot_of for pool in engine.pools if pool.host))
        assert follower.cached == cached
    assert not events.take()
    assert bool(engine.prefix_stats.evictions and follower.cached) == (seed != 5)
    assert bool(engine.prefix_stats.host_hits) == (seed in (2, 4, 6))


def test_what_was_cached_before_is_left_out():
    engine, _ = mock_engine(num_pages=8)
    list(engine.run([ask(prompt_of(1, 17))]))
    events = engine.record_cache_events()
    list(engine.run([ask(prompt_of(1, 21)), ask(prompt_of(2, 25))]))
    found = events.take()
    stored = {key for event in found if isinstance(event, PagesStored) for key in event.keys}
    removed = {event.key for event in found if isinstance(event, PageRemoved)}
    assert removed <= stored and not stored & set(page_keys(prompt_of(1, 16), 4))
