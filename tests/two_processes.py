"""Two processes on this machine, one device each, that run the same code together."""

import contextlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.free_port import free_port

ROOT = Path(__file__).parents[1]

JOIN = """
    import sys
    import jax
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))
"""


def run_together(work: str, *arguments: str, folder: Path, seconds: float) -> None:
    """Run `JOIN` and `work` in two processes with `sys.argv` of port, number and `arguments`; their
    errors go to logs in `folder`. Both have to end well within `seconds`."""
    port = free_port()
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    code = textwrap.dedent(JOIN) + textwrap.dedent(work)
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context((folder / f"log-{index}").open("w+")) for index in (0, 1)]
        running = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", code, str(port), str(index), *arguments],
                    env=environment,
                    stderr=log,
                )
            )
            for index, log in enumerate(logs)
        ]
        for process in running:  # after the first failure the other would wait for it: end both
            stack.callback(process.kill)
        for process, log in zip(running, logs, strict=True):
            assert process.wait(timeout=seconds) == 0, log.seek(0) or log.read()
