"""Requests whose framing is in doubt, empty lines, and targets in absolute form, on raw sockets."""

import json

import h11
import pytest

from swiftkv_jax.serve.http.parser import MAX_EMPTY_LINES, Parser
from tests.serve.conftest import read_all

BODY = b'{"prompt": "a", "max_tokens": 1}'
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
OK = b'{"status":"ok","server":{"status":"ready"}}'
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def post(headers: bytes, body: bytes = BODY, line: bytes = b"/v1/completions HTTP/1.1") -> bytes:
    head = b"POST " + line + b"\r\nHost: x\r\nContent-Type: application/json\r\n"
    return head + headers + b"\r\n" + body


def answers(running, content: bytes, *more: bytes) -> list[tuple[int, bytes]]:
    """(status, content) of each answer on one connection, which the client ends for writing only
    once the server has said that it ends it, or has answered `GET /health`. `more` is sent after
    the first answer has begun."""
    found = b""
    with running.send(content) as connection:
        for part in more:
            found += connection.recv(65536)
            connection.sendall(part)
        if not found.endswith(OK):
            found += read_all(connection, OK)
    heads = found.split(b"HTTP/1.1 ")[1:]
    return [(int(head[:3]), head.partition(b"\r\n\r\n")[2]) for head in heads]


def statuses(running, content: bytes, *more: bytes) -> list[int]:
    return [status for status, _ in answers(running, content, *more)]


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        (LENGTH, BODY),
        (LENGTH * 2, BODY),
        (b"Content-Length: %d, %d\r\n" % (len(BODY), len(BODY)), BODY),
        (CHUNKED, CHUNKS),
        (b"transfer-encoding: Chunked\r\n", CHUNKS),
        (CHUNKED, b"1;a=b\r\n{\r\n%x\r\n%s\r\n0\r\nX: y\r\n\r\n" % (len(BODY) - 1, BODY[1:])),
        (LENGTH + b"X-Long: a\r\n b\r\n", BODY),
    ],
)
def test_a_clear_framing_keeps_the_connection(running, headers, body):
    assert statuses(running, post(headers, body) + HEALTH) == [200, 200]


@pytest.mark.parametrize(
    "content",
    [
        post(CHUNKED + LENGTH, CHUNKS),
        post(LENGTH + CHUNKED, CHUNKS),
        post(CHUNKED + b"Content-Length: 3\r\n", CHUNKS),
        post(CHUNKED, CHUNKS, b"/v1/completions HTTP/1.0"),
        post(CHUNKED + b"Connection: keep-alive\r\n", CHUNKS, b"/v1/completions HTTP/1.0"),
    ],
)
def test_a_framing_in_doubt_ends_the_connection(running, content):
    """The body is the chunks'; what follows is no request, come at once or later."""
    with running.send(content + HEALTH) as connection:
        found = read_all(connection)
    assert found.startswith(b"HTTP/1.1 200") and found.count(b"HTTP/1.1 ") == 1
    assert b"\r\nconnection: close\r\n" in found.lower()
    assert json.loads(found.partition(b"\r\n\r\n")[2])["usage"]["prompt_tokens"] == 1
    running.check_empty()


@pytest.mark.parametrize(
    "headers",
    [
        *(
            b"Content-Length: %s\r\n" % one
            for one in (b"+32", b"-1", b"0x20", b"3 2", b"a", b"32,33")
        ),
        LENGTH + b"Content-Length: 33\r\n",
        *(
            b"Transfer-Encoding: %s\r\n" % one
            for one in (b"identity", b"gzip, chunked", b"xchunked")
        ),
        CHUNKED * 2,
        LENGTH + b"Transfer-Encoding: gzip\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"Transfer-Encoding\r\n: chunked\r\n",
        LENGTH + b"X: a\rb\r\n",
        LENGTH + b"X: a\0b\r\n",
        LENGTH + b"Host: y\r\n",
    ],
)
def test_a_framing_that_is_none_is_refused(running, headers):
    """Once, and nothing after it is read."""
    content = post(headers, CHUNKS if b"chunked" in headers else BODY) + HEALTH
    assert statuses(running, content) == [400]


@pytest.mark.parametrize(
    "chunks",
    [
        b"0x20\r\n",
        b"-1\r\n",
        b" 20\r\n",
        b"g\r\n",
        b"1\r\n{xx" + CHUNKS,  # more than it says
    ],
)
def test_chunks_that_are_none_end_the_connection(running, chunks):
    assert statuses(running, post(CHUNKED, chunks) + HEALTH) in ([], [400])
    running.check_empty()


def test_a_request_needs_a_host_or_http_1_0(running):
    assert statuses(running, b"GET /health HTTP/1.1\r\n\r\n") == [400]
    assert statuses(running, b"GET /health HTTP/1.0\r\n\r\n") == [200]


# Empty lines ------------------------------------------------------------------------------


@pytest.mark.parametrize("empty", [b"\r\n", b"\n", b"\r\n\r\n", b"\r\n" * MAX_EMPTY_LINES])
def test_empty_lines_before_a_request_are_left_out(running, empty):
    """Before the first, after a body, and behind an answer that has been sent."""
    assert statuses(running, empty + HEALTH) == [200]
    assert statuses(running, post(LENGTH) + empty + HEALTH) == [200, 200]
    assert statuses(running, post(LENGTH), empty + HEALTH) == [200, 200]


def test_endless_empty_lines_are_refused(running):
    assert statuses(running, b"\r\n" * (MAX_EMPTY_LINES + 1) + HEALTH) == [400]


def test_half_of_an_empty_line_is_waited_for():
    parser = Parser(65536)
    for part in (b"\r", b"\n\r", b"\nGET / HT"):
        parser.receive_data(part)
        assert parser.next_event() is h11.NEED_DATA
    parser.receive_data(b"TP/1.1\r\nHost: x\r\n\r\n")
    event = parser.next_event()
    assert isinstance(event, h11.Request) and event.target == b"/"
    parser = Parser(65536)
    parser.receive_data(b"\rGET / HTTP/1.1\r\n\r\n")
    with pytest.raises(h11.RemoteProtocolError):
        parser.next_event()


def test_what_follows_the_last_request_is_not_read():
    """Were it an error, its answer would stand in the middle of the one that is sent."""
    parser = Parser(65536)
    parser.receive_data(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert isinstance(parser.next_event(), h11.Request)
    assert isinstance(parser.next_event(), h11.EndOfMessage)
    for part in (b"\r\n", HEALTH):
        parser.receive_data(part)
        assert parser.next_event() is h11.NEED_DATA
    assert parser.trailing_data == (b"", False)


# Absolute form ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://%s/health", 200),
        (b"HTTP://%s/health", 200),
        (b"https://%s/health?a=b", 200),
        (b"http://localhost:1/health", 200),
        (b"http://[::1]:1/health", 200),
        (b"http://%s", 200),
        (b"http://%s?a=/health", 200),
        (b"http://%s/nowhere", 404),
        (b"ftp://%s/health", 404),
        (b"http:///health", 400),
        (b"http://127.0.0.1@evil.example/health", 400),
        (b"http://evil.example/health", 403),
        (b"http://evil.example:80/health", 403),
    ],
)
@pytest.mark.parametrize("host", [b"localhost", b"evil.example"])
def test_the_host_of_an_absolute_target_counts(restricted, target, status, host):
    """In place of the header's, where a page under another name would reach this machine."""
    here = b"127.0.0.1:%d" % restricted.port
    line = target % here if b"%s" in target else target
    content = b"GET " + line + b" HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n"
    expected = 403 if b"ftp" in target and host == b"evil.example" else status
    assert statuses(restricted, content) == [expected]


@pytest.fixture(scope="module")
def restricted(start):
    return start(allowed_hosts=("127.0.0.1", "localhost", "[::1]"))


def test_a_request_in_absolute_form_is_answered(running):
    line = b"http://127.0.0.1:%d/v1/completions HTTP/1.1" % running.port
    (first, content), (second, _) = answers(running, post(LENGTH, line=line) + HEALTH)
    assert (first, second) == (200, 200) and b'"text_completion"' in content
