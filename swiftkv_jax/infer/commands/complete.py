"""`python -m swiftkv_jax.infer generate`: prompts in, completions out.

Input: `-p`, `-f`, `-`, or with `-i` a file of JSON lines, whose rows are described in `prompts`.
Output: text on standard output, or with `-i` or `-o` one line of JSON per row, in the order of the
input:

    {"id": "a", "text": " upon a time", "token_ids": [5304, 264, 892], "finish_reason": "stop", "stop_reason": "\\n",
     "logprobs": [{"token_id": 5304, "logprob": -0.1, "top": [{"token_id": 5304, "logprob": -0.1}]}, ...],
     "usage": {"prompt_tokens": 3, "completion_tokens": 3, "cached_tokens": 0},
     "timing": {"queue_s": 0.001, "ttft_s": 0.02, "total_s": 0.05}}
    {"id": "b", "error": "rows.jsonl:2: top_p=7 must be a number above 0 and at most 1 (1 is off) (id 'b')"}

`stop_reason` is the stop string, or the one of `stop_token_ids`, that ended the row, if one did;
the text ends before the string, `token_ids` with the token that completed it. `logprobs` are there
if they were asked for. With `n` above 1, `choices` holds what one sample has, each with its
`index`, and `completion_tokens` counts all. Times are in seconds from when the row entered the
engine: until its prefill began, until its first token, until its last. `text` is null without a
tokenizer.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ... import cli
from ...errors import UsageError
from ...io.jsonl import survey
from ...model import Model
from ..engine.checks import check_request
from ..engine.options import EngineOptions
from ..engine.requests import Request
from .batch import Row, read_rows, run_rows
from .flags import (
    add_engine_flags,
    add_model_flags,
    add_result_flags,
    add_sampling_flags,
    engine_options,
    load_model,
    log,
    sampling_params,
    start_engine,
)
from .output import (
    JsonWriter,
    TextWriter,
    add_output_flags,
    monitored,
    open_output,
    settings_json,
    tell_complete,
)
from .prompts import Reader, read_text
from .results import Completions

DEMO_PROMPT = "def read_lines(path):"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    flag = parser.add_argument
    flag(
        "stdin",
        nargs="?",
        choices=["-"],
        metavar="-",
        help="- reads one prompt from standard input",
    )
    flag("--prompt", "-p", action="append", metavar="TEXT", help="a prompt; repeat to add more")
    flag("--prompt-file", "-f", type=Path, metavar="FILE", help="a file as one prompt")
    flag(
        "--input",
        "-i",
        type=Path,
        metavar="JSONL",
        help='rows {"id"?, "prompt" | "prompt_token_ids" | "messages", ...}',
    )
    add_output_flags(parser, "standard output, as text unless there is --input")
    flag(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="print text as it comes (default: yes)",
    )
    add_sampling_flags(parser, max_tokens=128)
    add_result_flags(parser)
    add_engine_flags(parser)


class Job(NamedTuple):
    """What there is to do."""

    total: int
    """Rows."""
    digest: str
    """Of the input."""
    options: EngineOptions
    rows: Callable[[int], Iterator[Row]]
    """The rows after the first so many."""
    live: bool = False
    """Text is printed as it comes."""


def main(args: argparse.Namespace) -> int:
    demo_prompt = _check_flags(args)
    surveyed = survey(args.input) if args.input is not None else None
    output = open_output(args)

    model, mesh = load_model(args)
    params = sampling_params(args, model)
    if model.tokenizer is None and (params.stop or args.input is None):
        raise UsageError(
            "this checkpoint has no tokenizer: give prompt_token_ids with --input, and leave out "
            "--stop"
        )
    reader = Reader(model.tokenizer, params, warn=log)
    job = (
        _prompts_job(args, reader, model)
        if surveyed is None
        else _file_job(args, reader, model, *surveyed)
    )
    settings = (
        settings_json(args, model, job.digest, sampling=dataclasses.asdict(params))
        if output
        else {}
    )
    if output and output.complete:
        return tell_complete(output, settings)
    engine = start_engine(args, model, mesh, job.options)
    del model  # the engine has its own copy of the layers: memory for one, not two

    texts = TextWriter(sys.stdout, _texts, live=job.live, prefix=DEMO_PROMPT if demo_prompt else "")
    writer = texts if surveyed is None else JsonWriter(sys.stdout.buffer)
    with monitored(
        writer, output, settings, total=job.total, progress=args.input is not None
    ) as monitor:
        run_rows(engine, job.rows(monitor.done), monitor, in_flight=2 * job.options.max_num_seqs)
    if summary := monitor.speed.summary(engine):
        log(summary)
    monitor.tell_errors()
    return cli.SOME_ROWS_FAILED if monitor.failed else cli.OK


def _check_flags(args: argparse.Namespace) -> bool:
    """Whether the demo's prompt is meant. Mistakes are told before weights are read: raises
    `UsageError`."""
    sampling_params(args)
    engine_options(args)
    sources = [
        source
        for source in (args.stdin, args.prompt, args.prompt_file, args.input)
        if source is not None
    ]
    if len(sources) > 1:
        raise UsageError("give one of --prompt, --prompt-file, --input and -")
    if not sources and args.model is not None:
        raise UsageError("nothing to generate from: give --prompt, --prompt-file, --input or -")
    if args.logprobs is not None and args.input is None and args.output is None:
        raise UsageError("--logprobs goes with --output or --input: text has no place for them")
    return not sources


def _texts(row: Row) -> list[str]:
    """For people."""
    assert isinstance(row.result, Completions)
    return [sample.text for sample in row.result.samples]


def _file_job(
    args: argparse.Namespace, reader: Reader, model: Model, total: int, digest: str
) -> Job:
    tokenizer = model.tokenizer

    def make(number: int, fields: dict[str, Any]) -> tuple[Request, Completions]:
        request = reader.from_row(number, fields)
        return request, Completions(tokenizer, request)

    return Job(
        total, digest, engine_options(args), lambda skip: read_rows(args.input, make, skip=skip)
    )


def _prompts_job(args: argparse.Namespace, reader: Reader, model: Model) -> Job:
    """Raises `UsageError` for a prompt that cannot run, before anything does."""
    prompts, tokenizer = _prompts(args, model), model.tokenizer
    requests = _requests(reader, prompts, model, engine_options(args))
    digest = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
    live = args.stream and len(requests) == 1 and requests[0].params.n == 1 and not args.output
    rows = [
        Row(number, "", request, Completions(tokenizer, request))
        for number, request in enumerate(requests)
    ]
    options = _fitted(args, requests, model, live=live)
    return Job(
        len(rows), digest, options, lambda skip: itertools.islice(iter(rows), skip, None), live
    )


def _prompts(args: argparse.Namespace, model: Model) -> list[str]:
    if model.tokenizer is None:
        raise UsageError("this checkpoint has no tokenizer: give prompt_token_ids with --input")
    if args.stdin:
        if jax.process_count() > 1:
            raise UsageError(
                "-: standard input belongs to one process, and there are several; use --prompt-file"
            )
        return [sys.stdin.read()]
    return (
        [read_text(args.prompt_file)]
        if args.prompt_file is not None
        else args.prompt or [DEMO_PROMPT]
    )


def _requests(
    reader: Reader, prompts: list[str], model: Model, options: EngineOptions
) -> list[Request]:
    """Raises `UsageError` for any that cannot run, before anything does."""
    requests = []
    for number, text in enumerate(prompts):
        try:
            requests.append(reader.from_text(number, text))
            check_request(requests[-1], model.config, options)
        except UsageError as error:
            raise UsageError(
                f"prompt {number}: {error}" if len(prompts) > 1 else str(error)
            ) from None
    return requests


def _fitted(
    args: argparse.Namespace, requests: list[Request], model: Model, *, live: bool
) -> EngineOptions:
    """An engine for a few known prompts. Lengths in powers of two: fewer shapes to compile, and to
    keep compiled."""
    longest = max(len(request.prompt) + request.params.max_tokens for request in requests)
    fitting = min(1 << (longest - 1).bit_length(), model.config.max_position_embeddings)
    steps = 1 if live else EngineOptions.decode_steps
    options = engine_options(args, max_model_len=fitting, decode_steps=steps, one_size=True)
    return dataclasses.replace(
        options,
        max_num_seqs=min(options.max_num_seqs, sum(request.params.n for request in requests)),
    )
