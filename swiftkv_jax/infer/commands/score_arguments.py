"""`python -m swiftkv_jax.infer score`: exact log-likelihoods of given text, under the model's own
probabilities.

Rows of input, each with an optional `id`:

    {"context": "The sky is", "continuation": " blue"}  scores the continuation
    {"token_ids": [1, 450, 14744], "start": 2}          scores token_ids[start:], by default [1:]
    {"prompt": "The sky is blue"}                       scores everything after the first token

A pair is split as lm-evaluation-harness does. An empty context is the token
that begins texts. Texts get the tokenizer's special tokens, as prompts do.

Rows of output, in the order of the input, natural logarithms:

    {"id": 0, "logprob": -2.5, "tokens": [6437, 13], "logprobs": [-2.25, -0.25],
     "is_greedy": false, "perplexity": 3.49}

`is_greedy`: at each position the token is the likeliest one.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from ...cli.fields import MISSING, add_flags, group, option
from ...cli.model_options import ModelOptions
from ..engine.options import EngineOptions
from .output_options import output, resume


@dataclasses.dataclass(frozen=True)
class ScoreOptions:
    """The options of the command, beyond those of the model and the engine."""

    input: Path = option(
        MISSING,
        'rows {"context", "continuation"} or {"token_ids", "start"} or {"prompt"}',
        metavar="JSONL",
        names=("--input", "-i"),
    )
    output: Path | None = output()
    resume: bool = resume()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(group(parser, "model"), ModelOptions)
    add_flags(parser, ScoreOptions, shown={"output": "standard output"})
    add_flags(group(parser, "engine"), EngineOptions)
