"""`python -m swiftkv_jax.infer chat`: a conversation in the terminal. /reset forgets it, /exit ends it."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

from ..cli import OK, log
from ..errors import UsageError
from .flags import SWIFTKV, add_model_flags, add_sampling_flags, load_model, sampling_params
from .generate import Engine
from .sampling import SamplingParams
from .text import TextStream, encode_chat

MAX_MODEL_LEN = 8192


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    add_sampling_flags(parser, max_tokens=512)
    parser.add_argument("--system-prompt", metavar="TEXT", help="first message of every conversation")


def main(args: argparse.Namespace) -> int:
    params = sampling_params(args)
    model, mesh = load_model(args)
    system = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
    encode_chat(model.tokenizer, [*system, {"role": "user", "content": ""}])  # a tokenizer without a template fails now
    limit = args.max_model_len or min(MAX_MODEL_LEN, model.config.max_position_embeddings)
    engine = Engine(
        model,
        swiftkv=SWIFTKV[args.swiftkv],
        max_model_len=limit,
        max_num_seqs=1,
        decode_steps=1,
        mesh=mesh,
        attention=args.attention,
    )
    engine.warm_up()
    log("/reset forgets the conversation, /exit ends it, Ctrl-C stops a reply")

    messages = list(system)
    while (line := _read_line()) not in (None, "/exit"):
        if line == "/reset":
            messages = list(system)
        elif line:
            messages = _turn(engine, model.tokenizer, messages, line, params, args.stop)
    return OK


def _read_line() -> str | None:
    print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    return line.strip() if line else None


def _turn(engine: Engine, tokenizer: Any, messages: list[dict], line: str, params: SamplingParams, stops: list[str]) -> list[dict]:
    """The conversation with the user's line and the reply, printed as it comes; unchanged if the line does not fit."""
    asked = [*messages, {"role": "user", "content": line}]
    try:
        prompt = encode_chat(tokenizer, asked)
        room = max(engine.max_model_len - len(prompt), 1)
        events = engine.stream([prompt], dataclasses.replace(params, max_tokens=min(params.max_tokens, room)))
    except UsageError as error:
        log(f"error: {error} (or /reset)")
        return messages
    stream, reply = TextStream(tokenizer, stops), ""
    try:
        for event in events:
            reply += _print(stream.push(event.tokens))
            if stream.stopped:
                break
        reply += _print(stream.finish())
    except KeyboardInterrupt:
        log(" (stopped)")
    _print("\n")
    return [*asked, {"role": "assistant", "content": reply}]


def _print(text: str) -> str:
    print(text, end="", flush=True)
    return text
