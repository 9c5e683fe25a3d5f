"""Two replicas under Ray Serve (`make test-ray`), as `examples/deploy/ray_serve.py` starts them."""

import concurrent.futures
import contextlib
import http.client
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import swiftkv_jax as skv
from swiftkv_jax import demo
from tests.free_port import free_port

PYTHON = os.environ.get("RAY_PYTHON", "")
"""Python of an environment with this package and `ray[serve]`."""
pytestmark = pytest.mark.skipif(not PYTHON, reason="needs ray[serve]: make test-ray")
ROOT = Path(__file__).parents[2]
FLAGS = "--max-model-len 512 --max-num-seqs 4 --compile-cache none --unknown-fields ignore"
START_SECONDS = 400


@pytest.fixture(scope="module")
def port():
    """Of Ray's proxy, with both replicas ready."""
    port = free_port()
    environment = os.environ | {
        "RAY_USAGE_STATS_ENABLED": "0",
        "JAX_PLATFORMS": "cpu",
    }
    script = (
        "from ray import serve; from examples.deploy.ray_serve import application; "
        f"serve.start(http_options={{'port': {port}}}); "
        f"serve.run(application({{'replicas': '2', 'flags': '{FLAGS}'}}), blocking=True)"
    )
    process = subprocess.Popen([PYTHON, "-c", script], cwd=ROOT, env=environment)
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert process.poll() is None and time.monotonic() < deadline
            with contextlib.suppress(OSError):
                if ask(port, "/ready"):
                    break
            time.sleep(1)
        yield port
    finally:
        process.terminate()
        process.wait(120)


def ask(port: int, path: str, body: object = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    url = f"http://127.0.0.1:{port}{path}"
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as answer:
        return json.load(answer)


def test_answers_are_the_models_own(port):
    model = skv.load(demo.SWIFTKV)
    prompts = [f"def read_{number}(path):" for number in range(8)]
    expected = skv.generate(model, prompts, max_tokens=8)

    def complete(prompt):
        return ask(port, "/v1/completions", {"prompt": prompt, "max_tokens": 8, "temperature": 0})

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = [answer["choices"][0]["text"] for answer in pool.map(complete, prompts)]
    assert found == expected


def test_errors_keep_their_status(port):
    with pytest.raises(urllib.error.HTTPError) as error:
        ask(port, "/v1/completions", {"prompt": "a", "max_tokens": 10_000})
    assert error.value.code == 400
    assert json.load(error.value)["error"]["code"] == "context_length_exceeded"


def test_a_stream_comes_in_parts_and_ends_when_its_client_leaves(port):
    body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream")
    assert answer.readline().startswith(b"data: {")
    assert num_running(port) > 0
    connection.close()
    deadline = time.monotonic() + 10
    while num_running(port):
        assert time.monotonic() < deadline, "the request goes on"


def num_running(port) -> int:
    """Requests that one of the replicas has. Asked many times at once, because Ray would send a
    single question to the replica that runs nothing."""
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        loads = pool.map(lambda _: ask(port, "/load")["server_load"], range(32))
    return max(loads)
