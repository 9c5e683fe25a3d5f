"""The committed results: the newest file of each subject, and the page that lists them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .markdown import table

RESULTS = Path(__file__).parent / "results"
RESULT_NAMES = {
    "prefill": "infer-prefill-cpu",
    "prefill lengths": "infer-prefill-lengths-cpu",
    "decode": "infer-decode-cpu",
    "decode rows": "infer-decode-rows-cpu",
    "transformers": "hf-baseline-cpu",
    "servers": "hf-serve-cpu",
    "HTTP": "http-timed-device-cpu",
    "HTTP, a model": "http-medium-cpu",
    "8 bits": "kv-quantization-cpu",
    "closed form": "closed-form-cpu",
    "closed form, t1": "closed-form-t1-cpu",
    "closed form, t2": "closed-form-t2-cpu",
    "hidden loss": "hidden-loss-cpu",
    "loss": "loss-compiled-for-h200",
    "train step": "train-step-compiled-for-h200",
    "kv projection": "kv-projection-compiled-for-h200",
    "predictions": "predicted-for-h200",
}
"""Subject -> what the names of its result files begin with; they end in the time."""
ALL_RESULT_NAMES = {
    f"{name}, H100": f"{name}-nvidia-h100-80gb-hbm3"
    for name in ("check-kernels", "kernels", "serve", "train-step", "calibration")
}
"""The same, of subjects of which all files count: each has some of the rows."""
OPTIONAL = {"hidden loss"}
"""Subjects that may have no result file yet; their sections are left out then."""
QUALITY = "quality-*.json"
REAL = "real-*.json"
"""All files of both count: each has some of the students."""


def newest_path(subject: str) -> Path:
    """The newest result file of a subject. Raises `FileNotFoundError`."""
    name = f"{RESULT_NAMES[subject]}-2*.json"
    if not (found := sorted(RESULTS.glob(name))):
        raise FileNotFoundError(f"{RESULTS} has no {name}")
    return found[-1]


def is_measured(subject: str) -> bool:
    """Whether there is a result file of an optional subject; the others must have one."""
    if subject not in OPTIONAL:
        return True
    return any(RESULTS.glob(f"{RESULT_NAMES[subject]}-2*.json"))


def newest(subject: str) -> dict[str, Any]:
    return json.loads(newest_path(subject).read_text(encoding="utf-8"))


def all_paths(subject: str) -> list[Path]:
    """The result files of a subject of `ALL_RESULT_NAMES`, oldest first."""
    return sorted(RESULTS.glob(f"{ALL_RESULT_NAMES[subject]}-2*.json"))


def all_of(subject: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in all_paths(subject)]


def quality_documents() -> list[dict[str, Any]]:
    """The results of `benchmarks.quality`."""
    return _read_all(QUALITY)


def real_documents() -> list[dict[str, Any]]:
    """The results of `benchmarks.real` and `benchmarks.distill_real`, oldest first."""
    return sorted(_read_all(REAL), key=lambda document: document["date"])


def _read_all(pattern: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob(pattern))]


def files_page() -> str:
    rows = []
    paths = [(subject, newest_path(subject)) for subject in RESULT_NAMES if is_measured(subject)]
    paths += [(subject, path) for subject in ALL_RESULT_NAMES for path in all_paths(subject)]
    for subject, pattern in (("quality", QUALITY), ("real models", REAL)):
        paths += [(subject, path) for path in sorted(RESULTS.glob(pattern))]
    for subject, path in paths:
        result = json.loads(path.read_text(encoding="utf-8"))
        where = result["device"]["kind"]
        for verb in ("compiled", "predicted"):
            if (machine := result.get(f"{verb}_for", "this device")) != "this device":
                where = f"{verb} for {machine}"
        versions = result["versions"]
        link = f"[{path.name}](../../benchmarks/results/{path.name})"
        rows.append(
            (
                subject,
                link,
                where,
                f"Python {versions['python']}, JAX {versions['jax']}",
                result["date"][:10],
            )
        )
    return "\n\n".join(
        [
            "# Result files",
            "The pages of measurements are made from these results. Each file holds its command, "
            "versions and, if it ran in a checkout, commit. Older files call modules by the names "
            "that they had then.",
            table(("subject", "file", "device", "versions", "date"), rows),
        ]
    )
