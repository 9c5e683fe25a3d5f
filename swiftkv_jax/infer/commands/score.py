"""`python -m swiftkv_jax.infer score`: exact log-likelihoods of given text, under the model's own
probabilities.

Rows of input, each with an optional `id`:

    {"context": "The sky is", "continuation": " blue"}    scores the continuation
    {"token_ids": [1, 450, 14744], "start": 2}            scores token_ids[start:]; start is 1 if left out
    {"prompt": "The sky is blue"}                         scores everything after the first token

A pair is split as lm-evaluation-harness does (`text.encode_pair`). An empty context is the token
that begins texts. Texts get the tokenizer's special tokens, as prompts do.

Rows of output, in the order of the input, natural logarithms:

    {"id": 0, "logprob": -2.5, "tokens": [6437, 13], "logprobs": [-2.25, -0.25], "is_greedy": false, "perplexity": 3.49}

`is_greedy`: at each position the token is the likeliest one.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from ... import cli
from ...errors import DataError, UsageError
from ...io.jsonl import survey
from ..engine.requests import NOT_FINITE, RequestOutput, ScoreRequest, Timing
from ..text import encode, encode_pair
from .batch import read_rows, run_rows
from .flags import add_engine_flags, add_model_flags, engine_options, load_model, log, start_engine
from .output import (
    JsonWriter,
    add_output_flags,
    monitored,
    open_output,
    settings_json,
    tell_complete,
)

IN_FLIGHT = 64
"""Rows known to the engine at once: enough to fill its chunks with short ones."""
FORMS = ({"context", "continuation"}, {"token_ids"}, {"token_ids", "start"}, {"prompt"})


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    rows = 'rows {"context", "continuation"} or {"token_ids", "start"} or {"prompt"}'
    parser.add_argument("--input", "-i", type=Path, metavar="JSONL", required=True, help=rows)
    add_output_flags(parser, "standard output")
    add_engine_flags(parser)


class Scores:
    """What becomes of a row."""

    def __init__(self, request: ScoreRequest):
        self._tokens, self.tokens = list(request.tokens[request.start :]), len(request.tokens)
        self._event: RequestOutput | None = None

    @property
    def done(self) -> bool:
        return self._event is not None

    @property
    def timing(self) -> Timing | None:
        return None if self._event is None else self._event.timing

    def take(self, event: RequestOutput) -> bool:
        assert event.logprobs is not None
        if not all(math.isfinite(entry.logprob) for entry in event.logprobs):
            raise DataError(NOT_FINITE)
        self._event = event
        return False

    def to_json(self) -> dict[str, Any]:
        assert self._event is not None and self._event.logprobs is not None
        logprobs = [entry.logprob for entry in self._event.logprobs]
        total = math.fsum(logprobs)
        greedy = self._event.tokens == self._tokens
        result = {
            "logprob": total,
            "tokens": self._tokens,
            "logprobs": logprobs,
            "is_greedy": greedy,
        }
        return result | {"perplexity": perplexity(total, len(logprobs))}


def perplexity(logprob: float, tokens: int) -> float | None:
    """exp of the mean negative log-likelihood; None if no float can hold it."""
    try:
        return math.exp(-logprob / tokens)
    except OverflowError:
        return None


class Reader:
    """Makes requests of rows."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def request(self, row: dict[str, Any]) -> ScoreRequest:
        """Raises `UsageError` that names the field."""
        if set(row) not in FORMS:
            fields = ", ".join(sorted(row)) or "nothing"
            raise UsageError(
                f"expected context and continuation, or token_ids and perhaps start, or prompt; "
                f"got {fields}"
            )
        if "token_ids" in row:
            return _of_tokens(row["token_ids"], row.get("start", 1))
        if self._tokenizer is None:
            raise UsageError(
                f"{' and '.join(sorted(row))}: needs a tokenizer, and this checkpoint has none: "
                f"give token_ids and start"
            )
        if wrong := [name for name, value in row.items() if not isinstance(value, str)]:
            raise UsageError(f"{', '.join(wrong)} must be a string")
        if "prompt" in row:
            tokens = encode(self._tokenizer, row["prompt"])
            if len(tokens) < 2:
                raise UsageError("prompt is a single token: nothing predicts it")
            return ScoreRequest(tokens, 1)
        before, after = encode_pair(self._tokenizer, row["context"], row["continuation"])
        return ScoreRequest([*before, *after], len(before))


def _of_tokens(tokens: Any, start: Any) -> ScoreRequest:
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise UsageError("token_ids must be a list of whole numbers")
    if type(start) is not int:
        raise UsageError(f"start={start!r} must be a whole number")
    return ScoreRequest(tokens, start)


class Total:
    """Of all rows, those of an earlier run too."""

    def __init__(self) -> None:
        self._rows, self._tokens, self._logprob = 0, 0, 0.0

    def add(self, row: dict[str, Any]) -> None:
        if "error" not in row:
            self._rows, self._tokens, self._logprob = (
                self._rows + 1,
                self._tokens + len(row["tokens"]),
                self._logprob + row["logprob"],
            )

    def __str__(self) -> str:
        if not self._rows:
            return "no row was scored"
        mean = perplexity(self._logprob, self._tokens)
        return (
            f"{self._tokens} tokens of {self._rows} rows: log-likelihood {self._logprob:.4f}, "
            f"perplexity {mean:.4f}"
        )


def main(args: argparse.Namespace) -> int:
    # Decoding is compiled as well, and not used: for one row that is quick.
    options = engine_options(args, max_num_seqs=1, scoring=True)
    rows, digest = survey(args.input)
    output = open_output(args)
    model, mesh = load_model(args)
    settings = settings_json(args, model, digest) if output else {}
    if output and output.complete:
        return tell_complete(output, settings)
    reader = Reader(model.tokenizer)
    engine = start_engine(args, model, mesh, options)
    del model  # the engine has its own copy of the layers: memory for one, not two

    def make(number: int, fields: dict[str, Any]) -> tuple[ScoreRequest, Scores]:
        request = reader.request(fields)
        return request, Scores(request)

    total = Total()
    with monitored(
        JsonWriter(sys.stdout.buffer), output, settings, total=rows, add=total.add
    ) as monitor:
        run_rows(
            engine, read_rows(args.input, make, skip=monitor.done), monitor, in_flight=IN_FLIGHT
        )
    if summary := monitor.speed.summary(engine):
        log(summary)
    log(str(total))
    monitor.tell_errors()
    return cli.SOME_ROWS_FAILED if monitor.failed else cli.OK
