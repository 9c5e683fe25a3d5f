"""Two servers behind sglang-router (`make test-router`): prompts that begin alike go to the server
that has them cached; a server that drains or dies costs no client an answer."""

import concurrent.futures
import contextlib
import http.client
import os
import random
import subprocess
import time

import openai
import pytest

from tests.free_port import free_port
from tests.infer.serve.conftest import Running

pytest_plugins = ["tests.infer.serve.conftest"]
PYTHON = os.environ.get("ROUTER_PYTHON", "")
"""Python of an environment with sglang-router."""
DOCUMENTS, QUESTIONS = 9, 8
"""An odd number of documents: taking turns sends each to both servers."""
SMALL = {"num_pages": 56 * 6, "slots": 8, "max_model_len": 256, "page_size": 4, "chunk": 64}
"""Room for six documents."""
OPTIONS = {"unknown_fields": "ignore", "max_num_queued_tokens": 100_000}
"""The router adds fields of its own."""


@contextlib.contextmanager
def router(servers: list[Running], policy: str):
    """The address of a router before them."""
    port, metrics = free_port(), free_port()
    command = [PYTHON, "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(metrics), "--policy", policy]
    command += ["--worker-urls", *(server.url for server in servers)]
    command += ["--balance-abs-threshold", "3", "--cache-threshold", "0.5"]
    command += ["--health-check-endpoint", "/ready", "--health-check-interval-secs", "1"]
    command += ["--health-failure-threshold", "1", "--retry-max-retries", "3"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not _is_up(port):
            assert process.poll() is None and time.monotonic() < deadline, "no router"
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(20)


def _is_up(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with contextlib.closing(connection), contextlib.suppress(OSError):
        connection.request("GET", "/v1/models")
        return connection.getresponse().status == 200
    return False


def questions() -> list[str]:
    """Each question asked of every document, one after the other."""
    rng = random.Random(0)
    documents = ["".join(rng.choices("abcdefghij", k=200)) for _ in range(DOCUMENTS)]
    return [f"{document} {number:04d}?" for number in range(QUESTIONS) for document in documents]


def hit_rate(url: str, at_once: int = 2) -> float:
    """Share of the prompt tokens that were cached."""
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:

        def ask(prompt: str):
            found = client.completions.create(model="tiny", prompt=prompt, max_tokens=4)
            assert found.usage is not None and found.usage.prompt_tokens_details is not None
            return found.usage.prompt_tokens_details.cached_tokens, found.usage.prompt_tokens

        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            cached, tokens = zip(*pool.map(ask, questions()), strict=True)
    return sum(cached) / sum(tokens)


@pytest.fixture(scope="module", autouse=True)
def _has_a_router():
    assert PYTHON, "ROUTER_PYTHON names no Python with sglang-router: run `make test-router`"


def test_prompts_go_to_where_they_are_cached(start):
    alone = hit_rate(start(engine=SMALL | {"num_pages": 56 * 12}, **OPTIONS).url + "/v1")
    rates = {}
    # One at a time, all would stay on the server that begins; two take turns in no fixed order.
    for policy, at_once in {"cache_aware": 2, "round_robin": 1}.items():
        servers = [start(engine=SMALL, **OPTIONS) for _ in range(2)]
        with router(servers, policy) as url:
            rates[policy] = hit_rate(url, at_once)
        for server in servers:
            server.check_empty()
    print(f"prefix hits: one server {alone:.3f}, two {rates}")
    assert alone > 0.8
    assert rates["cache_aware"] >= 0.9 * alone
    assert rates["round_robin"] <= 0.6 * alone


@pytest.mark.parametrize("end", ["drained", "killed"])
def test_a_server_goes_away(start, end):
    """Drained, no request fails; killed, none does after the client's retries."""
    servers = [start(engine={"slots": 8}, step_seconds=0.01, **OPTIONS) for _ in range(2)]
    with router(servers, "round_robin") as url:
        retries = 0 if end == "drained" else 4
        with openai.OpenAI(base_url=url, api_key="none", max_retries=retries) as client:

            def ask(number: int) -> str | None:
                time.sleep(0.02 * number)
                found = client.completions.create(model="tiny", prompt=f"{number}", max_tokens=40)
                return found.choices[0].finish_reason

            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                answers = [pool.submit(ask, number) for number in range(60)]
                time.sleep(0.5)
                servers[0].stop()
                if end == "killed":
                    servers[0].stop()
                reasons = [answer.result(60) for answer in answers]
    assert len(reasons) == 60 and set(reasons) <= {"stop", "length"}
    assert servers[0].code
