"""The comparison of servers: what it reads from a server, and what it concludes."""

import contextlib
import dataclasses
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import jax
import pytest
from transformers import AutoTokenizer

from benchmarks.hf_baseline import BASELINE, STUDENT, TEACHER, TINY
from benchmarks.hf_serve import __main__ as hf_serve
from benchmarks.hf_serve import probes, table
from benchmarks.hf_serve.server import Server
from swiftkv_jax import demo

EVENTS = [
    {"choices": [{"text": "ab", "finish_reason": None}]},
    {"choices": [{"text": "", "finish_reason": "length"}]},
    {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}},
]


class Handler(BaseHTTPRequestHandler):
    """Streams `EVENTS`; refuses a request with `n`."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(400 if "n" in body else 200)
        self.end_headers()
        for event in EVENTS:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format, *args): ...


@pytest.fixture
def stub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with contextlib.closing(server.socket):
        url = f"http://127.0.0.1:{server.server_address[1]}"
        yield Server(None, url, "x")  # pyright: ignore[reportArgumentType]
        server.shutdown()


def test_a_stream_is_read_to_its_end(stub):
    seen = []
    answer = stub.stream({"prompt": "a"}, on_text=lambda: seen.append(1))
    assert (answer.text, answer.finish_reason, seen) == ("ab", "length", [1])
    assert (answer.prompt_tokens, answer.tokens) == (7, 3)
    assert 0 < answer.first <= answer.total
    assert stub.ask({"n": 2})[0] == 400


@pytest.mark.parametrize(
    ("status", "answer", "verdict"),
    [
        (200, {"value": 1}, "honoured"),
        (200, {"value": 0}, "ignored"),
        (200, {"value": 2}, "another answer"),
        (200, {}, "another answer"),
        (422, "no", "refused (422)"),
        (500, "oh", "fails (500)"),
    ],
)
def test_verdicts(status, answer, verdict):
    server = SimpleNamespace(ask=lambda body: (status, answer))

    def judge(right, unheeded):
        read = lambda found: found["value"]  # noqa: E731
        return probes._verdict(server, {}, read, right, unheeded)  # pyright: ignore

    assert judge(1, 0) == verdict
    assert judge(1, 1) == "makes no difference here"


@pytest.mark.long
@pytest.mark.parametrize("name", [TEACHER, STUDENT])
def test_the_server_does_what_it_is_asked(tmp_path, name):
    """The questions of the comparison, to this package's server."""
    jax.config.update("jax_platforms", "cpu")
    tokenizer = AutoTokenizer.from_pretrained(str(demo.LLAMA))
    config = dataclasses.replace(TINY, vocab_size=len(tokenizer))
    prompts = hf_serve.source_prompts(tokenizer, 32, 6)
    plain, student = hf_serve.write_models(config, tokenizer, tmp_path)
    command = hf_serve.commands(tmp_path / "python", plain, student)[name]
    with hf_serve.serving(name, command, plain) as server:
        text, rows = hf_serve.speed(server, prompts, 8, (1, 2))
        found = probes.probe(server, student if name == STUDENT else plain, prompts[0])
    assert text and [row["answered"] for row in rows] == [hf_serve.SINGLE, 2]
    assert found.pop("a field that does not exist") == "refused (400)"
    yes = {name: answer for name, answer in found.items() if not answer.startswith("honoured")}
    assert len(yes) == 4 and all(answer.startswith("yes") for answer in yes.values()), yes
    document = {
        "speed": [{"server": name, "input_len": 32, "output_len": 8} | row for row in rows],
        "behaviour": {BASELINE: found, name: found},
        "same_text": True,
        "versions_of_transformers": {"transformers": "5", "torch": "2"},
    }
    lines = table.servers(document).splitlines()
    assert sum(line.startswith("|") for line in lines) == 2 + 2 + 2 + len(found)
