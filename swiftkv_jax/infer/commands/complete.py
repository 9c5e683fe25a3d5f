"""The command `generate`: prompts in, completions out."""

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

from ...cli.fields import given
from ...cli.model_loading import load_model
from ...cli.model_options import ModelOptions
from ...errors import UsageError
from ...model.model import Model
from ...process.jsonl import scan
from ..engine.checks import check_request
from ..engine.options import OFFLINE_PREFILL_CHUNKS, EngineOptions
from ..engine.requests import Request
from ..engine.sampling_params import SamplingParams
from ..runner.choose_shapes import offline_num_seqs
from .batch import Row, read_rows
from .chat_template import chat_template_text, set_chat_template
from .complete_arguments import DEMO_PROMPT, DEMO_SAMPLING, CompleteOptions
from .output import (
    JsonLinesWriter,
    TextWriter,
    log_complete,
    open_output,
    write_rows,
)
from .prompts import PromptReader
from .results import Completions
from .resume import output_settings
from .sampling_options import sampling_params
from .start import start_engine


class Workload(NamedTuple):
    """Rows to run, and the engine that they need."""

    num_rows: int
    input_digest: str
    options: EngineOptions
    rows: Callable[[int], Iterator[Row]]
    """Makes the rows after the first so many."""
    stream: bool = False
    """True if text is printed as it comes."""


def main(args: argparse.Namespace) -> int:
    model_options = ModelOptions.from_args(args)
    command = CompleteOptions(args.stdin, **given(CompleteOptions, args))
    engine_fields = given(EngineOptions, args)
    sampling_fields = given(SamplingParams, args)
    # Mistakes in the command line end the run before weights are read.
    SamplingParams(**sampling_fields)
    EngineOptions(**engine_fields)
    command.check(model_options.model)
    if "logprobs" in sampling_fields and command.input is None and command.output is None:
        raise UsageError("`logprobs` goes with `output` or `input`: text has no place for them")
    scanned = None
    if command.input is not None:
        scanned = command.input, *scan(command.input)
    template = chat_template_text(command.chat_template)
    file = open_output(command.output, resume=command.resume)

    model, mesh = load_model(model_options)
    set_chat_template(model.tokenizer, template, command.chat_template)
    if command.is_demo:
        sampling_fields = DEMO_SAMPLING | sampling_fields
    params = sampling_params(sampling_fields, model)
    if model.tokenizer is None and (params.stop or command.input is None):
        raise UsageError(
            "this checkpoint has no tokenizer: give prompt_token_ids with `input`, and leave out "
            "`stop`"
        )
    if "max_model_len" not in engine_fields:  # one model, however long these prompts are
        config = model.config.at_length(model.config.max_position_embeddings)
        model = dataclasses.replace(model, config=config)
    reader = PromptReader(model.tokenizer, params)
    if scanned is not None:
        _, num_rows, _ = scanned
        offline: dict[str, Any] = {
            "max_prefill_chunks": OFFLINE_PREFILL_CHUNKS,
            "max_num_seqs": offline_num_seqs(jax.default_backend(), num_rows),
        }
        work = _file_workload(reader, model, EngineOptions(**offline | engine_fields), *scanned)
    else:
        stream = command.stream and file is None
        work = _prompt_workload(command.read(), reader, model, engine_fields, stream=stream)
    settings = {}
    if file is not None:
        settings = output_settings(
            "generate", work.input_digest, model, model_options, engine_fields, template
        )
        settings["sampling"] = dataclasses.asdict(params)
        if file.complete:
            return log_complete(file, settings)
    engine = start_engine(model, mesh, work.options, model_options)
    del model  # the engine has its own copy of the layers: memory for one, not two

    if command.input is not None:
        writer = JsonLinesWriter(sys.stdout.buffer)
    else:
        prefix = DEMO_PROMPT if command.is_demo else ""
        writer = TextWriter(sys.stdout, _texts, stream=work.stream, prefix=prefix)
    written = write_rows(
        engine,
        work.rows,
        writer,
        file,
        settings,
        total=work.num_rows,
        in_flight=2 * work.options.max_num_seqs,
        progress=command.input is not None,
    )
    return written.end()


def _texts(row: Row) -> list[str]:
    assert isinstance(row.result, Completions)
    return [sample.text for sample in row.result.samples]


def _file_workload(
    reader: PromptReader,
    model: Model,
    options: EngineOptions,
    path: Path,
    num_rows: int,
    digest: str,
) -> Workload:
    tokenizer = model.tokenizer

    def build(number: int, fields: dict[str, Any]) -> tuple[Request, Completions]:
        request = reader.from_row(number, fields)
        return request, Completions(tokenizer, request)

    return Workload(num_rows, digest, options, lambda skip: read_rows(path, build, skip=skip))


def _prompt_workload(
    prompts: list[str],
    reader: PromptReader,
    model: Model,
    engine_fields: dict[str, Any],
    *,
    stream: bool,
) -> Workload:
    """Raises `UsageError` for a prompt that cannot run, before anything does."""
    requests = _requests(reader, prompts, model, EngineOptions(**engine_fields))
    digest = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
    stream = stream and len(requests) == 1 and requests[0].params.n == 1
    rows = [
        Row(number, "", request, Completions(model.tokenizer, request))
        for number, request in enumerate(requests)
    ]
    options = _fitted_options(engine_fields, requests, model, stream=stream)
    return Workload(
        len(rows), digest, options, lambda skip: itertools.islice(iter(rows), skip, None), stream
    )


def _requests(
    reader: PromptReader, prompts: list[str], model: Model, options: EngineOptions
) -> list[Request]:
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


def _fitted_options(
    engine_fields: dict[str, Any], requests: list[Request], model: Model, *, stream: bool
) -> EngineOptions:
    """Options of an engine for a few known requests. Lengths are powers of two: fewer shapes to
    compile, and to keep in the compile cache."""
    longest = max(len(request.prompt) + request.params.max_tokens for request in requests)
    fitting = min(1 << (longest - 1).bit_length(), model.config.max_position_embeddings)
    steps = 1 if stream else EngineOptions.decode_steps
    defaults: dict[str, Any] = {
        "max_model_len": fitting,
        "decode_steps": steps,
        "one_size": True,
        "sampling": not all(request.params.is_plain_greedy for request in requests),
    }
    options = EngineOptions(**defaults | engine_fields)
    num_sequences = sum(request.params.n for request in requests)
    return dataclasses.replace(options, max_num_seqs=min(options.max_num_seqs, num_sequences))
