"""The comparison of servers, and streams that end as those of `transformers serve` do."""

import asyncio
import json

import pytest

from benchmarks import beside_transformers
from swiftkv_jax.infer.bench.http_client import Client

TEXT = b'data: {"choices": [{"text": "ab"}]}\n\n'
END = (
    b'data: {"choices": [{"text": "", "finish_reason": "length"}], '
    b'"usage": {"prompt_tokens": 7, "completion_tokens": 2}}\n\n'
)


@pytest.mark.parametrize(
    ("stream", "error"),
    [(TEXT + END, ""), (TEXT + b"data: [DONE]\n\n", ""), (TEXT, "ValueError: the stream was cut")],
)
def test_a_stream_ends_in_a_finish_reason_or_in_done(stream, error):
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(stream) + stream)
        writer.close()

    async def complete():
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            try:
                return await client.complete({})
            finally:
                client.close()

    timed = asyncio.run(complete())
    assert (timed.error or "") == error
    if END in stream:
        assert (timed.num_prompt_tokens, timed.num_tokens, len(timed.arrivals)) == (7, 2, 2)


@pytest.mark.long
def test_swiftkv_beside_its_teacher(tmp_path, capsys):
    path = tmp_path / "servers.json"
    flags = ["--shapes", "smoke", "--rounds", "2", "--output", str(path)]
    assert beside_transformers.main(flags) == 0
    document = json.loads(path.read_text())
    rows = [(row["server"], row["clients"], len(row["rounds"])) for row in document["speed"]]
    assert rows == [("teacher", 1, 2), ("swiftkv", 1, 2), ("teacher", 2, 2), ("swiftkv", 2, 2)]
    assert all(found["output_tokens"] > 0 for row in document["speed"] for found in row["rounds"])
    assert capsys.readouterr().out.count("\n| swiftkv |") == 2


def test_usage(capsys, monkeypatch):
    monkeypatch.setattr(beside_transformers, "alone", lambda function, *args: function(*args))
    monkeypatch.setattr(beside_transformers, "floors", lambda shapes: {})
    assert beside_transformers.main(["--model", "x", "--python", "y"]) == 2
    assert "transformers serves random weights only" in capsys.readouterr().err
    assert beside_transformers.main(["--shapes", "smoke", "--python", "/none/python"]) == 2
    assert "needs torch and transformers[serving]" in capsys.readouterr().err
