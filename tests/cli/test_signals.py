"""SIGINT at many moments: a command ends with one line on standard error and exit code 130.

Each test waits for what the process writes, then interrupts it. `SECONDS` only bounds a failure.
"""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 120


class Process:
    """A fresh interpreter in a session of its own, with pipes to its standard streams."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._lines: list[str] = []
        self._limit = threading.Timer(SECONDS, os.killpg, (self._process.pid, signal.SIGKILL))

    def __enter__(self) -> "Process":
        self._limit.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._limit.cancel()
        self._process.kill()
        self._process.communicate()

    def wait_for(self, text: str) -> None:
        """Until a line of standard error contains `text`."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line)
            if text in line:
                return
        raise AssertionError(f"{text!r} was never written: {self._lines}")

    def interrupt(self, times: int = 1) -> None:
        for _ in range(times):
            self._process.send_signal(signal.SIGINT)

    def end(self) -> tuple[int, list[str]]:
        """(exit code, lines of standard error)."""
        _, err = self._process.communicate()
        return self._process.returncode, [*"".join([*self._lines, err]).splitlines()]


def assert_interrupted(process: Process) -> list[str]:
    """Lines of standard error, of which the last is the one about the interrupt. Threads may go on
    importing until the process ends, so lines of `-X importtime` are left out."""
    code, lines = process.end()
    lines = [line for line in lines if not line.startswith("import time:")]
    assert code == 130, lines
    assert lines[-1] == "error: interrupted" and lines.count("error: interrupted") == 1
    assert not any("Traceback" in line or "KeyboardInterrupt" in line for line in lines), lines
    return lines


# While it starts ----------------------------------------------------------------


@pytest.mark.short("infer-numpy", "train-jax._src.core", "convert-argparse")
@pytest.mark.parametrize("imported", ["argparse", "numpy", "jax._src.core"])
@pytest.mark.parametrize("module", ["infer", "train", "convert", "eval"])
def test_in_the_middle_of_imports(module, imported):
    arguments = {"infer": ["-p", "x"], "convert": ["inspect", "x"]}.get(module, [])
    with Process("-X", "importtime", "-m", f"swiftkv_jax.{module}", *arguments) as process:
        process.wait_for(f" {imported}\n")
        process.interrupt()
        assert_interrupted(process)


def test_the_console_script_in_the_middle_of_imports():
    script = (
        "from swiftkv_jax.__main__ import program; import sys; sys.argv[1:] = ['train']; program()"
    )
    with Process("-X", "importtime", "-c", script) as process:
        process.wait_for(" numpy\n")
        process.interrupt(times=3)
        assert_interrupted(process)


# While it runs ------------------------------------------------------------------

COMMAND = """
import sys, time
from swiftkv_jax import cli
from swiftkv_jax.process import interrupts
interrupts.install()
interrupts.GRACE_SECONDS = {grace}

def ready():
    print("ready", file=sys.stderr)

class Slow:
    def __del__(self):
        ready()
        time.sleep(600)

def main():
{body}

sys.exit(cli.run(main))
"""
LONG = 600.0
"""Seconds of grace that no test waits for."""

MAINS = {
    "it computes": ("ready()\nwhile True: pass", LONG),
    "it sleeps": ("ready()\ntime.sleep(600)", LONG),
    "it reads standard input": ("ready()\nsys.stdin.read()", LONG),
    "a destructor swallows it": ("slow = Slow()\ndel slow\ntime.sleep(600)", LONG),
    "a module that is imported catches it": (
        "sys.path.insert(0, {folder!r})\nimport catches_all\ntime.sleep(600)",
        LONG,
    ),
    "it becomes another error": (
        "ready()\ntry: time.sleep(600)\nexcept BaseException: raise ValueError('row 3')",
        LONG,
    ),
    "it is caught, and the work goes on to its end": (
        "ready()\ntry: time.sleep(600)\nexcept BaseException: return 0",
        LONG,
    ),
    "it is caught again and again": (
        "ready()\nwhile True:\n try: time.sleep(600)\n except BaseException: pass",
        0.2,
    ),
    "cleaning up takes too long": ("ready()\ntry: time.sleep(600)\nfinally: time.sleep(600)", 0.2),
    "a thread goes on": (
        "import threading\nthreading.Thread(target=time.sleep, args=(600,)).start()\n"
        "ready()\ntime.sleep(600)",
        0.2,
    ),
}


SEVERAL = ("it computes", "it is caught again and again", "cleaning up takes too long")
"""Moments at which it comes four times too."""


@pytest.mark.parametrize(
    ("moment", "times"), [*((one, 1) for one in MAINS), *((one, 4) for one in SEVERAL)]
)
def test_while_the_command_runs(moment, times, tmp_path):
    body, grace = MAINS[moment]
    (tmp_path / "catches_all.py").write_text(
        "import sys, time\nprint('ready', file=sys.stderr)\n"
        "try: time.sleep(1)\nexcept BaseException: pass\n"
    )
    body = "".join(f"    {line}\n" for line in body.format(folder=str(tmp_path)).splitlines())
    with Process("-c", COMMAND.format(body=body, grace=grace)) as process:
        process.wait_for("ready")
        process.interrupt(times)
        assert assert_interrupted(process) == ["ready", "error: interrupted"]


def test_where_it_is_ignored_it_stays_ignored():
    """As under nohup."""
    program = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
from swiftkv_jax import cli
from swiftkv_jax.process import interrupts
interrupts.install()
def main():
    signal.raise_signal(signal.SIGINT)
    return 7
sys.exit(cli.run(main))
"""
    with Process("-c", program) as process:
        assert process.end() == (7, [])


def test_a_python_program_keeps_its_own_handler():
    """Importing the package, and running a command as a function, leave SIGINT alone."""
    program = """
import signal
before = signal.getsignal(signal.SIGINT)
import swiftkv_jax.infer, swiftkv_jax.process.interrupts
from swiftkv_jax.__main__ import main
assert main(["--version"]) == 0 and signal.getsignal(signal.SIGINT) is before
"""
    with Process("-c", program) as process:
        assert process.end() == (0, [])


@pytest.mark.parametrize("handled_by", ["main thread", "another thread"])
def test_while_it_joins_other_processes(handled_by):
    """A signal that another thread handles does not end the main thread's wait for a lock, nor does
    one that comes just before that wait."""
    program = """
import signal, sys, threading, time
from swiftkv_jax import cli
from swiftkv_jax.process import interrupts
interrupts.install()
def interrupt():
    sys.stdin.read()
    time.sleep(0.5)  # the main thread waits by then
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
def main():
    from swiftkv_jax.process.distributed import join_processes
    return join_processes("127.0.0.1:9", 2, 1, timeout=1000)
cli.end(cli.run(main))
"""
    with Process("-c", program) as process:
        process.wait_for("waiting for process 0 at 127.0.0.1:9, for at most 1000 s")
        if handled_by == "main thread":
            process.interrupt()
        # else at the end of its standard input, which waiting for its end closes
        assert_interrupted(process)


# Real commands ------------------------------------------------------------------


def test_infer_that_waits_for_standard_input():
    with Process("-m", "swiftkv_jax", "infer", "-") as process:
        process.wait_for("SwiftKV, prompts run 4 of 8 layers")
        process.interrupt()
        assert_interrupted(process)


@pytest.mark.long
def test_train_that_reads_its_data(tmp_path):
    """Nothing has begun: there is no checkpoint, and no model."""
    (tmp_path / "code.txt").write_text("def f(x):\n    return x\n\n" * 5000)
    flags = f"--data {tmp_path / 'code.txt'} --output-dir {tmp_path / 'run'} --max-steps 1000"
    with Process("-m", "swiftkv_jax.train", *flags.split()) as process:
        process.wait_for(" documents")
        process.interrupt(times=4)
        assert_interrupted(process)
    assert not (tmp_path / "run" / "model").exists()


def test_train_between_steps(tmp_path):
    """The step is finished and saved, and the command says so; a quick second signal ends it at
    once, with a step that is complete or none."""
    (tmp_path / "code.txt").write_text("def f(x):\n    return x\n\n" * 200)
    flags = (
        f"--data {tmp_path / 'code.txt'} --output-dir {tmp_path / 'run'} --max-steps 1000 "
        "--max-length 32 --batch-size 4 --logging-steps 1 --init leader"
    )
    with Process("-m", "swiftkv_jax.train", *flags.split()) as process:
        process.wait_for("step 2")
        process.interrupt()
        code, lines = process.end()
    assert code == 130 and any("stopped after step" in line for line in lines), lines
    assert not any("Traceback" in line for line in lines)
    assert [step.name.isdecimal() for step in (tmp_path / "run" / "checkpoints").iterdir()] == [
        True
    ]
