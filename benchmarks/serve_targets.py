"""What a release requires of serving Llama-3.1-8B with SwiftKV on one H100 or H200, in figures of
`benchmarks.serve`.

How much faster than its teacher a student can be is bounded by the ratio of their operations, so
that target is a share of this ratio. The first H100 reached 0.93 of it at 2k and 0.99 at 8k.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Target(NamedTuple):
    """The least of a figure in one cell of a part, or the most of a time."""

    part: str
    input_len: int
    prompts: int
    figure: str
    bound: float


_EACH = (
    Target("prefill-lengths", 8192, 1, "share of a large product's rate", 0.55),
    Target("prefill-lengths", 2048, 1, "speed-up over that of operations", 0.95),
    Target("prefill-lengths", 8192, 1, "speed-up over that of operations", 0.95),
    Target("prefill", 32768, 1, "speed-up over that of operations", 0.95),
    Target("prefill-lengths", 500, 1, "TTFT in ms", 17),
    Target("prefill-lengths", 1024, 1, "TTFT in ms", 24),
    Target("prefill-lengths", 2048, 1, "TTFT in ms", 33),
    Target("prefill-lengths", 8192, 1, "TTFT in ms", 165),
    Target("prefill", 32768, 1, "TTFT in ms", 900),
    Target("decode", 1024, 1, "share of bandwidth", 0.65),
    Target("decode", 1024, 64, "TPOT over the teacher's", 1.02),
)
TARGETS = {
    "H100": (
        *_EACH,
        Target("decode", 1024, 256, "tokens/s", 12_000),
        Target("offline", 2000, 512, "tokens/s", 34_000),
        Target("offline-2k", 2048, 512, "tokens/s", 46_500),
        Target("offline-2k-fp8", 2048, 512, "tokens/s", 50_000),
        Target("prefill-w8a8", 2048, 1, "tokens/s", 92_000),
        Target("prefill-w8a8", 8192, 1, "tokens/s", 92_000),
        Target("prefill-w8a8", 32768, 1, "tokens/s", 61_000),
        Target("offline-2000-256-w8a8", 2000, 1024, "tokens/s", 55_000),
        Target("offline-2k-128-w8a8", 2048, 1500, "tokens/s", 58_700),
        Target("offline-1k-1k-w8a8", 1000, 768, "tokens/s", 29_000),
        Target("offline-5k-500-w8a8", 5000, 384, "tokens/s", 38_000),
    ),
    "H200": (
        *_EACH,
        Target("decode-2k", 2048, 64, "tokens/s", 5_100),
        Target("decode", 1024, 256, "tokens/s", 12_000),
        Target("offline", 2000, 512, "tokens/s", 34_000),
        Target("offline-2k", 2048, 512, "tokens/s", 45_000),
    ),
}
"""Name of a device, in its kind -> its targets."""
_FIGURES: dict[str, tuple[Callable[[Mapping[str, Any]], float], str, str]] = {
    "share of a large product's rate": (lambda row: row["flops_share"], ".0%", "≥"),
    "speed-up over that of operations": (
        lambda row: row["speed_up"] / row["teacher_flops_over_own"],
        ".3f",
        "≥",
    ),
    "TTFT in ms": (lambda row: 1e3 * row["ttft"], ".0f", "≤"),
    "share of bandwidth": (lambda row: row["bandwidth_share"], ".0%", "≥"),
    "tokens/s": (lambda row: row["tokens_per_s"], ",.0f", "≥"),
    "TPOT over the teacher's": (lambda row: 1 / row["speed_up"], ".3f", "≤"),
}
"""Figure -> (its value in a row, its format, on which side of a target it must be)."""


class Judged(NamedTuple):
    """A target, what was measured, and whether that meets it."""

    name: str
    required: str
    measured: str
    met: bool


def judge(parts: Mapping[str, Any], device: str) -> list[Judged]:
    """The targets of a device of this kind whose cell is among the `parts` of a document of
    `benchmarks.serve`."""
    judged = []
    for target in (target for name in TARGETS if name in device for target in TARGETS[name]):
        value_of, text, sign = _FIGURES[target.figure]
        for row in parts.get(target.part, {"rows": ()})["rows"]:
            cell = row["cell"]["input_len"], row["cell"]["prompts"]
            if row["variant"] == "swiftkv" and cell == (target.input_len, target.prompts):
                name = f"{target.part}, {row['label']}: {target.figure}"
                value = value_of(row)
                met = value >= target.bound if sign == "≥" else value <= target.bound
                required = f"{sign} {target.bound:{text}}"
                judged.append(Judged(name, required, f"{value:{text}}", met))
    return judged
