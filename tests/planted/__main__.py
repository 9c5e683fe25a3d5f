"""Plant bugs one by one in a copy of the working tree, and say which ones the tests miss.

python -m tests.planted                all of them, a quarter of an hour on two cores
python -m tests.planted window page    those whose name or file has one of these words
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from .bugs import ROOT, Bug, read_bugs

SECONDS = 600
"""Longest time of a test; a bug that makes it wait for ever is not found."""


def main() -> int:
    """Returns 1 if a bug was not found."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.planted",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="WORD")
    words = parser.parse_args().words
    bugs = [
        bug
        for bug in read_bugs()
        if not words or any(word in f"{bug.name} {bug.file}" for word in words)
    ]
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_tree(tree)
        for number, bug in enumerate(bugs, 1):
            started = time.perf_counter()
            found = is_found(bug, tree)
            if not found:
                missed.append(bug)
            verdict = "found" if found else "MISSED"
            seconds = time.perf_counter() - started
            print(f"{number}/{len(bugs)} {verdict} in {seconds:.0f} s: {bug.name}", flush=True)
    print(f"{len(bugs) - len(missed)} of {len(bugs)} planted bugs were found")
    return bool(missed)


def copy_tree(target: Path) -> None:
    """Copy the files that git knows or does not ignore."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (source := ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)


def is_found(bug: Bug, tree: Path) -> bool:
    """True if the bug's test fails in a copy that has the bug."""
    path = tree / bug.file
    text = path.read_text(encoding="utf-8")
    path.write_text(bug.planted_in(text), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", bug.test]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return False
    finally:
        path.write_text(text, encoding="utf-8")
    if done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
        print(f"{bug.test} does not run in make test")
    elif done.returncode not in (0, 1):
        raise RuntimeError(f"{bug.name}: {bug.test} did not run: {done.stdout.decode()[-2000:]}")
    return done.returncode == 1


if __name__ == "__main__":
    sys.exit(main())
