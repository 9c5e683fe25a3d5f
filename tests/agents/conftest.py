"""One server for all clients, and the table of what they can do (`make test-agents`)."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agents import table

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".venv-agents"
"""What `make test-agents` has installed: environments of Python, and packages of npm."""
PROMPT = "prompt.txt"
"""File with what a client is given, in its folder."""
SECONDS = 240
"""Longest that a client may take; its processes share the machine."""


@dataclasses.dataclass
class Run:
    """A client that has ended."""

    output: str
    """What it wrote to both streams."""
    requests: list[dict]
    """What the server got meanwhile: path, body and status of each request."""


@dataclasses.dataclass
class Server:
    url: str
    log: Path

    def requests(self) -> list[dict]:
        lines = self.log.read_text(encoding="utf-8").splitlines()
        return [found for found in map(json.loads, lines) if found["path"].startswith("/v1/")]

    def run(
        self, command: list[str], folder: Path, variables: dict[str, str], given: str = ""
    ) -> Run:
        """Run a client in a folder that is its home too, with nothing of this process' environment.
        Requests to other addresses than the loopback go to a proxy that is not there."""
        node = ENVIRONMENTS / "newest" / "bin"
        environment = {
            "HOME": str(folder),
            "PATH": f"{node}:{ENVIRONMENTS / 'node_modules' / '.bin'}:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "HTTP_PROXY": "http://127.0.0.1:1",
            "HTTPS_PROXY": "http://127.0.0.1:1",
            "NO_PROXY": "127.0.0.1,localhost",
        }
        before, path = len(self.requests()), folder / PROMPT
        path.write_text(given, encoding="utf-8")
        with path.open(encoding="utf-8") as file:  # not a pipe, which Continue does not wait for
            done = subprocess.run(
                command,
                cwd=folder,
                env=environment | variables,
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=SECONDS,
            )
        return Run(done.stdout, self.requests()[before:])


@pytest.fixture(scope="session")
def server(tmp_path_factory) -> Iterator[Server]:
    """The server before the scripted model, as a process."""
    assert ENVIRONMENTS.is_dir(), f"no {ENVIRONMENTS}: run `make test-agents`"
    log = tmp_path_factory.mktemp("server") / "requests.jsonl"
    log.touch()
    with subprocess.Popen(
        [sys.executable, "-m", "tests.agents.scripted_server", "--requests", str(log)],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url, "the server has ended"
            yield Server(url, log)
        finally:
            process.kill()


# The table ---------------------------------------------------------------------


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test of one client and one feature is a cell."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    if {"client", "feature"} <= params.keys():
        item.user_properties.append(("cell", (params["client"], params["feature"])))


class Cells:
    """Collects the cells, and writes the table once all are there."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cell: Any = dict(report.user_properties).get("cell")
        if cell is not None and (report.when == "call" or report.failed):
            self.found[cell] = "works" if report.passed else "**fails**"

    def pytest_terminal_summary(self, terminalreporter) -> None:
        if self.found.keys() >= table.cells():
            record = table.record(self.found, table.versions(ENVIRONMENTS))
            table.RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            terminalreporter.write_line("\n" + table.markdown(record))
            table.PAGE.write_text(table.page(record), encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Cells(), "cells")
