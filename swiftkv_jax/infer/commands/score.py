"""The command `score`: exact log-likelihoods of given text."""

from __future__ import annotations

import argparse
import logging
import math
import sys
from typing import Any

from ...cli.fields import given
from ...cli.model_loading import load_model
from ...cli.model_options import ModelOptions
from ...errors import DataError, UsageError
from ...process.jsonl import scan
from ..engine.options import EngineOptions
from ..engine.requests import RequestOutput, ScoreRequest, Timing
from ..text import encode, encode_pair
from .batch import read_rows
from .output import JsonLinesWriter, log_complete, open_output, write_rows
from .resume import output_settings
from .score_arguments import ScoreOptions
from .start import start_engine

logger = logging.getLogger(__name__)

IN_FLIGHT = 64
"""Rows in the engine at once: enough to fill its chunks with short ones."""
FORMS = ({"context", "continuation"}, {"token_ids"}, {"token_ids", "start"}, {"prompt"})


class Scores:
    """Result of a row."""

    def __init__(self, request: ScoreRequest):
        self._tokens = list(request.tokens[request.start :])
        self.tokens = len(request.tokens)
        self._logprobs: list[float] = []
        self._likeliest: list[int] = []
        self.done = False
        self.timing: Timing | None = None

    def update(self, output: RequestOutput) -> bool:
        if output.finish_reason == "error":
            raise DataError(output.error)
        assert output.logprobs is not None
        self._logprobs += (entry.logprob for entry in output.logprobs)
        self._likeliest += output.token_ids
        self.done = output.finish_reason is not None
        self.timing = output.timing
        return not self.done

    @property
    def logprob(self) -> float:
        """The log-probability of all scored tokens together."""
        return math.fsum(self._logprobs)

    @property
    def is_greedy(self) -> bool:
        """Return whether each scored token is the likeliest at its place."""
        return self._likeliest == self._tokens

    def to_json(self) -> dict[str, Any]:
        return {
            "logprob": self.logprob,
            "tokens": self._tokens,
            "logprobs": self._logprobs,
            "is_greedy": self.is_greedy,
            "perplexity": perplexity(self.logprob, len(self._logprobs)),
        }


def perplexity(logprob: float, tokens: int) -> float | None:
    """exp(-logprob / tokens), `logprob` being the sum over `tokens`; None above the largest
    float."""
    try:
        return math.exp(-logprob / tokens)
    except OverflowError:
        return None


def score_request(tokenizer: Any, row: dict[str, Any]) -> ScoreRequest:
    """Request of a row without its id. Raises `UsageError` that names the field."""
    if set(row) not in FORMS:
        fields = ", ".join(sorted(row)) or "nothing"
        raise UsageError(
            f"expected context and continuation, or token_ids and perhaps start, or prompt; "
            f"got {fields}"
        )
    if "token_ids" in row:
        return _token_request(row["token_ids"], row.get("start", 1))
    if tokenizer is None:
        raise UsageError(
            f"{' and '.join(sorted(row))}: needs a tokenizer, and this checkpoint has none: "
            f"give token_ids and start"
        )
    if wrong := [name for name, value in row.items() if not isinstance(value, str)]:
        raise UsageError(f"{', '.join(wrong)} must be a string")
    if "prompt" in row:
        tokens = encode(tokenizer, row["prompt"])
        if len(tokens) < 2:
            raise UsageError("prompt is a single token: nothing predicts it")
        return ScoreRequest(tokens, 1)
    before, after = encode_pair(tokenizer, row["context"], row["continuation"])
    return ScoreRequest([*before, *after], len(before))


def _token_request(tokens: Any, start: Any) -> ScoreRequest:
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise UsageError("token_ids must be a list of whole numbers")
    if type(start) is not int:
        raise UsageError(f"start={start!r} must be a whole number")
    return ScoreRequest(tokens, start)


class Total:
    """Log-likelihood of all rows, those of an earlier run included."""

    def __init__(self) -> None:
        self._rows = 0
        self._tokens = 0
        self._logprob = 0.0

    def add(self, row: dict[str, Any]) -> None:
        """Add a row of output."""
        if "error" not in row:
            self._rows += 1
            self._tokens += len(row["tokens"])
            self._logprob += row["logprob"]

    def __str__(self) -> str:
        if not self._rows:
            return "no row was scored"
        mean = perplexity(self._logprob, self._tokens)
        return (
            f"{self._tokens} tokens of {self._rows} rows: log-likelihood {self._logprob:.4f}, "
            f"perplexity {mean:.4f}"
        )


def main(args: argparse.Namespace) -> int:
    command = ScoreOptions(**given(ScoreOptions, args))
    model_options = ModelOptions.from_args(args)
    engine_fields = given(EngineOptions, args)
    # Decoding is compiled as well, and not used: for one row that is quick.
    defaults: dict[str, Any] = {"max_num_seqs": 1, "scoring": True}
    options = EngineOptions(**defaults | engine_fields)
    num_rows, digest = scan(command.input)
    file = open_output(command.output, resume=command.resume)
    model, mesh = load_model(model_options)
    settings = {}
    if file is not None:
        settings = output_settings("score", digest, model, model_options, engine_fields)
        if file.complete:
            return log_complete(file, settings)
    tokenizer = model.tokenizer
    engine = start_engine(model, mesh, options, model_options)
    del model  # the engine has its own copy of the layers: memory for one, not two

    def build(number: int, fields: dict[str, Any]) -> tuple[ScoreRequest, Scores]:
        request = score_request(tokenizer, fields)
        return request, Scores(request)

    total = Total()
    writer = JsonLinesWriter(sys.stdout.buffer)
    written = write_rows(
        engine,
        lambda skip: read_rows(command.input, build, skip=skip),
        writer,
        file,
        settings,
        total=num_rows,
        in_flight=IN_FLIGHT,
        on_row=total.add,
    )
    logger.info(str(total))
    return written.end()
