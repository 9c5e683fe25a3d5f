"""The compilation cache is refused where others can write and used by the next process;
compilations are counted."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from swiftkv_jax.cli.devices import enable_compilation_cache
from swiftkv_jax.errors import UsageError
from swiftkv_jax.infer.runner.compilation import CompileCounter, compile_all

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys, jax
from pathlib import Path
from swiftkv_jax.cli.devices import enable_compilation_cache
enable_compilation_cache(Path(sys.argv[1]))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
jax.jit(lambda x: x * 3 + 1)(2.0).block_until_ready()
print(sum("cache_hit" in event for event in hits))
"""


def test_what_was_compiled_serves_the_next_start(tmp_path):
    def hits() -> int:
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "new" / "cache")],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr
        return int(run.stdout)

    assert hits() == 0
    assert (tmp_path / "new" / "cache").stat().st_mode & 0o777 == 0o700
    assert hits() > 0


def test_a_folder_that_others_can_write_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(UsageError, match="others can write there, and so run code here; chmod 700"):
        enable_compilation_cache(tmp_path)


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners on this system")
def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(UsageError, match="belongs to another user"):
        enable_compilation_cache(tmp_path)


def test_all_are_compiled_and_counted():
    before, done = CompileCounter.read(), []
    lowered = {
        ("double", n): (lambda n=n: jax.jit(lambda x: x * 2 + n).lower(1.0)) for n in range(3)
    }
    compiled = compile_all(lowered, lambda: done.append(1))
    assert len(done) == 3 and CompileCounter.read() == before + 3
    assert [float(compiled["double", n](5.0)) for n in range(3)] == [10, 11, 12]
    assert CompileCounter.read() == before + 3
