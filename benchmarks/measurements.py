"""Keep `docs/measurements.md` up to date with the committed results.

    python -m benchmarks.measurements             write the sections of results
    python -m benchmarks.measurements --check     exit 1 if one is out of date

These are the sections of benchmarks that are run again. The others are text: their figures come
from files in `benchmarks/results/` that no command of the tree writes any more, from tests, or from
what a command printed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from .markdown import section, table, write
from .on_gpu import on_h100
from .real import table as real
from .result_files import newest, real_documents

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "measurements.md"
COMMAND = "python -m benchmarks.measurements"


def real_models() -> str:
    return real.section(real_documents())


def one_client() -> str:
    found = newest("beside-transformers-cpu")
    floors = found["floors"]
    same = "the same text" if found["same_text"] else "ANOTHER TEXT"
    return section(
        "One client of each server",
        f"`python -m benchmarks.beside_transformers --clients 1` ({found['date'][:10]}): one "
        f"client of each server in turn on {found['cores']} cores, the best of "
        f"{len(found['speed'][0]['rounds'])} rounds, answers of 64 and of 32 tokens. The teacher "
        f"and transformers write {same}. A floor is what the machine allowed at the rates measured "
        f"before the rounds: {floors['flops_per_s'] / 1e9:.0f} GFLOP/s of float32 products for "
        f"the prompt, {floors['bytes_per_s'] / 1e9:.1f} GB/s of reading memory for each pass over "
        "the weights; rates vary, so a time may be below it.",
        table(
            ("server", "512 in: first token", "further", "2,048 in: first token", "further"),
            _streams(found),
        ),
    )


def _streams(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Times of one client's tokens by each server, and the floors of the two of this package."""
    found = dict[str, list[str]]()
    for row in result["speed"]:
        if row["clients"] == 1:
            ttft, tpot = (
                min(one[name]["p50"] for one in row["rounds"]) for name in ("ttft", "tpot")
            )
            found.setdefault(row["server"], []).extend(_stream(ttft, tpot))
    for name in ("teacher", "swiftkv"):
        floor = result["floors"][name]
        times = (_stream(ttft, floor["tpot"]) for ttft in floor["ttft"].values())
        found[f"{name}, floor"] = [one for pair in times for one in pair]
    return [(name, *figures) for name, figures in found.items()]


def _stream(ttft: float, tpot: float) -> tuple[str, str]:
    return f"{ttft:.2f} s", f"{1e3 * tpot:.1f} ms"


def page() -> str:
    """The page with its sections of results made anew. Raises `ValueError` where it lacks one."""
    text = PAGE.read_text(encoding="utf-8")
    for make in (on_h100, one_client, real_models):
        made = make()
        title = re.escape(made.splitlines()[0])
        before = re.search(rf"^{title}\n.*?(?=\n## |\Z)", text, re.MULTILINE | re.DOTALL)
        if before is None:
            raise ValueError(f"{PAGE} lacks the section {made.splitlines()[0]!r}")
        text = f"{text[: before.start()]}{made}\n{text[before.end() :]}"
    return text


def main(argv: list[str] | None = None) -> int:
    return write(PAGE, page, COMMAND, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
