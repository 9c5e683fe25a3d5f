"""`infer serve` as a process of its own."""

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMALL = (
    "--port 0 --max-num-batched-tokens 16 --max-model-len 128 --max-num-seqs 2 --decode-steps 3 "
    "--page-size 8 --compile-cache none"
).split()
"""Options of a server that starts quickly."""


@dataclasses.dataclass
class Server:
    url: str
    process: subprocess.Popen
    lines: Iterator[str]
    """What the process writes to standard error from now on."""
    start: list[str]
    """What it has written until it was ready."""

    def ask(self, path: str, body: object = None, key: str = "first-key") -> dict:
        """The answer, as JSON; `HTTPError` for a status that is none of success."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"} if data else {}
        headers |= {"authorization": f"Bearer {key}"}
        request = urllib.request.Request(self.url + path, data, headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)


@contextlib.contextmanager
def serving(
    model: Path,
    *arguments: str,
    wait_url: bool = True,
    command: Sequence[str] = (sys.executable, "-m", "swiftkv_jax.infer"),
    folder: Path = ROOT,
) -> Iterator[Server]:
    """A server of this model, that is ready; killed at the end. Without `wait_url` it has none.
    `command` runs in `folder`."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "JAX_PLATFORMS": "cpu"}
    if programs := os.environ.get("TEST_PROGRAMS"):
        environment["JAX_COMPILATION_CACHE_DIR"] = programs
    process = subprocess.Popen(
        [*command, "serve", "--model", str(model), *arguments],
        cwd=folder,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        server = Server("", process, iter(process.stderr), [])
        for line in server.lines:
            server.start.append(line)
            if wait_url and (found := re.search(r"listening on (http://[^\s\"]+)", line)):
                server.url = found[1]
                health = server.ask("/health")
                assert health["status"] == "ok", "before the model is loaded"
            if " is ready" in line:
                break
        else:
            raise AssertionError("".join(server.start))
        yield server
    finally:
        process.kill()
        process.communicate()
