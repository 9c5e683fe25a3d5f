"""How long the device has nothing to do although requests are running."""

import collections
import dataclasses

import pytest

from swiftkv_jax.infer.engine import stats
from swiftkv_jax.infer.engine.engine import Engine
from swiftkv_jax.infer.engine.requests import Request
from swiftkv_jax.infer.engine.sampling_params import SamplingParams
from tests.infer.mock_model_runner import END, MockModelRunner, mock_engine


@dataclasses.dataclass
class Clock:
    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now


class TimedRunner(MockModelRunner):
    """A device on which each call takes a second."""

    def __init__(self, shapes, clock):
        super().__init__(shapes)
        self.clock, self.ends, self.idle_from = clock, collections.deque(), 0.0
        self.idle = 0.0

    def run_chunk(self, chunk):
        self._start()
        return super().run_chunk(chunk)

    def run_decode(self, sequences, call):
        self._start()
        return super().run_decode(sequences, call)

    def _start(self):
        if self.idle_from:  # before the first call there was no work
            self.idle += max(self.clock.now - self.idle_from, 0.0)
        self.idle_from = max(self.idle_from, self.clock.now) + 1.0
        self.ends.append(self.idle_from)

    def is_idle(self):
        return self.clock.now >= self.idle_from

    def read(self, output):
        self.clock.now = max(self.clock.now, self.ends.popleft())
        return super().read(output)


@pytest.fixture
def timed(monkeypatch):
    """(engine, runner, clock): the engine reads this clock."""
    clock = Clock()
    monkeypatch.setattr(stats, "time", clock)
    template, _ = mock_engine(slots=2, chunk=8, page_size=4, steps=2)
    runner, options = TimedRunner(template.model_runner.shapes, clock), template.options
    engine = Engine(runner, config=template.config, eos_token_ids=(END,), options=options)
    return engine, runner, clock


def request(length: int, max_tokens: int) -> Request:
    return Request([1] * length, SamplingParams(max_tokens=max_tokens, ignore_eos=True))


@pytest.mark.parametrize(("host", "has_gaps"), [(0.005, False), (1.5, True)])
def test_a_device_that_the_host_keeps_waiting(timed, host, has_gaps):
    """The host's work between two calls shows as soon as it takes longer than a call."""
    engine, runner, clock = timed
    for length in (30, 20):
        engine.add_request(request(length, 12))
    steps = 0
    while engine.has_work:
        engine.step()
        clock.now += host
        steps += 1
    assert (runner.idle > 0) == has_gaps
    assert runner.idle <= engine.stats.idle_seconds <= runner.idle + has_gaps * steps
    assert engine.stats.wait_seconds > 0


def test_time_without_requests_is_not_counted(timed):
    engine, _, clock = timed
    for _ in range(2):
        clock.now += 100
        assert len(list(engine.run([request(9, 4)]))) > 1
    assert engine.stats.idle_seconds == 0
