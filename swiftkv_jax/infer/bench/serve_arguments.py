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
from pathlib import Path

from ...cli import token_count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000", help="server (default: %(default)s)")
    add("--api-key", metavar="KEY", help="a key of the server")
    add("--model", metavar="NAME", help="model (default: the server's first)")
    add("--dataset", type=Path, metavar="JSONL", help="prompts (default: random token ids)")
    add("--input-len", type=token_count, default=512, metavar="N", help="(default: %(default)s)")
    add("--output-len", type=token_count, default=128, metavar="N", help="(default: %(default)s)")
    add(
        "--prefix-len",
        type=token_count,
        default=0,
        metavar="N",
        help="tokens that all prompts begin with, part of --input-len (default: 0)",
    )
    add(
        "--vocab-size",
        type=int,
        default=1000,
        metavar="N",
        help="random ids are below this (default: %(default)s)",
    )
    add("--num-prompts", type=int, default=100, metavar="N", help="(default: %(default)s)")
    add(
        "--request-rate",
        type=float,
        default=float("inf"),
        metavar="R",
        help="requests a second (default: all at once)",
    )
    add(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="shape of the gamma distribution of their distances: 1 is Poisson, more is more "
        "even (default: 1)",
    )
    add("--max-concurrency", type=int, metavar="N", help="requests that run (default: all)")
    add("--num-warmups", type=int, default=1, metavar="N", help="first, untimed (default: 1)")
    add("--goodput", metavar="NAME:MS,...", help="share within ttft:MS, tpot:MS, e2e:MS")
    add("--extra-body", default="{}", metavar="JSON", help="more fields of a body")
    add("--no-ignore-eos", action="store_true", help="let answers end by themselves")
    add("--seed", type=int, default=0, help="of prompts and arrivals (default: 0)")
    add("--output", "-o", type=Path, metavar="JSON", help="all figures and times")
