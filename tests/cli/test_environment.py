"""Environments that a command cannot work in: one line on standard error, and the exit code."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
READS_AND_PRINTS = """
import sys
from swiftkv_jax import cli
sys.exit(cli.run(lambda: print("naïve", ascii(sys.stdin.read())) or 0))
"""
ENDS = """
import atexit, threading, time
from swiftkv_jax import cli
class TornDown:
    def __del__(self):
        print("torn down")
kept = TornDown()
atexit.register(lambda: print("exit function"))
threading.Thread(target=lambda: time.sleep(0.1) or print("thread")).start()
print("main")
cli.end(3)
"""
USES_A_DEVICE = """
import sys
from swiftkv_jax import cli
def main():
    import jax
    return jax.device_count() and 0
sys.exit(cli.run(main))
"""
JOINS = """
import sys
from swiftkv_jax import cli
def main():
    from swiftkv_jax.process.distributed import join_processes
    return join_processes(sys.argv[1], 2, 1) and 0
sys.exit(cli.run(main))
"""
LAUNCHERS = ("SLURM_", "OMPI_", "TPU_", "MEGASCALE_", "KUBERNETES_", "JOB_COMPLETION_")


def test_a_program_ends_without_a_teardown():
    """Threads and exit functions come first, and what they print is written."""
    ran = subprocess.run([sys.executable, "-c", ENDS], cwd=ROOT, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (3, "")
    assert ran.stdout.split("\n") == ["main", "thread", "exit function", ""]


def shell(program: str, *arguments: str, redirected: str = "", **environment: str):
    """A fresh interpreter behind a shell, which closes streams: the finished process."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return subprocess.run(
        [
            "bash",
            "-c",
            f'"$0" -c "$1" "${{@:2}}" {redirected}',
            sys.executable,
            program,
            *arguments,
        ],
        cwd=ROOT,
        env=clean | environment,
        input=b"caf\xc3\xa9",
        capture_output=True,
        timeout=120,
    )


def error_of(run: subprocess.CompletedProcess[bytes], code: int) -> str:
    """The one line of standard error that begins with `error: `; it is the last."""
    lines = run.stderr.decode().splitlines()
    assert run.returncode == code, lines
    assert [line.startswith("error: ") for line in lines] == [False] * (len(lines) - 1) + [True]
    assert not any("Traceback" in line for line in lines)
    return lines[-1]


@pytest.mark.parametrize(
    ("redirected", "said"),
    [
        (">&-", "standard output is closed"),
        ("<&-", "error: standard input is closed"),
        (">/dev/full", "error: no space left on device"),
    ],
)
def test_streams_that_cannot_be_used(redirected, said):
    run = shell(READS_AND_PRINTS, redirected=redirected)
    assert said in error_of(run, 1) and run.stdout == b""


def test_standard_error_that_is_closed():
    run = shell(READS_AND_PRINTS, redirected="2>&-")
    assert run.returncode == 0 and run.stdout == "naïve 'caf\\xe9'\n".encode()
    run = shell("from swiftkv_jax.__main__ import main; main(['x'])", redirected="2>&-")
    assert run.stdout == b""


def test_a_reader_that_has_ended():
    run = shell(READS_AND_PRINTS, redirected="| true")
    assert run.stderr == b""


def test_standard_streams_that_would_be_ascii():
    run = shell(READS_AND_PRINTS, PYTHONIOENCODING="ascii")
    assert run.returncode == 0, run.stderr
    assert run.stdout == "naïve 'caf\\xe9'\n".encode()


@pytest.mark.short("nonsense")
@pytest.mark.parametrize("platforms", ["nonsense", ",", "cpu,", "cuda"])
def test_platforms_that_are_not_there(platforms):
    line = error_of(shell(USES_A_DEVICE, JAX_PLATFORMS=platforms), 2)
    assert line.startswith(f"error: JAX_PLATFORMS={platforms!r} in the environment names a kind")


def test_a_coordinator_that_does_not_answer():
    """The first line says what the process waits for and how long; then it ends."""
    with socket.socket() as silent:  # bound, so that nothing else listens there
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        run = shell(JOINS, address, SWIFTKV_JOIN_TIMEOUT="1")
    first = run.stderr.decode().splitlines()[0]
    assert first == f"waiting for process 0 at {address}, for at most 1 s"
    line = error_of(run, 2)
    assert f"after 1 s still waiting for process 0 at {address} (SWIFTKV_JOIN_TIMEOUT" in line


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of address space")
def test_memory_that_is_not_enough():
    """The limit is for arrays of NumPy; what native code cannot allocate ends the process."""
    program = """
import resource, sys
from swiftkv_jax import cli
def main():
    import numpy as np
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    return int(np.ones(1 << 33, np.uint8).sum())
sys.exit(cli.run(main))
"""
    assert error_of(shell(program), 5).startswith("error: out of host memory: Unable to allocate")


def test_64_bit_numbers_in_training(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "swiftkv_jax.train", "--output-dir", str(tmp_path / "run")],
        cwd=ROOT,
        env=os.environ | {"JAX_ENABLE_X64": "1"},
        capture_output=True,
    )
    assert "JAX_ENABLE_X64 in the environment" in error_of(run, 2)
    assert not (tmp_path / "run").exists()
