"""Processes of a server that find each other, and engines in step with each other."""

import dataclasses
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from swiftkv_jax.errors import UsageError
from swiftkv_jax.infer.engine.requests import Request, ScoreRequest
from swiftkv_jax.infer.engine.sampling_params import SamplingParams
from swiftkv_jax.infer.structured.structured_outputs import StructuredOutputs
from swiftkv_jax.infer.structured.token_filter import TokenFilter
from swiftkv_jax.serve.distributed import followers as followers_module
from swiftkv_jax.serve.distributed import frames
from swiftkv_jax.serve.distributed.follower import Follower, connect, ignore_signals
from swiftkv_jax.serve.distributed.followers import Followers, accept_followers, listen
from swiftkv_jax.serve.service.engine_thread import Ended, EngineThread
from tests.infer.mock_model_runner import VOCAB, mock_engine
from tests.serve.conftest import later, until

SECRET = bytes(range(32))
FACTS = {"mesh": "1x2", "jax": "1"}

# Signals ----------------------------------------------------------------------------------------


def test_a_follower_outlives_the_signals_of_a_job(monkeypatch):
    ignored = {}
    monkeypatch.setattr(signal, "signal", ignored.__setitem__)
    ignore_signals()
    assert ignored == dict.fromkeys((signal.SIGHUP, signal.SIGINT, signal.SIGTERM), signal.SIG_IGN)


# Connections ------------------------------------------------------------------------------------


def test_only_the_secret_lets_in():
    with listen("127.0.0.1") as listener:
        port = listener.getsockname()[1]
        found = later(accept_followers, listener, SECRET, 3, FACTS)
        for process, secret in (
            (1, b"wrong"),
            (1, SECRET[:-1]),
            (1, b""),
            (0, SECRET),
            (3, SECRET),
        ):
            with pytest.raises(ConnectionError, match="cannot connect.*(has ended|reset)"):
                connect("127.0.0.1", port, secret, process, FACTS)
        with socket.create_connection(("127.0.0.1", port)) as hostile:
            hostile.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert hostile.recv(1) == b""
        ends = [connect("127.0.0.1", port, SECRET, process, FACTS) for process in (2, 1)]
        channels = found.result(10)
    assert sorted(channels) == [1, 2]
    for channel in (*ends, *channels.values()):
        channel.close()


def test_processes_with_other_options_are_refused():
    with listen("127.0.0.1") as listener:
        port = listener.getsockname()[1]
        found = later(accept_followers, listener, SECRET, 3, FACTS)
        good = connect("127.0.0.1", port, SECRET, 2, FACTS)
        message = "`mesh`=2x1 in process 1, 1x2 in process 0: all processes run the same command"
        with pytest.raises(UsageError, match=message):
            connect("127.0.0.1", port, SECRET, 1, FACTS | {"mesh": "2x1"})
        last = good.receive(frames.FROM_PROCESS_0)
        assert last == frames.Last(message)
        good.close()
        with pytest.raises(UsageError) as refused:
            found.result(10)
    assert str(refused.value) == message


def test_a_process_that_does_not_connect_is_named():
    with listen("localhost") as listener, pytest.raises(UsageError, match="process 1 has not"):
        accept_followers(listener, SECRET, 2, FACTS, seconds=0.1)


# Engines in step ----------------------------------------------------------------------------------


@dataclasses.dataclass
class Lockstep:
    """Two engines in this process, the second of which follows the first."""

    engine: object
    thread: EngineThread
    followers: Followers
    follower: Follower
    result: Future[None]
    """Of `Follower.run`."""
    events: list
    failures: list
    ends: list
    """Errors that would have ended the follower."""
    pages: tuple[list[int], list[int]]
    """Pages in use after each step of both."""


@pytest.fixture
def lockstep(compiler, monkeypatch) -> Iterator[Callable[..., Lockstep]]:
    monkeypatch.setattr(followers_module, "END_SECONDS", 0.2)
    made: list[Lockstep] = []

    def begin(stall_timeout: float = 30.0, **options) -> Lockstep:
        with listen("127.0.0.1") as listener:
            port = listener.getsockname()[1]
            found = later(accept_followers, listener, SECRET, 2, FACTS)
            channel = connect("127.0.0.1", port, SECRET, 1, FACTS)
        followers = Followers(found.result(10), stall_timeout)
        events, failures, ends = [], [], []
        engines = [mock_engine(structured_outputs=True, **options)[0] for _ in range(2)]
        pages: tuple[list[int], list[int]] = ([], [])
        for engine, counts in zip(engines, pages, strict=True):
            _count_pages(engine, counts)
        follower = Follower(channel, silence=2 * stall_timeout, end=ends.append)
        spell = lambda token: bytes([token])  # noqa: E731
        result = later(follower.run, engines[1], compiler.compile_grammar, spell)
        followers.wait_ready()
        followers.watch(failures.append)
        thread = EngineThread(engines[0], events.extend, failures.append, followers)
        thread.start()
        made.append(
            Lockstep(engines[0], thread, followers, follower, result, events, failures, ends, pages)
        )
        return made[-1]

    yield begin
    for one in made:
        assert one.thread.stop(10)
        one.followers.close()
        one.follower.close()


def _count_pages(engine, counts: list[int]) -> None:
    step = engine.step

    def counted():
        outputs = step()
        counts.append(engine.pages_in_use)
        return outputs

    engine.step = counted


def random_request(rng: random.Random, grammars: list) -> Request | ScoreRequest:
    tokens = [rng.randrange(3) for _ in range(rng.randint(2, 40))]
    salt = rng.choice(["", "a"])
    if rng.random() < 0.1:
        return ScoreRequest(tokens, start=rng.randint(1, len(tokens) - 1), cache_salt=salt)
    params = SamplingParams(max_tokens=rng.randint(1, 30), n=rng.choice([1, 1, 1, 2, 3]))
    grammar = rng.choice(grammars) if rng.random() < 0.2 else None
    return Request(tokens, params, cache_salt=salt, grammar=grammar)


@pytest.mark.parametrize("dp_size", [1, 2])
@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.long)])
def test_pages_are_equal_after_every_step(lockstep, compiler, dp_size, count):
    rng = random.Random(dp_size)
    one = lockstep(dp_size=dp_size, num_pages=48 // dp_size, slots=4, reserve_tokens=4)
    grammar = compiler.compile(StructuredOutputs(regex="[a-f]{2,9}"))
    banned = TokenFilter(VOCAB, bad_words=[[1, 2]], grammar=grammar)
    grammars = [grammar, banned, TokenFilter(VOCAB, allowed_token_ids=[5, 6, 7])]

    def num_ended() -> int:
        return sum(isinstance(event, Ended) for _, event in list(one.events))

    requests = [random_request(rng, grammars) for _ in range(count)]
    for number, request in enumerate(requests):
        until(lambda number=number: number - num_ended() < 40 or bool(one.failures))
        assert not one.failures
        one.thread.submit(number, request)
        if rng.random() < 0.5:
            aborted = rng.randint(max(number - 20, 0), number)
            num_samples = getattr(getattr(requests[aborted], "params", None), "n", 0)
            one.thread.abort(aborted, rng.choice([None, *range(num_samples)]))
    until(lambda: num_ended() == count)
    assert one.thread.stop(10)
    one.followers.close()
    one.result.result(10)
    assert not one.failures and not one.ends
    ours, theirs = one.pages
    assert ours == theirs and len(ours) > 0.8 * count and max(ours) > 30 and ours[-1] == 0


def test_steps_before_the_last_frame_end_well_after_process_0_has_closed(lockstep):
    """Process 0 waits for a slow follower no longer than `END_SECONDS`."""
    one = lockstep()
    step = one.follower._engine.step

    def slow():
        time.sleep(0.1)
        return step()

    one.follower._engine.step = slow
    one.thread.submit(0, Request([1, 2, 3], SamplingParams(max_tokens=30, ignore_eos=True)))
    until(lambda: any(isinstance(event, Ended) for _, event in list(one.events)))
    assert one.thread.stop(10)
    one.followers.close()
    assert not one.result.done()
    one.result.result(10)
    assert not one.failures and not one.ends


def test_an_engine_that_differs_ends_all(lockstep):
    one = lockstep()
    one.followers.send(3, 0, [], [])
    error = one.result.exception(10)
    assert isinstance(error, RuntimeError)
    assert "0 pages after 0 steps, 0 after 3 in process 0" in str(error)
    one.follower.fail(error)
    until(lambda: bool(one.failures))
    assert "process 1 has failed: RuntimeError: the engines differ" in str(one.failures[0])


def test_the_end_of_a_follower_is_noticed(lockstep):
    one = lockstep()
    one.follower.close()
    until(lambda: bool(one.failures))
    assert "process 1 has ended" in str(one.failures[0])
    assert one.followers.cause(RuntimeError()) is one.failures[0]


def test_the_end_of_process_0_is_noticed(lockstep):
    one = lockstep()
    for channel in one.followers._channels.values():
        channel.close()
    until(lambda: bool(one.ends))
    assert "process 0 has ended" in one.ends[0]


def test_the_error_of_process_0_ends_its_followers(lockstep):
    one = lockstep()
    one.followers.close("out of memory")
    until(lambda: bool(one.ends))
    assert one.ends == ["process 0 has failed: out of memory"]


def test_frames_come_while_there_is_nothing_to_do(lockstep, monkeypatch):
    monkeypatch.setattr(followers_module, "IDLE_SECONDS", 0.05)
    one = lockstep()
    done = []
    receive = one.followers._channels[1].receive
    one.followers._channels[1].receive = lambda decoder: done.append(receive(decoder)) or done[-1]
    until(lambda: len(done) > 3)
    assert one.followers.silence()[0] < 1 and not one.pages[0]


def test_a_follower_that_is_silent_is_noticed(lockstep, monkeypatch):
    monkeypatch.setattr(followers_module, "IDLE_SECONDS", 0.05)
    one = lockstep()
    stopped = threading.Event()
    one.follower._channel.send = lambda message: stopped.wait(30)
    until(lambda: one.followers.silence()[0] > 0.5)
    stopped.set()


def test_process_0_that_is_silent_is_noticed(lockstep):
    one = lockstep(stall_timeout=0.2)
    one.thread.submit(0, Request([1, 2, 3]))
    until(lambda: bool(one.events))
    assert one.thread.stop(10)
    until(lambda: bool(one.ends))
    assert "process 0 has sent nothing for 0 s" in one.ends[0]


def test_a_silent_follower_fails_all_requests(start):
    running = start()
    service = running.app.service

    class Silent:
        def silence(self) -> tuple[float, int]:
            return 61.0, 1

    service._followers = Silent()
    running.until(lambda: service.state == "failed")
    running.thread.join(10)
    assert running.code == [1]
    assert str(service.failure) == "process 1 has taken no step for 61 s"
