"""The result of `benchmarks.hf_serve` in Markdown."""

from __future__ import annotations

from typing import Any

from ..markdown import section, table


def tables(document: dict[str, Any]) -> list[str]:
    """Speed and behaviour."""
    rows = [
        (
            row["server"],
            str(row["clients"]),
            f"{row['tokens_per_s']:,.0f}",
            f"{row['output_tokens_per_s']:.1f}",
            f"{row['ttft_median']:.2f} s",
            f"{row['ttft_worst']:.2f} s",
        )
        for row in document["speed"]
    ]
    header = ("server", "clients", "tokens/s", "output tokens/s", "first token", "worst")
    behaviour: dict[str, dict[str, str]] = document["behaviour"]
    questions = next(iter(behaviour.values()))
    return [
        table(header, rows),
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
        "package's server, one after another on two cores, with the same random float32 weights "
        "(16 layers of width 1,024), "
        f"the same clients and prompts of {document['input_len']} tokens, {document['output_len']} "
        "new ones each; every client asks once, a single one three times. SwiftKV is at half of "
        f"the layers. The teacher's greedy text is {same} that of transformers. `python -m "
        "benchmarks.hf_serve`.",
        speed,
        "What they do with what a request asks for, on `/v1/completions`, against what is computed "
        "from the same weights without a server (`ignored`: the answer is the one without the "
        "parameter), and with clients that leave, that are too many, and with SIGTERM:",
        behaviour,
    )
