"""The options of the command `eval`, beyond those of the model and the engine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ..cli.fields import option
from ..cli.model_options import SWIFTKV_CHOICES
from ..errors import UsageError


def parse_names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise UsageError(f"{text!r} is not a list of tasks, such as hellaswag,gsm8k")
    return names


def parse_limit(text: str) -> float:
    try:
        limit = float(text)
    except ValueError:
        limit = 0.0
    if not 0 < limit < 2**31 or (limit >= 1 and limit != int(limit)):
        raise UsageError(
            f"{text!r} is neither a whole number of documents nor a share between 0 and 1"
        )
    return limit if limit < 1 else int(limit)


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """Tasks to run, and where their numbers go."""

    tasks: tuple[str, ...] | None = option(
        None,
        "tasks, groups or tags of the harness, or of --include-path",
        metavar="NAME,...",
        parse=parse_names,
    )
    paper: bool = option(False, "the seven tasks of the SwiftKV authors, with their settings")
    num_fewshot: int | None = option(
        None, "examples before each question (default: each task's own)", metavar="N"
    )
    limit: float | None = option(
        None,
        "only the first N documents of each task; a share if below 1",
        metavar="N",
        parse=parse_limit,
    )
    apply_chat_template: bool = option(False, "prompts are conversations, by the model's template")
    fewshot_as_multiturn: bool = option(
        False, "with --apply-chat-template: each example is a separate turn"
    )
    gen_kwargs: str | None = option(
        None, "settings of generations, over those of the tasks", metavar="NAME=VALUE,..."
    )
    include_path: Path | None = option(
        None, "folder with more tasks, YAML files as the harness reads them", metavar="DIR"
    )
    output: Path | None = option(
        None,
        "the numbers, and what they were measured with; a new file",
        metavar="JSON",
        names=("--output", "-o"),
    )


@dataclasses.dataclass(frozen=True)
class Sides:
    """The sides of the model that are measured."""

    swiftkv: str = option(
        "auto",
        "off: the unmodified teacher; both: compared (default: on if there)",
        choices=(*SWIFTKV_CHOICES, "both"),
    )

    @property
    def compare(self) -> bool:
        """Return whether the teacher is measured too, before the student."""
        return self.swiftkv == "both"
