"""Options of the commands `train prepare`, `train restate` and `train show`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ...cli.fields import MISSING, option
from ...cli.model_options import revision


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """The options of `prepare`."""

    model: Path = option(MISSING, "checkpoint whose tokenizer and chat template are used")
    revision: str | None = revision()
    data: tuple[str, ...] = option(
        MISSING, "as for training; repeat to add more", metavar="PATH[:WEIGHT]"
    )
    max_length: int = option(MISSING, "tokens in a packed row", at_least=2)
    output_dir: Path = option(
        MISSING,
        "the new folder; with several --data, one that holds a folder for each: 0, 1, ...",
        metavar="FOLDER",
    )
    max_unreadable_share: float = option(
        0.01, "share of unreadable rows in a source above which it stops (default: %(default)s)"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestateOptions:
    """The options of `restate`."""

    model: Path = option(MISSING, "checkpoint whose tokenizer counts the tokens")
    revision: str | None = revision()
    data: tuple[str, ...] = option(
        MISSING, "text, in the forms of training data; repeat to add more", metavar="PATH"
    )
    examples: int = option(MISSING, "rows to write", metavar="N", at_least=1)
    max_length: int = option(MISSING, "tokens of a prompt and its answer together", at_least=128)
    output: Path = option(MISSING, "the new file, ending in .jsonl", metavar="FILE")
    seed: int = option(0, "another one gives other examples (default: %(default)s)")


@dataclasses.dataclass(frozen=True)
class ShowOptions:
    """The options of `show`."""

    model: Path = option(MISSING, "checkpoint whose tokenizer the data was prepared with")
    revision: str | None = revision()
    rows: int = option(3, "number of rows, from the first (default: %(default)s)")
