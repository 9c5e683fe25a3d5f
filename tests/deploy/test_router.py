"""Two servers of the demo model behind sglang-router, all of them processes, with the flags of
`examples/deploy/compose.yaml` (`make test-router`): prompts that begin alike go to the server that
has them cached; a server that drains or is killed costs no client an answer."""

import concurrent.futures
import contextlib
import dataclasses
import http.client
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator

import openai
import pytest
from transformers import AutoTokenizer

from swiftkv_jax import demo
from tests.deploy import compose
from tests.free_port import free_port
from tests.serve.process import ROOT

PYTHON = os.environ.get("ROUTER_PYTHON", "")
"""Python of an environment with sglang-router."""
MODEL = demo.LLAMA.parent / "swiftkv"
DOCUMENTS, QUESTIONS = 9, 8
"""An odd number of documents: taking turns sends each to both servers."""
CHARACTERS, PAGE = 500, 8
SIZES = f"--page-size {PAGE} --max-model-len 512 --max-num-seqs 8 --max-num-batched-tokens 128"
AT_ONCE, RETRIES, MAX_TOKENS = 8, 4, 30


@dataclasses.dataclass
class Server:
    process: subprocess.Popen
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 300
        while not answers(self.port, "/ready"):
            assert self.process.poll() is None and time.monotonic() < deadline, "no server"
            time.sleep(0.2)

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            return answer.read().decode()

    @property
    def num_pages(self) -> int:
        (found,) = re.findall(r'num_gpu_blocks="(\d+)"', self.metrics())
        return int(found)

    @property
    def num_running(self) -> float:
        (found,) = re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", self.metrics(), re.M)
        return float(found)


@contextlib.contextmanager
def servers(count: int, memory: int) -> Iterator[list[Server]]:
    """Servers of the demo model with so many bytes of KV cache."""
    started = []
    try:
        for _ in range(count):
            port = free_port()
            command = [sys.executable, "-m", "swiftkv_jax.infer", "serve", "--model", str(MODEL)]
            command += ["--host", "127.0.0.1", "--port", str(port), *compose.server_flags()]
            command += [*SIZES.split(), "--kv-cache-memory", str(memory)]
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            started.append(Server(process, port))
        for one in started:
            one.wait_until_ready()
        yield started
    finally:
        for one in started:
            one.process.kill()
            one.process.wait(20)


@contextlib.contextmanager
def router(behind: list[Server], policy: str | None = None) -> Iterator[str]:
    """The address of a router before them; `policy` in place of that of the example."""
    port, metrics, flags = free_port(), free_port(), compose.router_flags()
    if policy is not None:
        flags[flags.index("--policy") + 1] = policy
    command = [PYTHON, "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(metrics), *flags]
    command += ["--worker-urls", *(one.url for one in behind)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not answers(port, "/v1/models"):
            assert process.poll() is None and time.monotonic() < deadline, "no router"
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(20)


def answers(port: int, path: str) -> bool:
    """True if it is 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with contextlib.closing(connection), contextlib.suppress(OSError):
        connection.request("GET", path)
        return connection.getresponse().status == 200
    return False


def questions() -> list[str]:
    """Each question asked of every document, one after the other."""
    rng = random.Random(0)
    documents = ["".join(rng.choices("abcdefghij", k=CHARACTERS)) for _ in range(DOCUMENTS)]
    return [f"{document} {number:04d}?" for number in range(QUESTIONS) for document in documents]


def pages_of_a_prompt() -> int:
    tokenizer = AutoTokenizer.from_pretrained(demo.LLAMA)
    return max(len(tokenizer(text)["input_ids"]) for text in questions()) // PAGE + 2


def hit_rate(url: str, at_once: int) -> float:
    """Share of the prompt tokens that were cached."""
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:

        def ask(prompt: str) -> tuple[int, int]:
            found = client.completions.create(model="llama", prompt=prompt, max_tokens=4)
            assert found.usage is not None and found.usage.prompt_tokens_details is not None
            return found.usage.prompt_tokens_details.cached_tokens or 0, found.usage.prompt_tokens

        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            cached, tokens = zip(*pool.map(ask, questions()), strict=True)
    return sum(cached) / sum(tokens)


@pytest.fixture(scope="module", autouse=True)
def _has_a_router():
    assert PYTHON, "ROUTER_PYTHON names no Python with sglang-router: run `make test-router`"


@pytest.fixture(scope="module")
def one_server() -> tuple[float, int]:
    """(share of the prompt tokens that one server with room for all has cached, bytes of a page)"""
    memory = 64 * 2**20
    with servers(1, memory) as (server,):
        assert server.num_pages > 2 * DOCUMENTS * pages_of_a_prompt()
        return hit_rate(server.url + "/v1", 2), memory // server.num_pages


# One question at a time, all would stay on the server that begins; two take turns in no fixed
# order.
@pytest.mark.parametrize(("policy", "at_once"), [(None, 2), ("round_robin", 1)])
def test_prompts_go_to_where_they_are_cached(one_server, policy, at_once):
    """Two servers with room for eight prompts each."""
    alone, page_bytes = one_server
    with servers(2, 8 * pages_of_a_prompt() * page_bytes) as pair, router(pair, policy) as url:
        rate = hit_rate(url, at_once)
    print(f"\nprefix hits: one server {alone:.3f}, two {rate:.3f} ({policy or 'the example'})")
    assert alone > 0.8
    if policy is None:
        assert rate >= 0.9 * alone
    else:
        assert rate <= 0.6 * alone


class Clients:
    """Clients that ask until they are stopped, every second time for a stream."""

    def __init__(self, url: str, retries: int):
        self.client = openai.OpenAI(base_url=url, api_key="none", max_retries=retries)
        self.retries, self.stopped = retries, threading.Event()
        self.answered = self.asked_again = 0
        self.failed: list[str] = []
        self._threads = [
            threading.Thread(target=self._run, args=(number,)) for number in range(AT_ONCE)
        ]
        self._lock = threading.Lock()

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        for thread in self._threads:
            thread.join(120)
        self.client.close()

    def wait_for(self, count: int) -> None:
        """Until so many requests have ended."""
        deadline = time.monotonic() + 180
        while self.answered < count:
            assert time.monotonic() < deadline, f"{self.answered} of {count} requests"
            time.sleep(0.1)

    def _run(self, number: int) -> None:
        count = 0
        while not self.stopped.is_set():
            prompt, count = f"{number} asks {count}: ", count + 1
            error = self._ask(prompt) if count % 2 else self._stream(prompt)
            with self._lock:
                self.answered += 1
                if error:
                    self.failed.append(error)

    def _ask(self, prompt: str) -> str:
        """What went wrong, or nothing. The client library asks again."""
        try:
            found = self.client.completions.create(
                model="llama", prompt=prompt, max_tokens=MAX_TOKENS
            )
        except openai.OpenAIError as error:
            return repr(error)
        return "" if found.choices[0].finish_reason in ("stop", "length") else "no end"

    def _stream(self, prompt: str) -> str:
        """The library does not ask again for a stream that is cut: its user does."""
        error = ""
        for attempt in range(self.retries + 1):
            if attempt:
                with self._lock:
                    self.asked_again += 1
            try:
                stream = self.client.completions.create(
                    model="llama", prompt=prompt, max_tokens=MAX_TOKENS, stream=True
                )
                ends = [one.choices[0].finish_reason for one in stream if one.choices]
            except Exception as found:  # the library passes on errors of its transport
                error = repr(found)
                continue
            if ends and ends[-1] in ("stop", "length"):
                return ""
            error = "a stream without an end"
        return error


@pytest.mark.parametrize("end", ["drained", "killed"])
def test_a_server_goes_away(end):
    """Drained, no request fails; killed, none does after the client's retries."""
    with servers(2, 64 * 2**20) as pair, router(pair) as url:
        retries = 0 if end == "drained" else RETRIES
        with Clients(url, retries) as clients:
            clients.wait_for(2 * AT_ONCE)
            deadline = time.monotonic() + 60
            while (gone := max(pair, key=lambda one: one.num_running)).num_running < 3:
                assert time.monotonic() < deadline, "too few requests run"
            before = clients.answered
            gone.process.send_signal(signal.SIGTERM if end == "drained" else signal.SIGKILL)
            code = gone.process.wait(90)
            clients.wait_for(clients.answered + 3 * AT_ONCE)
            after = clients.answered - before
    print(
        f"\n{end}: {clients.answered} requests, {after} of them after the signal, "
        f"{len(clients.failed)} failed, {clients.asked_again} streams asked for again, exit {code}"
    )
    assert not clients.failed, clients.failed[:5]
    assert before >= 2 * AT_ONCE and after >= 3 * AT_ONCE
    assert code == (0 if end == "drained" else -signal.SIGKILL)
