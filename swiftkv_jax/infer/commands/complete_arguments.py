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
    {"id": "b", "error": "rows.jsonl:2: top_p=7 must be a number above 0 and at most 1 ..."}

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
from pathlib import Path
from typing import Any

from ...cli.model_options import add_model_arguments
from .chat_template import add_chat_template_argument
from .engine_options import add_engine_arguments
from .output_options import add_output_arguments
from .sampling_options import add_result_arguments, add_sampling_arguments

DEMO_PROMPT = "def read_lines(path):"
DEMO_SAMPLING: dict[str, Any] = {
    "temperature": 0.7,
    "seed": 53,
    "stop": ("\ndef ", "\nclass "),
}
"""Sampling parameters of the demo prompt: one function, by a seed that gives a whole one. Greedy
text of a model this small repeats itself."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser.add_argument_group("model"))
    prompts = parser.add_argument_group("prompts and output")
    add = prompts.add_argument
    add(
        "stdin",
        nargs="?",
        type=_dash,
        metavar="-",
        help="- reads one prompt from standard input",
    )
    add("--prompt", "-p", action="append", metavar="TEXT", help="a prompt; repeat to add more")
    add("--prompt-file", "-f", type=Path, metavar="FILE", help="a file as one prompt")
    add(
        "--input",
        "-i",
        type=Path,
        metavar="JSONL",
        help='rows {"id"?, "prompt" | "prompt_token_ids" | "messages", ...}',
    )
    add_chat_template_argument(prompts)
    add_output_arguments(prompts, "standard output, as text unless there is --input")
    add(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="print text as it comes (default: yes)",
    )
    sampling = parser.add_argument_group("sampling")
    add_sampling_arguments(sampling, max_tokens=128)
    add_result_arguments(sampling)
    add_engine_arguments(parser.add_argument_group("engine"))


def _dash(text: str) -> str:
    if text != "-":
        raise argparse.ArgumentTypeError(f"{text!r} belongs to no flag: prompts go after --prompt")
    return text
