"""The results of `python -m benchmarks.http` in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..markdown import section, table

HEADER = (
    "slots, steps a call, bare tokens/s, over HTTP, share, device idle bare, over HTTP, "
    "TTFT alone p50, at half load p50, p99"
).split(", ")
ADDED = ("added_ttft_alone_p50", "added_ttft_half_p50", "added_ttft_half_p99")


def summary(cells: Sequence[dict[str, Any]]) -> str:
    """A row for each cell."""
    return table(HEADER, [_row(cell) for cell in cells])


def _row(cell: dict[str, Any]) -> list[str]:
    kinds = cell["bare"], cell["served"]
    return [
        str(cell["rows"]),
        str(cell["steps"]),
        *(f"{kind['tokens_per_s']:,.0f}" for kind in kinds),
        f"{cell['share']:.1%}",
        *(f"{kind['idle_share']:.1%}" if "idle_share" in kind else "" for kind in kinds),
        *(f"{1e3 * cell[name]:+.2f} ms" if name in cell else "" for name in ADDED),
    ]


def cost_of_http(timed: dict[str, Any], *models: dict[str, Any]) -> str:
    """The section of the page of measurements: of the timed device, and of real models."""
    shares = [cell["served"]["client_cpu_share"] for cell in timed["cells"]]
    of_models = [
        f"The last row is the model of `benchmarks/medium` on both cores, {model['input_len']} and "
        f"{model['output_len']} tokens; `--medium`."
        for model in models
    ]
    return section(
        "What HTTP costs",
        f"The same requests through the engine alone and through the server, by turns, medians of "
        f"{timed['repetitions']}; `python -m benchmarks.http`. The device only keeps time: "
        f"{1e3 * timed['step_seconds']:g} ms for a decode step, "
        f"{1e3 * timed['chunk_seconds']:g} ms for a chunk of 2,048 tokens, as an H200 with "
        f"Llama-3.1-8B may take. Prompts have {timed['input_len']} tokens, answers "
        f"{timed['output_len']}. There are one and a half clients for each slot, with "
        f"{timed['requests']} requests each, in a process of their own on the same two cores "
        f"({min(shares):.0%} to {max(shares):.0%} of one).",
        *of_models,
        "The last columns are what HTTP adds to the time to the first token: for requests that "
        "find nothing running, and with arrivals at half of the bare throughput.",
        summary([cell for document in (timed, *models) for cell in document["cells"]]),
    )
