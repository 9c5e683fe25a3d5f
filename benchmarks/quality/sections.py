"""Sections of `docs/measurements.md` besides the large table of `table`."""

from __future__ import annotations

from typing import Any

from ..markdown import section, table
from .table import describe, key, rows_table, verdict


def longer_training(document: dict[str, Any]) -> str:
    """Rows after 512 steps."""
    rows = [row for row in document["rows"] if row["steps"] == 512]
    tokens = rows[0]["steps"] * document["tokens_per_step"]
    return section(
        "After 512 steps",
        f"The same at half the prefill after 512 steps ({tokens / 1e6:.1f}M tokens) from the "
        "closed form, one seed; the authors' recipe was not trained for as long.",
        rows_table(rows),
    )


def fitted_for_own(document: dict[str, Any]) -> str:
    """Students that are fitted to and trained for own keys and values."""
    lines, _ = verdict(document["rows"])
    return section(
        "Calibrated for generated tokens that keep their own",
        "The same files and columns. These students are "
        "[calibrated](calibration.md#generated-tokens), and where they have steps trained, for "
        "own keys and values of the tokens after the prompt; the rows above are served so "
        "without. `python -m benchmarks.quality --generated-kv own`.",
        rows_table([row for row in document["rows"] if row["mode"] != "boundary"]),
        "\n".join(f"- {line}" for line in lines if line.startswith(("met", "not met"))),
    )


def another_teacher(untrained: dict[str, Any], trained: dict[str, Any], own: dict[str, Any]) -> str:
    """Students of a teacher that is not the demo model. `own` are those that are fitted to own keys
    and values."""
    rows = [*untrained["rows"], *trained["rows"]]
    fitted = [row for row in own["rows"] if row["mode"] != "boundary"]
    lines, _ = verdict([*rows, *fitted])
    return section(
        "Another teacher",
        describe(untrained)
        + " It learned from installed packages, and other packages are held out "
        "(`python -m benchmarks.teachers`); `python -m benchmarks.quality --teacher FOLDER`.",
        rows_table(rows),
        "Calibrated for generated tokens that keep their own (`--generated-kv own`):",
        rows_table(fitted),
        "\n".join(f"- {line}" for line in lines if not line.startswith("not measured")),
    )


def without_teacher(document: dict[str, Any], with_teacher: dict[str, Any]) -> str:
    """Students that are trained with the text alone, beside those that are distilled."""
    rows = document["rows"]
    distilled = {key(row)[:-1]: row for row in with_teacher["rows"]}
    return section(
        "Trained with the text alone",
        "A control: the same students, steps and learning rate, but cross-entropy with the text in "
        "place of the teacher's distribution and hidden states (`--loss cross-entropy`), one seed.",
        table(
            ("K of layers", "g", "steps", "serving", "text alone", "distilled"),
            [
                (
                    f"{row['num_key_value_layers']} ({row['share']:.1%})",
                    str(row["key_value_group_size"]),
                    str(row["steps"]),
                    row["mode"],
                    *(
                        f"{each['answers']['above']['value']:+.2%}"
                        for each in (row, distilled[key(row)[:-1]])
                    ),
                )
                for row in rows
            ],
        ),
        "Perplexity above the teacher's, on the tokens after the prompt.",
    )


def a_quarter(document: dict[str, Any]) -> str:
    """Rows of the smallest share of layers."""
    return section(
        "A quarter of the layers",
        "Prefill of two of eight layers, on the same files. No variant is fit for use: all lose "
        "more than a nat on the tokens that depend on the far prompt.",
        rows_table(document["rows"]),
    )


def generated_functions(document: dict[str, Any]) -> str:
    """How many of the generated blocks parse."""
    rows = [row for row in document["rows"] if row["blocks"]]
    blocks = rows[0]["blocks"]
    return section(
        "Generated functions that parse",
        f"Of {blocks['prompts']} functions of the held-out files, written greedily from their "
        f"header at half the prefill, without training; of the teacher's {blocks['teacher']} "
        "parse.",
        table(
            ("g", "start", "serving", "parse"),
            [
                (
                    str(row["key_value_group_size"]),
                    row["start"],
                    row["mode"],
                    str(row["blocks"]["student"]),
                )
                for row in rows
            ],
        ),
    )
