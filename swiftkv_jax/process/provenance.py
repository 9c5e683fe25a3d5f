"""Provenance of a measurement: when, where and with which versions it was made."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).parents[2]
"""The checkout, if this is one."""
PACKAGES = (
    *("swiftkv-jax", "jax", "jaxlib", "flax", "numpy", "libtpu", "torch", "triton"),
    *("jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
)


def provenance() -> dict[str, Any]:
    """Date, command, device, host, versions and commit, as JSON holds them. Starts JAX's backend.

    `host.load` is the load average of the last 1, 5 and 15 minutes: on a busy machine only ratios
    of times mean anything.
    """
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command(),
        "device": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": jax.device_count(),
            "processes": jax.process_count(),
            "runtime": " ".join(device.client.platform_version.split()),
            "driver": _driver(),
        },
        "host": {"cores": os.cpu_count(), "load": os.getloadavg()},
        "versions": {"python": sys.version.split()[0]}
        | {name: version for name in PACKAGES if (version := _version(name))},
        "commit": _commit(),
    }


def command(*, secret: str | None = None) -> str:
    """The command of this process, as a shell takes it, with *** for each value of the flag
    `secret`."""
    words = sys.argv[1:]
    for number, word in enumerate(words):
        name, equals, _ = word.partition("=")
        # argparse takes the beginning of a flag for it
        if secret is None or len(name) < 3 or not secret.startswith(name.replace("_", "-")):
            continue
        if equals:
            words[number] = f"{name}=***"
        else:
            words[number + 1 : number + 2] = ["***"]
    return shlex.join([*_program(), *words])


def _program() -> list[str]:
    """Return the program that was called: a module by `python -m`, a file by `python`, or an
    installed script."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        return ["python", "-m", spec.name.removesuffix(".__main__")]
    script = Path(sys.argv[0])
    return ["python", str(script)] if script.suffix == ".py" else [script.name]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _driver() -> str | None:
    """Version of NVIDIA's driver, if there is one."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        run = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.partition("\n")[0].strip() or None


def _commit(root: Path = ROOT) -> str | None:
    """The commit that is checked out in `root`, if that is a checkout. Read without git, which
    refuses a checkout that belongs to another user, as copied ones do."""
    git = root / ".git"
    try:
        if git.is_file():  # of a worktree: "gitdir: PATH"
            git = root / git.read_text().removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        if (git / "commondir").exists():
            git = git / (git / "commondir").read_text().strip()
        if (git / name).exists():
            return (git / name).read_text().strip()
        packed = [line.split() for line in (git / "packed-refs").read_text().splitlines()]
        return next((line[0] for line in packed if line[1:] == [name]), None)
    except OSError:
        return None
