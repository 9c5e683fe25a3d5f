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
from pathlib import Path

from ...cli.model_options import add_model_arguments
from .engine_options import add_engine_arguments
from .output_options import add_output_arguments


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser.add_argument_group("model"))
    rows = 'rows {"context", "continuation"} or {"token_ids", "start"} or {"prompt"}'
    parser.add_argument("--input", "-i", type=Path, metavar="JSONL", required=True, help=rows)
    add_output_arguments(parser, "standard output")
    add_engine_arguments(parser.add_argument_group("engine"))
