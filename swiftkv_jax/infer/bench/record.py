"""Where and with what something was measured, and a JSON file that appears complete or not at all."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import jax

from ...errors import UsageError

PACKAGES = ("swiftkv-jax", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu", "flax", "numpy")


def environment() -> dict[str, Any]:
    """When, where and with what. `load` is the machine's load average: of a busy machine only ratios mean anything."""
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "swiftkv_jax.infer", *sys.argv[1:]]),
        "device": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": jax.device_count(),
            "processes": jax.process_count(),
            "runtime": " ".join(device.client.platform_version.split()),
        },
        "host": {"cores": os.cpu_count(), "load": os.getloadavg()},
        "versions": {"python": sys.version.split()[0]} | {name: version for name in PACKAGES if (version := _version(name))},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_free(flag: str, path: Path | None) -> None:
    """Before an hour of measuring rather than after it. Raises `UsageError`."""
    if path is None:
        return
    if path.exists():
        raise UsageError(f"{flag} {path}: exists already; nothing is overwritten, so remove it or choose another path")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{flag} {path}: its folder does not exist")


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Appears at `path` when it is complete."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    partial.rename(path)
