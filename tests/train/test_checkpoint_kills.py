"""Processes that die while they save, and disks that are full: the newest complete state stays."""

import contextlib
import itertools
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import jax
import pytest

from tests.train.states import (
    assert_is,
    open_run,
    restore,
    save_steps,
    shapes_and_shardings,
    state_at,
    there,
)

ROOT = Path(__file__).parent.parent.parent


def child(folder: Path, code: str) -> list[str]:
    """A command that runs `code` with the module `states` and `folder`."""
    lines = [
        "import resource, sys, jax",
        "from pathlib import Path",
        "jax.config.update('jax_num_cpu_devices', 1)",
        "from tests.train import states",
        f"folder = Path({str(folder)!r})",
    ]
    return [sys.executable, "-c", "\n".join([*lines, textwrap.dedent(code)])]


def test_a_full_disk_is_one_line_and_leaves_what_was_there(tmp_path):
    """Files cannot grow beyond 4 KB, so the second save fails in the background: `close` raises
    its error."""
    code = """
        from swiftkv_jax import cli
        def main():
            checkpoints = states.open_run(folder, keep=1)
            checkpoints.restore(*states.shapes_and_shardings())
            checkpoints.save(states.state_at(1))
            assert checkpoints.load(1, *states.shapes_and_shardings())
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            checkpoints.save(states.state_at(2))
            checkpoints.close()
            return 0
        sys.exit(cli.run(main))
    """
    run = subprocess.run(
        child(tmp_path, code), cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 1, run.stderr
    reported = [line for line in run.stderr.splitlines() if line]
    assert len(reported) == 1 and reported[0].startswith(
        f"error: checkpoint {tmp_path}/checkpoints/2 could not be saved ("
    )
    assert "File too large" in reported[0] and reported[0].endswith(
        "; the newest complete one is 1"
    )
    assert_is(restore(tmp_path, resume="must"), 1)


def test_a_save_that_failed_is_reported_by_the_next_one(tmp_path):
    checkpoints = open_run(tmp_path)
    checkpoints.restore(*shapes_and_shardings())
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    kept = float(os.environ.get("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", 1))
    try:
        # A limit on files is one on the cache of compiled programs too: nothing goes there.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
        checkpoints.save(state_at(1))
        with pytest.raises(
            OSError, match="checkpoints/1 could not be saved .*; there is no older one"
        ):
            checkpoints.save(state_at(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", kept)
    checkpoints.close()
    assert restore(tmp_path) is None
    save_steps(tmp_path, 1)
    assert_is(restore(tmp_path), 1)


@pytest.mark.long
def test_killed_while_saving(tmp_path):
    """kill -9 at three random moments of a process that saves all the time: the newest complete
    step is intact."""
    code = """
        state = states.restore(folder)
        checkpoints = states.open_run(folder, keep=2)
        checkpoints.restore(*states.shapes_and_shardings())
        step = 0 if state is None else int(state.step)
        while True:
            step += 1
            checkpoints.save(states.state_at(step))
    """
    moments, before = random.Random(1), 0
    for _ in range(3):
        with subprocess.Popen(
            child(tmp_path, code), cwd=ROOT, stderr=subprocess.PIPE, text=True
        ) as process:
            while not any(step > before for step in saved(tmp_path)) and process.poll() is None:
                time.sleep(0.01)
            time.sleep(moments.uniform(0, 0.2))
            process.send_signal(signal.SIGKILL)
            _, stderr = process.communicate()
        assert process.returncode == -signal.SIGKILL, stderr
        newest = max(saved(tmp_path))
        assert newest > before
        assert_is(restore(tmp_path, resume="must"), newest)
        assert all(name.isdecimal() for name in there(tmp_path)), (
            "what the killed process left is still there"
        )
        assert not (tmp_path / "checkpoints-damaged").exists()
        before = newest


def saved(folder: Path) -> list[int]:
    return (
        [int(name) for name in there(folder) if name.isdecimal()]
        if (folder / "checkpoints").exists()
        else []
    )


def test_an_unfinished_save_is_removed_while_it_is_written_to(tmp_path):
    """Threads of a save that failed may go on for a moment."""
    unfinished = tmp_path / "checkpoints" / "1.orbax-checkpoint-tmp" / "state"
    unfinished.mkdir(parents=True)
    stop = threading.Event()

    def write() -> None:
        for number in itertools.count():
            if stop.is_set():
                return
            with contextlib.suppress(OSError):
                (unfinished / str(number)).touch()

    thread = threading.Thread(target=write)
    thread.start()
    timer = threading.Timer(0.5, stop.set)
    timer.start()
    try:
        assert restore(tmp_path) is None
    finally:
        stop.set()
        thread.join()
        timer.join()
    assert not unfinished.exists()
