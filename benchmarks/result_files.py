"""The committed results: the newest file of a name, or all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
ON_H100 = "nvidia-h100-80gb-hbm3"
"""How the names of files with results of an H100 go on after the benchmark's name."""


def newest(name: str) -> dict[str, Any]:
    """The newest of the files `NAME-TIME.json`. Raises `IndexError` where there is none."""
    return all_of(name)[-1]


def all_of(name: str) -> list[dict[str, Any]]:
    """Every file `NAME-TIME.json`, oldest first: each has some of the rows."""
    return [_read(path) for path in sorted(RESULTS.glob(f"{name}-2*.json"))]


def real_documents() -> list[dict[str, Any]]:
    """The results of `benchmarks.real` and `benchmarks.distill_real`, oldest first."""
    documents = [_read(path) for path in RESULTS.glob("real-*.json")]
    return sorted(documents, key=lambda document: document["date"])


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
