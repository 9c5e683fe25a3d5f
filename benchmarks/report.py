"""Flags, roofline and result files of the benchmarks. Every measurement is written with when, where
and with what it was made, and appears complete or not at all."""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from swiftkv_jax.errors import UsageError
from swiftkv_jax.plan.roofline import LONG, Roofline, measure_roofline
from swiftkv_jax.process import files
from swiftkv_jax.process import provenance as measured

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"


def add_flags(
    parser: argparse.ArgumentParser, *, tables: tuple[str, ...], seconds: float, rows: bool = True
) -> None:
    """Add the flags that every benchmark has; `rows` for one whose rows have names."""
    flag = parser.add_argument
    flag(
        "--shapes",
        choices=tables,
        default="full",
        help="smoke: tiny ones, to see that everything runs, on a CPU too (default: full)",
    )
    if rows:
        flag(
            "--only",
            metavar="PATTERN",
            help="only rows whose name has a match of this regular expression",
        )
    flag(
        "--seconds",
        type=_seconds,
        default=seconds,
        metavar="S",
        help=f"start nothing new after S seconds (default: {seconds:g})",
    )
    flag("--seed", type=int, help="of the random inputs (default: a fresh one)")
    flag(
        "--output",
        type=Path,
        metavar="FILE",
        help="JSON file (default: a new one in benchmarks/results; none with smoke)",
    )


def select(names: Sequence[str], pattern: str | None, what: str) -> list[str]:
    """The names with a match of --only; all without it. Raises `UsageError` for none."""
    try:
        chosen = [name for name in names if re.search(pattern or "", name)]
    except re.error as error:
        raise UsageError(f"--only {pattern!r}: not a regular expression ({error})") from error
    if not chosen:
        raise UsageError(f"--only {pattern!r}: no such {what}; {what}s: {'; '.join(names)}")
    return chosen


def _seconds(text: str) -> float:
    """A flag's value. Raises what argparse reports."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(
            f"must be a positive, finite number of seconds, got {text!r}"
        )
    return seconds


def new_seed(seed: int | None) -> int:
    return int.from_bytes(os.urandom(4), "little") >> 1 if seed is None else seed


def roofline(shapes: str) -> Roofline:
    """The roofline of one device for bfloat16 products; with smoke shapes only of small ones."""
    return measure_roofline(jnp.bfloat16, 1, long=0.0 if shapes == "smoke" else LONG)


def add_roofline(document: dict[str, Any], measured: Roofline) -> None:
    """Note and print the roofline that a run's figures stand beside."""
    document["roofline"] = measured.to_json()
    print(f"roofline: {measured}", flush=True)


def begin(
    args: argparse.Namespace, benchmark: str, seed: int, facts: dict[str, Any] | None = None
) -> tuple[dict[str, Any], Path | None]:
    """The document of a run, and the file it goes to as `output_path` chooses it. `facts` are those
    of `environment`, of a process that may start JAX's backend where this one must not."""
    document = {
        "benchmark": benchmark,
        **(facts or environment(seed)),
        "command": measured.command(),
    }
    name = benchmark.replace("_", "-")
    return document, output_path(args, name, document["device"]["kind"], document["date"])


def environment(seed: int) -> dict[str, Any]:
    """Date, command, machine, versions and sources of a measurement."""
    return measured.provenance() | {"seed": seed, "sources_sha256": _sources()}


def _sources() -> str:
    """Digest of the package's Python and JSON files: tells uncommitted versions apart."""
    digest = hashlib.sha256()
    for path in sorted(
        path for ending in ("py", "json") for path in (ROOT / "swiftkv_jax").rglob(f"*.{ending}")
    ):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def output_path(args: argparse.Namespace, name: str, kind: str, date: str) -> Path | None:
    """The file for the JSON: `--output`, or `default_path`; None for a smoke run without
    `--output`, whose times mean nothing. Raises `UsageError` if it cannot be written."""
    if args.output is None and args.shapes == "smoke":
        return None
    path = args.output or default_path(name, kind, date)
    check_writable(path)
    return path


def default_path(name: str, kind: str, date: str) -> Path:
    """`results/kernels-nvidia-h200-20261121-093000.json`."""
    stamp = date[:19].replace("-", "").replace(":", "").replace("T", "-")
    return RESULTS / f"{name}-{kind.lower().replace(' ', '-').replace('/', '-')}-{stamp}.json"


def check_writable(path: Path) -> None:
    """Raise `UsageError` if `path` cannot be written: before an hour of measuring, not after it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--output {path}: its directory cannot be made ({error.strerror})"
        ) from error
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"--output {path}: cannot be written")


def write_json(path: Path | None, document: dict[str, Any]) -> None:
    """Write `document`, unless `path` is None."""
    if path is not None:
        files.write_json(path, document)


def reason(error: BaseException) -> str:
    """Class and first line of an error, 300 characters at most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def duration(seconds: float) -> str:
    """`"123.4 us"`."""
    scale, unit = next(((s, u) for s, u in ((1, "s"), (1e-3, "ms")) if seconds >= s), (1e-6, "us"))
    return f"{seconds / scale:.4g} {unit}"
