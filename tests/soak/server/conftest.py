"""A server in a process of its own, seen from outside: its metrics, its memory, its signals."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import report
from tests.infer.conftest import checkpoint
from tests.serve.process import ROOT
from tests.soak.server import bounds

__all__ = ["checkpoint"]

RESULT = os.environ.get("SOAK_RESULT", "")
"""A file that the figures of the session are written to; `new` is one in benchmarks/results."""


@dataclasses.dataclass
class MockServer:
    port: int
    process: subprocess.Popen

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return answer.read()

    def metric(self, name: str, **labels: str) -> float:
        return metric(f"http://127.0.0.1:{self.port}", name, **labels)

    def report(self) -> dict[str, Any]:
        """What the process says of itself."""
        self.process.send_signal(signal.SIGUSR1)
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def log(self) -> list[dict[str, Any]]:
        """The lines of its log, with `log_json`, that are of admitted requests."""
        self.process.send_signal(signal.SIGUSR2)
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def check_empty(self, seconds: float = 20.0) -> dict[str, Any]:
        """Nothing is held any more, soon; its report then."""
        deadline = time.monotonic() + seconds
        while any((found := self.report())["held"].values()):
            assert time.monotonic() < deadline, found
            time.sleep(0.05)
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert self.metric(f"vllm:{name}") == 0, name
        assert self.metric("swiftkv:queued_tokens") == 0
        assert json.loads(self.get("/load")) == {"server_load": 0}
        return found

    def memory(self) -> float:
        """MB of it that are resident."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) / 1e3


def metric(url: str, name: str, **labels: str) -> float:
    """Sum of the samples of this name with these labels that /metrics reports."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert found, f"there is no {name}"
    return sum(found)


class Soak:
    """The figures of a session, and how long times may be."""

    def __init__(self):
        load = os.getloadavg()
        self.load = load
        self.times_factor = bounds.BUSY_FACTOR if load[0] > bounds.BUSY_LOAD else 1
        self.figures: dict[str, dict[str, float]] = {}

    def record(self, key: str, **figures: float) -> None:
        self.figures[key] = figures
        print(f"\n{key}:", ", ".join(f"{name} {one:.4g}" for name, one in figures.items()))

    def limit(self, seconds: float) -> float:
        """What a time may be: on a busy machine more than is asked for."""
        return seconds * self.times_factor

    def write(self, where: str) -> None:
        """Raises `OSError`."""
        facts = report.environment(seed=0)
        facts["host"]["load"] = self.load  # before the tests
        path = Path(where)
        if where == "new":
            path = report.default_path(bounds.NAME, "cpu", facts["date"])
        figures = {"times_factor": self.times_factor, "figures": self.figures}
        report.write_json(path, facts | figures)
        print(f"\nwritten to {path}")


@pytest.fixture(scope="session")
def soak() -> Iterator[Soak]:
    """Takes the figures of the tests."""
    found = Soak()
    yield found
    if RESULT and found.figures:
        found.write(RESULT)


def wait_until_ready(server: MockServer) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            server.get("/ready")
            return
        time.sleep(0.05)
    raise AssertionError("the server is not ready")


StartMock = Callable[..., MockServer]


@pytest.fixture
def start_mock() -> Iterator[StartMock]:
    """Starts a server with the JSON object of `mock_server`."""
    with contextlib.ExitStack() as stack:

        def begin(**given: Any) -> MockServer:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.soak.server.mock_server", json.dumps(given)],
                cwd=ROOT,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            assert process.stdout is not None
            found = MockServer(int(process.stdout.readline()), process)
            wait_until_ready(found)
            return found

        yield begin
