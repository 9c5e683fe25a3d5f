"""`python -m swiftkv_jax.infer bench serve`: how fast a server answers, any with OpenAI's API.

    python -m swiftkv_jax.infer bench serve --base-url http://127.0.0.1:8000 \\
        --input-len 2000 --output-len 250 --num-prompts 512 --max-concurrency 256 -o result.json

Prompts are random token ids, no two alike unless they share a prefix (--prefix-len), or those of a
file (--dataset, a JSON object with `prompt` in each line). Requests arrive at --request-rate, all
at once by default. Times are vLLM's: to the first token (TTFT), per further token of a request
(TPOT), between two events (ITL), to the last token (E2EL). A run in which this client needs more
than 60 % of a CPU core says nothing about the server: it ends with exit code 1. It uses no device.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from ...cli import token_count
from ...cli.fields import add_flags, option
from ...errors import UsageError

_DEFAULT = "(default: %(default)s)"


def parse_fields(text: str) -> dict[str, Any]:
    """Fields of a body, as JSON. Raises `UsageError`."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UsageError(f"`extra_body`: must be an object in JSON, got {text!r}")
    return found


@dataclasses.dataclass(frozen=True)
class ServeBenchOptions:
    """The options of the command."""

    base_url: str = option("http://127.0.0.1:8000", f"server {_DEFAULT}")
    api_key: str | None = option(None, "a key of the server", metavar="KEY")
    model: str | None = option(None, "model (default: the server's first)", metavar="NAME")
    dataset: Path | None = option(None, "prompts (default: random token ids)", metavar="JSONL")
    input_len: int = option(512, _DEFAULT, metavar="N", parse=token_count, at_least=1)
    output_len: int = option(128, _DEFAULT, metavar="N", parse=token_count, at_least=1)
    prefix_len: int = option(
        0,
        f"tokens that all prompts begin with, part of --input-len {_DEFAULT}",
        metavar="N",
        parse=token_count,
    )
    vocab_size: int = option(1000, f"random ids are below this {_DEFAULT}", metavar="N", at_least=1)
    num_prompts: int = option(100, _DEFAULT, metavar="N", at_least=1)
    request_rate: float = option(math.inf, "requests a second (default: all at once)", metavar="R")
    max_concurrency: int | None = option(
        None, "requests that run (default: all)", metavar="N", at_least=1
    )
    num_warmups: int = option(1, f"first, untimed {_DEFAULT}", metavar="N", at_least=0)
    extra_body: dict = option({}, "more fields of a body", metavar="JSON", convert=parse_fields)
    ignore_eos: bool = option(True, "let answers end by themselves", names=("--no-ignore-eos",))
    seed: int = option(0, f"of prompts and arrivals {_DEFAULT}")
    output: Path | None = option(
        None, "all figures and times", metavar="JSON", names=("--output", "-o")
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, ServeBenchOptions)
