"""The result of `benchmarks.hf_serve` in Markdown."""

from __future__ import annotations

from typing import Any

from ..markdown import section, table


def tables(document: dict[str, Any]) -> list[str]:
    """Speed and behaviour."""
    workloads = list(dict.fromkeys((r["input_len"], r["output_len"]) for r in document["speed"]))
    header, rows = ["server", "clients"], dict[tuple[str, str], list[str]]()
    for input_len, output_len in workloads:
        header += [f"{input_len:,} / {output_len}: tokens/s", "first token", "worst"]
    for row in document["speed"]:  # by server, then by workload
        rows.setdefault((row["server"], str(row["clients"])), []).extend(
            [
                f"{row['tokens_per_s']:,.0f}",
                f"{row['ttft_median']:.2f} s",
                f"{row['ttft_worst']:.2f} s",
            ]
        )
    behaviour: dict[str, dict[str, str]] = document["behaviour"]
    questions = next(iter(behaviour.values()))
    return [
        table(header, [(*key, *figures) for key, figures in rows.items()]),
        table(
            ("", *behaviour),
            [(name, *(found[name] for found in behaviour.values())) for name in questions],
        ),
    ]


def servers(document: dict[str, Any]) -> str:
    """The section of the page of measurements."""
    speed, behaviour = tables(document)
    versions = document["versions_of_transformers"]
    same = "the same as" if document["same_text"] else "not that of"
    return section(
        "Beside the server of Hugging Face transformers",
        f"`transformers serve` {versions['transformers']} on PyTorch {versions['torch']} and this "
        "package's server run one after the other on two cores, with the same random float32 "
        "weights (16 layers of width 1,024) and the same clients. Two workloads are named "
        "by the tokens of a prompt / of an answer. Every client sends one "
        "request, a single client three. This package's servers run with 16 slots and "
        "`--max-num-queued-reqs 32`. In the SwiftKV model half of the layers are lower ones. "
        f"The teacher's greedy text is {same} that of transformers. `python -m "
        "benchmarks.hf_serve`.",
        speed,
        "How the servers treat the parameters of a request to `/v1/completions`: the answer is "
        "compared with one that is computed from the same weights without a server. `ignored` "
        "means that it is the answer without the parameter. The last rows are clients that "
        "disconnect, too many clients, and SIGTERM.",
        behaviour,
    )
