"""`python -m swiftkv_jax.infer generate`: prompts in, completions out.

Input: `-p`, `-f`, `-`, or with `-i` a file of JSON lines. A row is {"prompt": TEXT},
{"prompt_token_ids": [...]} or {"messages": [...]}, with an "id" if you like and any parameter of
sampling, such as "temperature"; or a line of OpenAI's batch files.
Output: text on standard output, or with `-i` or `-o` one line of JSON per row, in the order of the
input:

    {"id": "a", "text": " upon a time", "token_ids": [5304, 264, 892],
     "finish_reason": "stop", "stop_reason": "\\n",
     "logprobs": [{"token_id": 5304, "logprob": -0.1,
                   "top": [{"token_id": 5304, "logprob": -0.1}]}, ...],
     "usage": {"prompt_tokens": 3, "completion_tokens": 3, "cached_tokens": 0},
     "timing": {"queue_s": 0.001, "ttft_s": 0.02, "total_s": 0.05}}
    {"id": "b", "error": "rows.jsonl:2: top_p=7 must be a number from 0 to 1 (1 is off) (id 'b')"}

`stop_reason` is the stop string, or the one of `stop_token_ids`, that ended the row, if one did;
the text ends before the string, `token_ids` with the token that completed it. `logprobs` are there
if they were asked for. With `n` above 1, `choices` holds the fields of each sample with its
`index`, and `completion_tokens` counts all. Times are in seconds since the row entered the engine:
until its prefill began, until its first token, until its last. `text` is null without a tokenizer.

Without a prompt the demo model continues "def read_lines(path):", with --temperature 0.7,
--seed 53 and --stop before the next function where no flag says otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

from ...cli.fields import add_flags, group, option
from ...cli.model_options import ModelOptions
from ...errors import DataError, UsageError
from ..engine.options import EngineOptions
from ..engine.sampling_params import SamplingParams
from .chat_template import chat_template
from .output_options import output, resume

DEMO_PROMPT = "def read_lines(path):"
DEMO_SAMPLING: dict[str, Any] = {
    "temperature": 0.7,
    "seed": 53,
    "stop": ("\ndef ", "\nclass "),
}
"""Sampling parameters of the demo prompt: one function, by a seed that gives a whole one. Greedy
text of a model this small repeats itself."""


@dataclasses.dataclass(frozen=True)
class CompleteOptions:
    """The options of the command, beyond those of the model, the sampling and the engine. At most
    one source of prompts is set."""

    stdin: str | None = None
    """`-`: standard input is one prompt."""
    prompt: tuple[str, ...] = option(
        (), "a prompt; repeat to add more", metavar="TEXT", names=("--prompt", "-p")
    )
    prompt_file: Path | None = option(
        None, "a file as one prompt", metavar="FILE", names=("--prompt-file", "-f")
    )
    input: Path | None = option(
        None,
        'rows {"id"?, "prompt" | "prompt_token_ids" | "messages", ...}',
        metavar="JSONL",
        names=("--input", "-i"),
    )
    chat_template: Path | None = chat_template()
    output: Path | None = output()
    resume: bool = resume()
    stream: bool = option(True, "print text as it comes (default: yes)")

    @property
    def _sources(self) -> list[Any]:
        sources = self.stdin, self.prompt, self.prompt_file, self.input
        return [source for source in sources if source]

    @property
    def is_demo(self) -> bool:
        """Return whether there is no source."""
        return not self._sources

    def check(self, model: str | os.PathLike[str] | None) -> None:
        """Raise `UsageError` for several sources, or for none with a `model` of the user's."""
        if len(self._sources) > 1:
            raise UsageError("give one of --prompt, --prompt-file, --input and -")
        if self.is_demo and model is not None:
            raise UsageError("nothing to generate from: give --prompt, --prompt-file, --input or -")

    def read(self) -> list[str]:
        """Read the prompts, all but those of `input`. Raises `UsageError` and `DataError`."""
        if self.stdin:
            import jax

            if jax.process_count() > 1:
                raise UsageError(
                    "-: standard input is that of one process, and there are several; use "
                    "`prompt_file`"
                )
            return [sys.stdin.read()]
        if self.prompt_file is not None:
            return [read_text(self.prompt_file)]
        return list(self.prompt) or [DEMO_PROMPT]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(group(parser, "model"), ModelOptions)
    prompts = group(parser, "prompts and output")
    prompts.add_argument(
        "stdin", nargs="?", type=_dash, metavar="-", help="- reads one prompt from standard input"
    )
    shown = {"output": "standard output, as text unless there is --input"}
    add_flags(prompts, CompleteOptions, shown=shown)
    add_flags(group(parser, "sampling"), SamplingParams)
    add_flags(group(parser, "engine"), EngineOptions)


def _dash(text: str) -> str:
    if text != "-":
        raise argparse.ArgumentTypeError(f"{text!r} belongs to no flag: prompts go after --prompt")
    return text


def read_text(path: Path) -> str:
    """Read a file as one prompt. Raises `DataError` if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
