"""The options of the command `eval`, beyond those of the model, the engine and the harness."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from ..cli.fields import option
from ..cli.model_options import SWIFTKV_CHOICES
from ..errors import UsageError

_CHAT = "--apply_chat_template --fewshot_as_multiturn"
PAPER = (
    f"--tasks arc_challenge_llama --num_fewshot 0 {_CHAT} false",
    "--tasks winogrande --num_fewshot 5",
    "--tasks hellaswag --num_fewshot 10",
    "--tasks truthfulqa_mc2 --num_fewshot 0",
    f"--tasks mmlu_llama --num_fewshot 5 {_CHAT} true",
    f"--tasks mmlu_cot_llama --num_fewshot 0 {_CHAT} false",
    f"--tasks gsm8k_llama --num_fewshot 8 {_CHAT} true",
)
"""Flags of the harness for the tasks that the authors of SwiftKV measured with vLLM and a fork of
the harness (`Snowflake-Labs/vllm`, examples/swiftkv); and answers of at most 1024 tokens."""


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """Tasks and sides that are measured, and where the numbers go."""

    paper: bool = option(False, "the seven tasks of the SwiftKV authors, with their settings")
    swiftkv: str = option(
        "auto",
        "off: the unmodified teacher; both: compared (default: on if there)",
        choices=(*SWIFTKV_CHOICES, "both"),
    )
    output: Path | None = option(
        None,
        "new folder for the harness's files, and for swiftkv.json: what they were measured with, "
        "and the differences",
        metavar="DIR",
        names=("--output", "--output-path", "-o"),
    )

    def sides(self) -> dict[str, str]:
        """Return the sides that are measured, in order: name -> value of --swiftkv."""
        if self.swiftkv == "both":
            return {"teacher": "off", "student": "on"}
        return {"": self.swiftkv}

    def runs(self, flags: Sequence[str]) -> list[list[str]]:
        """Return the flags of each run of the harness, as it spells them; `flags` are those that
        were given. Raises `UsageError`."""
        given = [
            re.sub("^--[^=]+", lambda name: "--" + name[0][2:].replace("-", "_"), flag)
            for flag in flags
        ]
        if not self.paper:
            return [given]
        runs = [[*one.split(), "--gen_kwargs", "max_gen_toks=1024"] for one in PAPER]
        fixed = {flag for run in runs for flag in run if flag.startswith("--")}
        fixed |= {"-t", "-f"}  # --tasks and --num_fewshot
        if clash := next((flag for flag in given if flag.partition("=")[0] in fixed), None):
            raise UsageError(f"{clash} does not go with `paper`, which has settings of its own")
        return [[*run, *given] for run in runs]
