"""The options of the command `eval`, beyond those of the model and the engine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ..cli.fields import option
from ..cli.model_options import SWIFTKV_CHOICES
from ..errors import UsageError

SETTINGS = ("tasks", "num_fewshot", "apply_chat_template", "fewshot_as_multiturn", "gen_kwargs")
"""Options of a run of tasks, as the harness calls them too."""
_LONG = "max_gen_toks=1024"
PAPER = (
    (("arc_challenge_llama",), 0, True, False, _LONG),
    (("winogrande",), 5, False, False, _LONG),
    (("hellaswag",), 10, False, False, _LONG),
    (("truthfulqa_mc2",), 0, False, False, _LONG),
    (("mmlu_llama",), 5, True, True, _LONG),
    (("mmlu_cot_llama",), 0, True, False, _LONG),
    (("gsm8k_llama",), 8, True, True, _LONG),
)
"""`SETTINGS` of the tasks that the authors of SwiftKV measured with vLLM and a fork of the harness
(`Snowflake-Labs/vllm`, examples/swiftkv), at most 4096 tokens a row. The fork's
`*_llama_3.1_instruct` tasks have the names of the harness itself here, where their prompts and
scoring may differ: `tasks.RENAMED`."""


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

    def runs(self) -> list[dict[str, Any]]:
        """Return arguments of the harness's `simple_evaluate` for each run of tasks. Raises
        `UsageError`."""
        own = {name: getattr(self, name) for name in SETTINGS}
        if self.paper:
            if others := [name for name, value in own.items() if value not in (None, False)]:
                raise UsageError(
                    f"`{others[0]}` does not go with `paper`, which has settings of its own"
                )
            return [dict(zip(SETTINGS, one, strict=True)) for one in PAPER]
        if not self.tasks:
            raise UsageError(
                "nothing to run: name some with `tasks`, or take the authors' with `paper`"
            )
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise UsageError(f"`num_fewshot`={self.num_fewshot} must be at least 0")
        if self.fewshot_as_multiturn and not self.apply_chat_template:
            raise UsageError(
                "`fewshot_as_multiturn` needs `apply_chat_template`: only conversations have turns"
            )
        return [own]


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
