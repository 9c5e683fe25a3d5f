"""When and where a server can be reached: while it starts; Unix domain sockets, TLS, a path of a
proxy."""

import asyncio
import contextlib
import http.client
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path

import pytest

from swiftkv_jax.errors import UsageError
from swiftkv_jax.serve import server
from swiftkv_jax.serve.options import ServerOptions
from tests.serve.conftest import read_all
from tests.serve.process import SMALL, serving
from tests.serve.test_ends import BODY


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """(certificate, key) of localhost, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    folder = tmp_path_factory.mktemp("tls")
    files = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost".split()
        + ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        + ["-out", str(files[0]), "-keyout", str(files[1])],
        check=True,
        capture_output=True,
    )
    return files


def test_a_start_tells_how_far_it_is(start):
    reported, go_on = threading.Event(), threading.Event()

    def load(report: server.Report) -> None:
        report("compiling", 3, 14)
        reported.set()
        assert go_on.wait(30)

    running = start(on_load=load)
    try:
        assert reported.wait(30)
        status, _, content = running.request("GET", "/ready")
        expected = {"status": "starting", "phase": "compiling", "done": 3, "total": 14}
        assert (status, json.loads(content)) == (503, expected)
        status, _, content = running.request("GET", "/health")
        assert (status, json.loads(content)) == (200, {"status": "ok", "server": expected})
        status, headers, content = running.request("POST", "/v1/completions", BODY)
        assert status == 503 and "retry-after" in headers
        assert json.loads(content)["error"]["code"] == "starting"
    finally:
        go_on.set()
    running.until(lambda: running.request("GET", "/ready")[0] == 200)
    assert running.post("/v1/completions", BODY)[0] == 200


def ask(connection, content: bytes) -> bytes:
    """The answer, up to the end of the connection."""
    with connection:
        connection.settimeout(20)
        connection.sendall(content)
        return read_all(connection)


def test_tls(start, certificate):
    """Whole answers and streams, and who leaves is noticed."""
    running = start(ssl_certfile=certificate[0], ssl_keyfile=certificate[1], step_seconds=0.03)
    context = ssl.create_default_context(cafile=str(certificate[0]))
    for stream in (False, True):
        client = http.client.HTTPSConnection("localhost", running.port, context=context, timeout=20)
        for _ in range(2):
            body = json.dumps(BODY | {"stream": stream, "max_tokens": 5})
            client.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            answer = client.getresponse()
            content = answer.read()
            assert answer.status == 200
            assert content.endswith(b"data: [DONE]\n\n" if stream else b"}")
        client.close()
    client = http.client.HTTPSConnection("localhost", running.port, context=context, timeout=20)
    body = json.dumps(BODY | {"stream": True, "max_tokens": 200})
    client.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    running.until(lambda: running.app.service.num_admitted == 1)
    client.close()
    running.check_empty()
    assert sum(running.app.service.metrics.disconnects.values()) == 1
    plain = socket.create_connection(("127.0.0.1", running.port))
    assert b"HTTP/1.1 200" not in ask(plain, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")


def test_deadlines_and_slow_readers_with_tls(start, certificate):
    running = start(
        ssl_certfile=certificate[0],
        ssl_keyfile=certificate[1],
        header_timeout=0.3,
        write_timeout=0.5,
        send_buffer=4096,
    )
    context = ssl.create_default_context(cafile=str(certificate[0]))

    def connect() -> ssl.SSLSocket:
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.connect(("127.0.0.1", running.port))
        return context.wrap_socket(plain, server_hostname="localhost")

    begun = time.monotonic()
    with contextlib.suppress(ssl.SSLError):
        assert ask(connect(), b"GET /health HT") == b""
    assert time.monotonic() - begun < 5
    big = BODY | {"max_tokens": 200, "n": 8, "logprobs": 20, "stream": True}
    content = json.dumps(big).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with connect() as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        running.until(lambda: running.app.service.metrics.slow_clients == 1)
    running.check_empty()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ssl_keyfile": "key.pem"}, "`ssl_keyfile` needs `ssl_certfile`"),
        ({"ssl_certfile": "missing.pem"}, "`ssl_certfile`=missing.pem: .*No such file"),
        ({"ssl_certfile": __file__}, "test_listening.py is not a certificate .* `ssl_keyfile`"),
        ({"root_path": "llm"}, "`root_path`='llm' must be like /llm"),
        ({"root_path": "/llm/"}, "`root_path`='/llm/' must be like /llm"),
        ({"allowed_hosts": ("::1", "proxy.example:80")}, "'proxy.example:80' must have no port"),
        ({"allowed_hosts": ("[::1]:80",)}, "must have no port"),
        ({"chat_template_kwargs": ("x", "messages")}, "requests cannot set 'messages'"),
        ({"chat_template_kwargs": ("tokenize", "x")}, "requests cannot set 'tokenize'"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(UsageError, match=message):
        ServerOptions(**options)


def test_a_certificate_without_its_key(certificate):
    with pytest.raises(UsageError, match="private key, in PEM; give `ssl_keyfile`"):
        ServerOptions(ssl_certfile=certificate[0])


def test_a_path_of_a_proxy(start):
    running = start(root_path="/llm/one")
    for prefix in ("", "/llm/one"):
        assert running.post(f"{prefix}/v1/completions", BODY | {"max_tokens": 2})[0] == 200
        assert running.request("GET", f"{prefix}/v1/models/tiny")[0] == 200
        assert running.request("GET", f"{prefix}/")[0] == 200
    assert running.request("GET", "/llm/one")[0] == 200  # the page, as at /llm/one/
    for path in ("/llm/health", "/llm/onehealth", "/llm/one/llm/one/health"):
        assert running.request("GET", path)[0] == 404


def ask_unix(path: Path, method: str, route: str, body: str = "") -> bytes:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(path))
    head = f"{method} {route} HTTP/1.1\r\nHost: any\r\nConnection: close\r\n"
    head += "Authorization: Bearer first-key\r\nContent-Type: application/json\r\n"
    return ask(connection, f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())


def test_a_unix_domain_socket(start, tmp_path):
    path = tmp_path / "server.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    start(listener=server.listen_unix(path))
    assert ask_unix(path, "GET", "/ready").startswith(b"HTTP/1.1 200")
    body = json.dumps(BODY | {"stream": True})
    assert b"data: [DONE]" in ask_unix(path, "POST", "/v1/completions", body)
    with pytest.raises(OSError, match="in use"):
        server.listen_unix(path)
    other = tmp_path / "file"
    other.write_text("a file")
    with pytest.raises(OSError, match="in use"):
        server.listen_unix(other)
    assert other.read_text() == "a file"


def test_the_end_of_a_server_leaves_the_socket_of_the_next(tmp_path):
    path = tmp_path / "server.sock"
    with server.listen_unix(path) as old, server.removing_unix(path):
        path.chmod(0o777)
        old.close()
        after = server.listen_unix(path)  # on the name that nobody answers any more
    assert path.is_socket()
    with after, server.removing_unix(path):
        path.chmod(0o777)
    assert not path.exists()


@pytest.mark.long
def test_the_command_listens_on_a_unix_domain_socket(checkpoint, tmp_path):
    path = tmp_path / "server.sock"
    arguments = "--uds", str(path), "--api-key", "first-key"
    with serving(checkpoint, *SMALL, *arguments, wait_url=False) as found:
        assert ask_unix(path, "GET", "/v1/models").startswith(b"HTTP/1.1 200")
        found.process.terminate()
        assert found.process.wait(30) == 0
    assert not path.exists()


def test_uvloop_is_tested():
    """The event loop of production."""
    with asyncio.Runner(loop_factory=server.loop_factory()) as runner:
        assert type(runner.get_loop()).__module__ == "uvloop"
