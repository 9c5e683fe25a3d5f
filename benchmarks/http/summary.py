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
        f"The last row is the model of `benchmarks/medium`, computed on both cores, with prompts "
        f"of {model['input_len']} tokens and answers of {model['output_len']} (`--medium`)."
        for model in models
    ]
    return section(
        "What HTTP costs",
        f"The same requests are sent to the engine alone and through the server in turn; medians "
        f"of {timed['repetitions']}; `python -m benchmarks.http`. A simulated device computes "
        f"nothing and takes {1e3 * timed['step_seconds']:g} ms for a decode step and "
        f"{1e3 * timed['chunk_seconds']:g} ms for a chunk of 2,048 tokens, which is roughly what "
        f"an H200 may take for Llama-3.1-8B. Prompts have {timed['input_len']} tokens, answers "
        f"{timed['output_len']}. There are one and a half clients for each slot, with "
        f"{timed['requests']} requests each. They run in another process on the same two cores and "
        f"use {min(shares):.0%} to {max(shares):.0%} of one.",
        *of_models,
        "`bare` is the engine alone. The last three columns are what HTTP adds to the time to the "
        "first token (TTFT): for requests that are alone, and when requests arrive at half of the "
        "bare throughput.",
        summary([cell for document in (timed, *models) for cell in document["cells"]]),
    )
