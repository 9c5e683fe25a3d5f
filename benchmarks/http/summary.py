"""The results of `python -m benchmarks.http` in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..markdown import section, table
from .bars import SHIPPED_STEPS, table_of_bars
from .spread import added, share

HEADER = (
    "slots, steps a call, prompts, bare tokens/s, over HTTP, share, device idle bare, over HTTP, "
    "loop a chunk, TTFT alone p50, the client's part, at half load p50, p99"
).split(", ")


def summary(cells: Sequence[dict[str, Any]]) -> str:
    """A row for each cell."""
    return table(HEADER, [_row(cell) for cell in cells])


def _row(cell: dict[str, Any]) -> list[str]:
    kinds, served = (cell["bare"], cell["served"]), cell["served"]
    loop, client = served.get("loop_seconds_per_chunk"), served.get("ttft_client")
    return [
        str(cell["rows"]),
        str(cell["steps"]),
        cell.get("prompts", "token ids"),
        *(f"{kind['tokens_per_s']:,.0f}" for kind in kinds),
        ("at least " if cell.get("client_is_the_limit") else "") + f"{share(cell).median:.1f}%",
        *(f"{kind['idle_share']:.1%}" if "idle_share" in kind else "" for kind in kinds),
        "" if loop is None else f"{1e6 * loop:.0f} us",
        _added(cell, "ttft_alone_p50"),
        "" if client is None else f"{1e3 * client:.2f} ms",
        _added(cell, "ttft_half_p50"),
        _added(cell, "ttft_half_p99"),
    ]


def _added(cell: dict[str, Any], name: str) -> str:
    """What HTTP adds, unless a repetition shows that it saves time: then it is noise."""
    if (spread := added(cell, name)) is None:
        return ""
    if not spread.is_resolved:
        return f"not resolved ({spread.low:+.1f} to {spread.high:+.1f} ms)"
    return f"{spread.median:+.2f} ms"


def under_load(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells whose calls are those of a server under load."""
    return [cell for cell in document["cells"] if cell["steps"] >= SHIPPED_STEPS]


def _policy(document: dict[str, Any]) -> str:
    if rows := max(cell.get("single_step_rows", 0) for cell in document["cells"]):
        return f"A call has one step where at most {rows} sequences run, as on a GPU."
    return "All calls have the same number of steps."


def _noise(document: dict[str, Any]) -> str:
    cores, others = (
        document["host"]["cores"],
        [
            cell["cores_of_other_processes"]
            for cell in document["cells"]
            if cell.get("cores_of_other_processes") is not None
        ],
    )
    text = f"load {document['host']['load'][0]:.1f} on {cores} cores at the start"
    if others:
        text += f", other processes on {min(others):.2f} to {max(others):.2f} cores meanwhile"
    speeds = [s for cell in document["cells"] for s in cell.get("interpreter_seconds", ())]
    if speeds:
        text += (
            f", a million additions in a Python loop in {1e3 * min(speeds):.0f} to "
            f"{1e3 * max(speeds):.0f} ms before and after each cell"
        )
    return text


def cost_of_http(timed: dict[str, Any], *models: dict[str, Any]) -> str:
    """The section of the page of measurements: of the timed device, and of real models."""
    shares = [cell["served"]["client_cpu_share"] for cell in timed["cells"]]
    of_models = [
        f"The last row is the model of `benchmarks/medium`, computed on both cores, with prompts "
        f"of {model['input_len']} tokens and answers of {model['output_len']}; medians of "
        f"{model['repetitions']}; {_noise(model)} (`--medium`)."
        for model in models
    ]
    floors = [
        "Of the time to the first token alone, the client's part is what the same client measures "
        "of a server that answers at once."
        for cell in timed["cells"][:1]
        if "ttft_client" in cell["served"]
    ]
    return section(
        "What HTTP costs",
        f"The same requests are sent to the engine alone and through the server in turn; medians "
        f"of {timed['repetitions']}; {_noise(timed)}; `python -m benchmarks.http`. A simulated "
        f"device computes nothing and takes {1e3 * timed['step_seconds']:g} ms for a decode step "
        f"and {1e3 * timed['chunk_seconds']:g} ms for a chunk of 2,048 tokens, which is roughly "
        f"what an H200 may take for Llama-3.1-8B. {_policy(timed)} Prompts have "
        f"{timed['input_len']} tokens, answers {timed['output_len']}. There are one and a half "
        f"clients for each slot, with {timed['requests']} requests each. They run in another "
        f"process on the same two cores and use {min(shares):.0%} to {max(shares):.0%} of one.",
        *of_models,
        " ".join(
            [
                "`bare` is the engine alone. The last columns are what HTTP adds to the time to "
                "the first token (TTFT): for requests that are alone, and when requests arrive at "
                "half of the bare throughput.",
                *floors,
                'A figure is "not resolved" where a repetition shows a gain: the noise is larger.',
            ]
        ),
        summary([cell for document in (timed, *models) for cell in document["cells"]]),
        "What was required, and the cell that is worst by it; in brackets the least and the most "
        f"of the repetitions. Calls of fewer than {SHIPPED_STEPS} steps have no bar: a server "
        "makes none under load.",
        table_of_bars(timed, *models),
    )
