"""What is written down with every measurement, and how: JSON that appears complete or not at all."""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from swiftkv_jax.errors import UsageError

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
_PACKAGES = "jax jaxlib jax-cuda13-plugin jax-cuda12-plugin libtpu nvidia-cudnn-cu13 nvidia-cudnn-cu12 torch triton".split()


def add_flags(parser: argparse.ArgumentParser, *, tables: tuple[str, ...], seconds: float, rows: bool = True) -> None:
    """The flags that every benchmark has; `rows` for one whose rows have names."""
    flag = parser.add_argument
    flag("--shapes", choices=tables, default="full", help="smoke: tiny ones, to see that everything runs, on a CPU too (default: full)")
    if rows:
        flag("--only", metavar="PATTERN", help="only rows whose name has a match of this regular expression")
    flag("--seconds", type=_seconds, default=seconds, metavar="S", help=f"start nothing new after S seconds (default: {seconds:g})")
    flag("--seed", type=int, help="of the random inputs (default: a fresh one)")
    flag("--output", type=Path, metavar="FILE", help="JSON file (default: a new one in benchmarks/results; none with smoke)")


def _seconds(text: str) -> float:
    """A flag's value. Raises what argparse reports."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive, finite number of seconds, got {text!r}")
    return seconds


def new_seed(seed: int | None) -> int:
    return int.from_bytes(os.urandom(4), "little") >> 1 if seed is None else seed


def environment(seed: int) -> dict[str, Any]:
    """When, where and with what."""
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", _module(), *sys.argv[1:]]),
        "seed": seed,
        "device": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": jax.device_count(),
            "runtime": " ".join(device.client.platform_version.split()),
            "driver": _driver(),
        },
        "versions": {"python": sys.version.split()[0]} | {name: version for name in _PACKAGES if (version := _version(name))},
        "commit": _commit(),
        "sources_sha256": _sources(),
    }


def _module() -> str:
    """The command's module, as `python -m` was given it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec else Path(sys.argv[0]).name


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """NVIDIA's driver, if there is one."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split("\n")[0].strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def _commit() -> str | None:
    """The commit that is checked out, read without git: a copied checkout belongs to another user, which git refuses."""
    git = ROOT / ".git"
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        if (git / name).exists():
            return (git / name).read_text().strip()
        packed = [line.split() for line in (git / "packed-refs").read_text().splitlines()]
        return next((line[0] for line in packed if line[1:] == [name]), None)
    except OSError:
        return None


def _sources() -> str:
    """Of the package's Python and JSON files: tells uncommitted versions apart."""
    digest = hashlib.sha256()
    for path in sorted(path for ending in ("py", "json") for path in (ROOT / "swiftkv_jax").rglob(f"*.{ending}")):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def output_path(args: argparse.Namespace, name: str, kind: str, date: str) -> Path | None:
    """Where the JSON goes; None for a smoke run that was not told, whose times mean nothing. Raises `UsageError`."""
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
    """Before an hour of measuring rather than after it. Raises `UsageError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output {path}: its directory cannot be made ({error.strerror})") from error
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"--output {path}: cannot be written")


def write_text(path: Path, text: str) -> None:
    """Replace `path` in one step."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with open(partial, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path | None, document: dict[str, Any]) -> None:
    if path is not None:
        write_text(path, json.dumps(document, indent=1) + "\n")


def reason(error: BaseException) -> str:
    """One line, not too long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def duration(seconds: float) -> str:
    """`"123.4 us"`."""
    scale, unit = next(((s, u) for s, u in ((1, "s"), (1e-3, "ms")) if seconds >= s), (1e-6, "us"))
    return f"{seconds / scale:.4g} {unit}"
