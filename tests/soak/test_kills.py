"""Twenty kills: runs are ended by SIGKILL at random moments and started again, and must end as if
nothing had happened.

The moments are spread evenly over what a whole run takes, from its imports to its export, counted
in CPU seconds: those of a run are the same on a busy machine. A run that gets to its end between
two kills is checked, and the next one begins. Takes some minutes on Linux, and is in no other
target than `make test-soak`.
"""

import collections
import json
import math
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (
    "def f(x):\n    return x + 1\n\n\nclass A:\n    def g(self, y):\n        return [self, y]\n\n"
    * 40
)
STEPS, KILLS, SEED = 120, 20, 0


def test_killed_runs_end_like_one_never_killed(tmp_path):
    data = tmp_path / "code.txt"
    data.write_text(TEXT)
    undisturbed = tmp_path / "undisturbed"
    assert attempt(data, undisturbed) is None
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    usual = used.ru_utime + used.ru_stime

    moments = random.Random(SEED)
    kills, runs = collections.Counter(), 0
    while kills.total() < KILLS:
        run = tmp_path / f"run-{runs}"
        while when := attempt(
            data, run, moments.uniform(0.5, usual) if kills.total() < KILLS else math.inf
        ):
            kills[when] += 1
            print(f"kill {kills.total()} of {KILLS}: {when}", flush=True)
        runs += 1
        assert outcome(run) == outcome(undisturbed)
        assert names(run) == names(undisturbed), "something was left behind"
    print(
        f"a run takes {usual:.0f} CPU seconds; {runs} runs, {KILLS} kills: "
        f"{', '.join(f'{n} {when}' for when, n in kills.items())}"
    )


def attempt(data: Path, run: Path, kill_after: float = math.inf) -> str | None:
    """Start or continue `run`. None if it ended well; if it was killed, after so many CPU seconds,
    when that was."""
    sizes = (
        "--max-length 32 --batch-size 4 --save-steps 4 --logging-steps 1 --eval-steps 30 "
        "--eval-batches 2"
    )
    command = [
        sys.executable,
        "-m",
        "swiftkv_jax.train",
        *sizes.split(),
        "--max-steps",
        str(STEPS),
        "--output-dir",
        str(run),
    ]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    log = run.with_suffix(".log")
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*command, "--data", str(data), "--eval-data", str(data)],
            env=environment,
            stderr=stderr,
        )
        try:
            while process.poll() is None:
                if cpu_seconds(process.pid) > kill_after:
                    return phase(run, log.read_text())
                time.sleep(0.005)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 0, log.read_text()
    return None


def cpu_seconds(process: int) -> float:
    """CPU time of all its threads, from /proc: utime and stime."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def phase(run: Path, log: str) -> str:
    """What an attempt is doing, by its log."""
    if f"step {STEPS}/" in log or f"after step {STEPS} of" in log:
        return "at the end, with its last save or the export"
    if not any(name.name.isdecimal() for name in (run / "checkpoints").glob("*")):
        return "before the first checkpoint"
    if "  loss " in log:
        return "in a save between steps" if any(run.glob("checkpoints/*-tmp")) else "between saves"
    return "while starting again or compiling"


def outcome(run: Path) -> tuple[bytes, list[dict]]:
    """The exported weights, and all numbers recorded that are not speeds."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    speeds = {"tokens_per_second", "useful_tokens_per_second", "mfu", "seconds"}
    return (run / "model" / "model.safetensors").read_bytes(), [
        {k: v for k, v in row.items() if k not in speeds} for row in rows
    ]


def names(run: Path) -> list[str]:
    """Files and folders at the top of a run and in each of its folders."""
    return sorted(str(path.relative_to(run)) for path in [*run.glob("*"), *run.glob("*/*")])
