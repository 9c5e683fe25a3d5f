"""What serving Llama-3.1-8B with SwiftKV is to reach on one H100 or H200, in figures of
`benchmarks.serve`.

How much faster than its teacher a student can be is bounded by the ratio of their operations, so
that target is a share of this ratio. The first H100 reached 0.93 of it at 2k and 0.99 at 8k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple


class Target(NamedTuple):
    """The values of a figure for a release and for the best, in one cell of a part."""

    part: str
    input_len: int
    prompts: int
    figure: str
    release: float | None
    """None, as `best`, where another format of the cache has the target."""
    best: float | None


_EACH = (
    Target("prefill-lengths", 8192, 1, "share of a large product's rate", 0.55, 0.75),
    Target("prefill-lengths", 2048, 1, "speed-up over that of operations", 0.95, 0.98),
    Target("prefill-lengths", 8192, 1, "speed-up over that of operations", 0.95, 0.98),
    Target("prefill", 32768, 1, "speed-up over that of operations", 0.95, 0.98),
    Target("prefill-lengths", 500, 1, "TTFT in ms", 17, 14),
    Target("prefill-lengths", 1024, 1, "TTFT in ms", 24, 20),
    Target("prefill-lengths", 2048, 1, "TTFT in ms", 33, 28),
    Target("prefill-lengths", 8192, 1, "TTFT in ms", 165, 120),
    Target("prefill", 32768, 1, "TTFT in ms", 900, 660),
    Target("decode", 1024, 1, "share of bandwidth", 0.65, 0.82),
    Target("decode", 1024, 64, "TPOT over the teacher's", 1.02, 1.0),
)
TARGETS = {
    "H100": (
        *_EACH,
        Target("decode", 1024, 256, "tokens/s", 12_000, 13_500),
        Target("offline", 2000, 512, "tokens/s", 34_000, 35_200),
        Target("offline-2k", 2048, 512, "tokens/s", 46_500, 48_000),
        Target("offline-2k-fp8", 2048, 512, "tokens/s", 50_000, 54_000),
        Target("prefill-w8a8", 2048, 1, "tokens/s", 92_000, 103_000),
        Target("prefill-w8a8", 8192, 1, "tokens/s", 92_000, 103_000),
        Target("prefill-w8a8", 32768, 1, "tokens/s", 61_000, 66_000),
        Target("offline-2000-256-w8a8", 2000, 1024, "tokens/s", 55_000, 59_000),
        Target("offline-2k-128-w8a8", 2048, 1500, "tokens/s", 58_700, 76_000),
        Target("offline-1k-1k-w8a8", 1000, 768, "tokens/s", 29_000, 30_400),
        Target("offline-5k-500-w8a8", 5000, 384, "tokens/s", 38_000, 40_000),
    ),
    "H200": (
        *_EACH,
        Target("decode-2k", 2048, 64, "tokens/s", 5_100, 6_800),
        Target("decode", 1024, 256, "tokens/s", 12_000, 16_000),
        Target("offline", 2000, 512, "tokens/s", 34_000, None),
        Target("offline-fp8", 2000, 512, "tokens/s", None, 56_000),
        Target("offline-2k", 2048, 512, "tokens/s", 45_000, None),
        Target("offline-2k-fp8", 2048, 512, "tokens/s", None, 62_000),
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


def judge(parts: Mapping[str, Any], device: str) -> list[tuple[str, str, str, str]]:
    """(name, release, best, figure) of each target of a device of this kind whose cell is among the
    `parts` of a document of `benchmarks.serve`."""
    judged = []
    for name, target, value in _found(parts, device):
        _, text, sign = _FIGURES[target.figure]
        limits = (
            "" if limit is None else f"{sign} {limit:{text}}"
            for limit in (target.release, target.best)
        )
        judged.append((name, *limits, f"{value:{text}}"))
    return judged


def missed(parts: Mapping[str, Any], device: str) -> list[str]:
    """The names of the targets whose value for a release is missed."""
    names = []
    for name, target, value in _found(parts, device):
        if target.release is not None:
            at_least = _FIGURES[target.figure][2] == "≥"
            if value < target.release if at_least else value > target.release:
                names.append(name)
    return names


def _found(parts: Mapping[str, Any], device: str) -> Iterator[tuple[str, Target, float]]:
    """(name, target, figure) of each target whose cell is among the `parts`."""
    targets = [target for name in TARGETS if name in device for target in TARGETS[name]]
    for target in targets:
        for row in parts.get(target.part, {"rows": ()})["rows"]:
            cell = row["cell"]["input_len"], row["cell"]["prompts"]
            if row["variant"] == "swiftkv" and cell == (target.input_len, target.prompts):
                name = f"{target.part}, {row['label']}: {target.figure}"
                yield name, target, _FIGURES[target.figure][0](row)
