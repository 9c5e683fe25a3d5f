"""Where and with what something was measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).parent.parent
PACKAGES = (
    *("swiftkv-jax", "jax", "jaxlib", "flax", "numpy", "libtpu", "torch", "triton"),
    *("jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
)


def environment() -> dict[str, Any]:
    """When, where and with what. `load` is the machine's load average: of a busy machine only
    ratios mean anything."""
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", _module(), *sys.argv[1:]]),
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


def _module() -> str:
    """The command's module, as `python -m` was given it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name.removesuffix(".__main__") if spec else Path(sys.argv[0]).name


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """NVIDIA's driver, if there is one."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return (
            subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
            .stdout.split("\n")[0]
            .strip()
            or None
        )
    except (OSError, subprocess.SubprocessError):
        return None


def _commit() -> str | None:
    """The commit that is checked out, if this is a checkout. Read without git: a copied one belongs
    to another user, which git refuses."""
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
