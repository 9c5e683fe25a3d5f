"""Two processes on this machine, one device each: together they calibrate the delta that one of
them fits alone."""

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from tests.calibration.test_meshes import fit, numbers

ROOT = Path(__file__).parents[2]
MESHES = {1: "2x1", 2: "1x2"}
"""Mesh for each size of a group: rows, or heads, of different processes."""
SECONDS = 120
"""In which the pair has ended, also on a busy machine, or is killed."""

WORK = """
    import sys
    import jax
    import numpy as np
    port, index, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
    from tests.calibration.test_meshes import fit, numbers
    from tests.calibration.test_processes import MESHES

    for group, mesh in MESHES.items():
        np.savez(f"{out}/{group}-{index}", **numbers(fit(group, mesh)))
"""


@pytest.fixture(scope="module")
def together(tmp_path_factory) -> Path:
    """Where each process has written what it found, of each group size."""
    out = tmp_path_factory.mktemp("together")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(WORK), str(port)]
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context((out / f"log-{index}").open("w+")) for index in (0, 1)]
        running = [
            stack.enter_context(
                subprocess.Popen([*command, str(index), str(out)], env=environment, stderr=log)
            )
            for index, log in enumerate(logs)
        ]
        for process in running:
            stack.callback(process.kill)
        for process, log in zip(running, logs, strict=True):
            assert process.wait(timeout=SECONDS) == 0, log.seek(0) or log.read()
    return out


@pytest.mark.parametrize("group", MESHES)
def test_two_processes_calibrate_like_one(group, together):
    """Each has the whole delta, the pairing of heads where layers share, and the figures of every
    layer."""
    expected = numbers(fit(group, None))
    for index in (0, 1):
        with np.load(together / f"{group}-{index}.npz") as file:
            found = dict(file)
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            atol = 1e-5 * np.abs(array).max(initial=0)
            np.testing.assert_allclose(found[name], array, rtol=0, atol=atol, err_msg=name)
