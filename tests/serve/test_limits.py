"""Whom the server lets in, and what it bears: keys, hosts, sizes, slow connections."""

import json
import random
import time
import types

import pytest

from swiftkv_jax.errors import UsageError
from swiftkv_jax.serve.http.auth import KEY_VARIABLE, read_keys
from swiftkv_jax.serve.service.admission import QUANTUM, FairQueue
from swiftkv_jax.serve.service.generation import Generation, WaitingPart
from tests.serve.conftest import Running, read_all

BODY = {"prompt": "hello", "max_tokens": 2}
ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/score"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/metrics"),
    ("GET", "/load"),
    ("GET", "/openapi.json"),
]
PUBLIC = [("GET", "/health"), ("GET", "/ready"), ("POST", "/ping"), ("GET", "/version")]
KEY = "a-key-of-some-length"
SDK_HEADERS = "authorization,content-type,x-stainless-lang,x-stainless-retry-count,traceparent"
"""Headers that a client in a browser sends."""


@pytest.fixture(scope="module")
def guarded(start) -> Running:
    return start(api_keys={"one": KEY, "two": "another-key"})


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_needs_a_key(guarded, method, path):
    body = {} if method == "POST" else None
    for headers, code in (
        ({}, "missing_api_key"),
        ({"authorization": f"Basic {KEY}"}, "missing_api_key"),
        ({"authorization": f"Bearer {KEY[:-1]}"}, "invalid_api_key"),
        ({"authorization": f"Bearer {KEY}x"}, "invalid_api_key"),
        ({"x-api-key": "nothing"}, "invalid_api_key"),
        ({"authorization": "Bearer nothing", "x-api-key": KEY}, "invalid_api_key"),
    ):
        status, found, content = guarded.request(method, path, body, headers)
        assert (status, found["www-authenticate"]) == (401, "Bearer")
        assert json.loads(content)["error"]["code"] == code
        assert KEY[:-1] not in content.decode()
    for headers in (
        {"authorization": f"Bearer {KEY}"},
        {"x-api-key": "another-key"},
        {"authorization": "Basic of-a-proxy", "x-api-key": KEY},
    ):
        assert guarded.request(method, path, body, headers)[0] != 401


def test_probes_need_none(guarded):
    for method, path in PUBLIC:
        status, headers, _ = guarded.request(method, path)
        assert status == 200 and headers["x-content-type-options"] == "nosniff"


def test_keys_do_not_share_prefixes(guarded):
    body = {"prompt": "secret " * 10, "max_tokens": 1}
    cached = []
    for key in (KEY, KEY, "another-key"):
        _, answer = guarded.post("/v1/completions", body, x_api_key=key)
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0 < cached[1] and cached[2] == 0
    _, answer = guarded.post("/v1/completions", body | {"cache_salt": "s"}, x_api_key=KEY)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_options_that_share_among_keys(start):
    keys = {"one": KEY, "two": "another-key"}
    shared = {"metrics_public": True, "share_prefix_cache": True, "default_max_tokens": 3}
    running = start(api_keys=keys, **shared)
    assert [running.request("GET", path)[0] for path in ("/metrics", "/load")] == [200, 401]
    body = {"messages": [{"role": "user", "content": "secret " * 10}]}
    running.post("/v1/chat/completions", body, x_api_key=KEY)
    _, answer = running.post("/v1/chat/completions", body, x_api_key="another-key")
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_where_keys_come_from(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("# a comment\n\nalice: key-of-alice\nbob:key:of:bob\n")
    file.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        read_keys([], file)
    file.chmod(0o600)
    monkeypatch.setenv(KEY_VARIABLE, "from-the-environment")
    assert read_keys(["given-key"], file) == {
        "key1": "given-key",
        "environment": "from-the-environment",
        "alice": "key-of-alice",
        "bob": "key:of:bob",
    }
    monkeypatch.delenv(KEY_VARIABLE)
    for bad in ("short", "with space inside", "ümlaut-key"):
        with pytest.raises(UsageError, match="8 to 512"):
            read_keys([bad], None)
    for bad, message in (
        ("key-without-name", "line 1 must be NAME:KEY"),
        ("a:", "line 1 must be NAME:KEY"),
        (":key-of-none", "line 1: '' is not a valid name"),
        ("a:short", "line 1: a key must be 8 to 512"),
        ("a:key-of-a\na:key-of-b", "line 2: 'a' is there twice"),
    ):
        file.write_text(bad)
        with pytest.raises(UsageError, match=message) as error:
            read_keys([], file)
        assert "key-of" not in str(error.value) and "key-without" not in str(error.value)
    file.write_text("\n")
    with pytest.raises(UsageError, match="no key"):
        read_keys([], file)


def test_a_page_of_another_host_is_refused(start):
    running = start(allowed_hosts=("127.0.0.1", "localhost", "[::1]", "Proxy.example"))
    for host, status in (
        ("127.0.0.1:80", 200),
        ("localhost", 200),
        ("LocalHost.:80", 200),
        ("[::1]:8000", 200),
        ("proxy.example", 200),
        ("evil.example", 403),
        ("", 403),
    ):
        assert running.request("GET", "/v1/models", headers={"host": host})[0] == status
    with running.send(b"GET /health HTTP/1.0\r\n\r\n") as connection:
        assert b" 200 " in read_all(connection)


@pytest.mark.parametrize("error", [OSError("no more processes"), KeyError("x")])
def test_an_internal_error_has_our_shape_and_its_traceback_is_logged(
    running, error, monkeypatch, caplog
):
    async def fail(*args, **fields):
        raise error

    monkeypatch.setattr(running.app.encoder, "encode", fail)
    status, answer = running.post("/v1/completions", BODY, x_request_id="mine")
    assert status == 500 and answer["error"]["code"] == "internal"
    (record,) = (one for one in caplog.records if "mine failed" in one.getMessage())
    assert record.exc_info[1] is error


def test_pages_of_other_origins_need_leave(start, running):
    headers = {"origin": "https://app.example"}
    assert "access-control-allow-origin" not in running.request("GET", "/health", None, headers)[1]
    allowed = start(allowed_origins=("https://app.example",))
    _, found, _ = allowed.request("GET", "/health", None, headers)
    assert found["access-control-allow-origin"] == "https://app.example"
    assert "access-control-allow-credentials" not in found
    asked = {"access-control-request-method": "POST", "access-control-request-headers": SDK_HEADERS}
    asked["access-control-request-private-network"] = "true"
    status, found, _ = allowed.request("OPTIONS", "/v1/completions", None, headers | asked)
    assert status == 200 and found["access-control-allow-headers"] == SDK_HEADERS
    _, found, _ = allowed.request("GET", "/health", None, {"origin": "https://other.example"})
    assert "access-control-allow-origin" not in found


def test_samples_have_as_many_tokens_as_fit_together(start):
    running = start(engine={"num_pages": 72})
    body = {"messages": [{"role": "user", "content": "a"}], "n": 4, "ignore_eos": True}
    status, answer = running.post("/v1/chat/completions", body)
    assert status == 200, answer
    tokens, rest = divmod(answer["usage"]["completion_tokens"], 4)
    assert tokens > 1 and not rest
    for more, status in ((0, 200), (1, 400)):
        given = body | {"max_tokens": tokens + more}
        assert running.post("/v1/chat/completions", given)[0] == status


# Sizes and slow connections ------------------------------------------------------------


def test_a_body_has_a_limit(start):
    running = start(max_body_size=1000)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with running.send(head + b"Content-Length: 100000000\r\n\r\n") as connection:
        content = read_all(connection)
        assert b" 413 " in content and b"body_too_large" in content and b"1000 bytes" in content
    with running.send(head + b"Transfer-Encoding: chunked\r\n\r\n") as connection:
        chunk = b"3e8\r\n" + b" " * 1000 + b"\r\n"
        connection.sendall(chunk + chunk)
        assert b" 413 " in read_all(connection)
    running.check_empty()


def test_headers_have_a_limit(running):
    head = b"GET /health HTTP/1.1\r\nHost: x\r\n"
    with running.send(head) as connection:
        content = b""
        try:
            for _ in range(64):
                connection.sendall(b"x-a: " + b"a" * 8000 + b"\r\n")
            content = read_all(connection)
        except OSError:
            pass  # it is closed while there is more to send
        assert content == b"" or b" 400 " in content
    long = {"x-a": "a" * 66_000}
    status, _, answer = running.request("GET", "/health", headers=long)
    assert status == 431 and b"headers_too_large" in answer
    for garbage in (b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"):
        with running.send(garbage + b"\r\n\r\n") as connection:
            content = read_all(connection)
            assert b"400" in content and b'"invalid_request"' in content
    assert running.request("GET", "/health")[0] == 200


def test_slow_connections_are_closed(start):
    running = start(header_timeout=0.3, body_timeout=0.5, keep_alive_timeout=1)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    for sent, seconds in (
        (b"", 1.0),
        (b"GET /hea", 0.3),
        (head, 0.3),
        (head + b"Content-Length: 20\r\n\r\n", 0.5),
        (head + b'Content-Length: 20\r\n\r\n{"prompt"', 0.5),
    ):
        with running.send(sent) as connection:
            begun = time.monotonic()
            content = read_all(connection)
            assert content == b"" and seconds - 0.05 < time.monotonic() - begun < seconds + 3
    # A byte now and then is no progress.
    with running.send(b"GET /health HTTP/1.1\r\n") as connection:
        begun = time.monotonic()
        with pytest.raises(OSError):
            for character in b"x-slow: " + b"a" * 100:
                connection.sendall(bytes([character]))
                time.sleep(0.05)
        assert time.monotonic() - begun < 4
    running.check_empty()


def test_a_long_silence_of_an_answer_is_no_slow_connection(start):
    running = start(header_timeout=0.2, body_timeout=0.2, keep_alive_timeout=1, step_seconds=0.3)
    status, answer = running.post("/v1/completions", BODY | {"max_tokens": 9, "ignore_eos": True})
    assert status == 200 and answer["usage"]["completion_tokens"] == 9


def test_connections_have_a_limit(start):
    running = start(max_connections=3)
    held = [running.send(b"GET /health HTTP/1.1\r\n") for _ in range(3)]
    time.sleep(0.1)
    with running.send(b"") as connection:
        content = read_all(connection)
    assert b" 503 " in content and b"too_many_connections" in content
    assert b"\r\nretry-after: 1\r\n" in content
    for one in held:
        one.close()


def test_requests_one_after_the_other_on_a_connection(running):
    head = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with running.send(head * 5) as connection:
        content = b""
        while content.count(b'"ok"') < 5:
            content += connection.recv(65536)


# The queue ------------------------------------------------------------------------------


class Waits:
    def __init__(self, name: str, num_prompt_tokens: int, rank: float = 0.0):
        self.name, self.cost, self.rank = name, max(num_prompt_tokens, QUANTUM), rank


def test_keys_take_turns():
    """Long requests of one do not hold up the short ones of another."""
    queue: FairQueue[Waits] = FairQueue()
    for number in range(20):
        queue.push("a", Waits(f"a{number}", 8 * QUANTUM))
    queue.push("b", Waits("b0", 100))
    queue.push("b", Waits("b1", 100))
    names = [found.name for _ in range(22) if (found := queue.pop())]
    assert len(names) == 22 and {"b0", "b1"} <= set(names[:3])
    assert [name for name in names if name[0] == "a"] == [f"a{number}" for number in range(20)]
    assert queue.pop() is None and not queue._queues and not queue._credit


def test_of_one_key_the_lowest_rank_comes_first():
    queue: FairQueue[Waits] = FairQueue()
    waiting = [Waits(name, 5, rank) for name, rank in zip("abcde", (3, 1, 2, 1, 3), strict=True)]
    for one in waiting:
        queue.push("key", one)
    queue.push("other", other := Waits("x", 5))
    queue.remove("key", waiting[3])
    queue.remove("other", other)
    assert len(queue) == 4
    assert "".join(found.name for _ in range(4) if (found := queue.pop())) == "bcae"
    assert queue.pop() is None and len(queue) == 0 and not queue._queues


def test_priorities_age():
    """One of priority 1 that came 11 s before is served first, one that came 9 s before is not."""
    generations = [Generation([], [], None, arrival) for arrival in (0.0, 2.0, 11.0)]  # type: ignore[arg-type]
    for generation, priority in zip(generations, (1, 1, 0), strict=True):
        generation.priority = priority
    waiting = [WaitingPart(generation, None) for generation in generations]  # type: ignore[arg-type]
    assert sorted(range(3), key=lambda number: waiting[number].rank) == [0, 2, 1]


def test_equal_keys_get_equal_shares():
    queue: FairQueue[Waits] = FairQueue()
    rng = random.Random(0)
    for _ in range(300):
        for key in "abc":
            queue.push(key, Waits(key, rng.choice([10, 500, 3000])))
    costs = dict.fromkeys("abc", 0)
    for _ in range(400):
        found = queue.pop()
        assert found is not None
        costs[found.name] += found.cost
    assert max(costs.values()) - min(costs.values()) < 3 * QUANTUM + 3000


@pytest.mark.parametrize(
    ("tokens", "samples", "cost"),
    [(5, 1, QUANTUM), (5, 3, 3 * QUANTUM), (9 * QUANTUM, 3, 9 * QUANTUM), (5, 0, QUANTUM)],
)
def test_each_sample_takes_a_turn(tokens, samples, cost):
    prompt = types.SimpleNamespace(token_ids=range(tokens))
    part = types.SimpleNamespace(prompt=prompt, choices=[None] * samples)
    assert WaitingPart(None, part).cost == cost  # type: ignore[arg-type]


def test_long_paths_and_many_headers(running):
    status, _, content = running.request("GET", "/health?" + "a" * 8200)
    assert status == 414 and json.loads(content)["error"]["code"] == "path_too_long"
    many = {f"x-{number}": "a" for number in range(101)}
    status, _, content = running.request("GET", "/health", headers=many)
    assert status == 431 and json.loads(content)["error"]["code"] == "headers_too_large"


def test_a_trace_is_in_the_log(running, caplog):
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    for given in (trace, "00-zz-00-01"):
        with caplog.at_level("INFO"):
            running.request("GET", "/version", headers={"traceparent": given})
    assert f"traceparent={trace}" in caplog.text and "zz" not in caplog.text
