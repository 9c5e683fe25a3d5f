"""`python -m swiftkv_jax.infer chat`: a conversation in the terminal.

What the model has seen of a conversation stays in the KV cache, so each turn prefills only what is
new. Ctrl-C stops a reply and keeps what there is of it; while nothing is being said it ends the
session. Lines that begin with / are commands:

    /reset        forget the conversation          /stats        of the last reply
    /undo         forget the last line and reply   /save FILE    the conversation as JSON; /save! FILE replaces a file
    /system TEXT  set the first message            /load FILE    go on with one that was saved
    /exit         end the session
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from ...cli.exit import OK, log
from ...errors import DataError, UsageError
from ...io.files import write_json
from ...io.jsonl import parse
from ..engine.engine import Engine
from ..engine.requests import NOT_FINITE, Request, RequestOutput
from ..engine.sampling_params import SamplingParams
from ..text import TextStream, encode_chat
from .flags import (
    add_engine_flags,
    add_model_flags,
    add_sampling_flags,
    engine_options,
    load_model,
    sampling_params,
    start_engine,
)

MAX_MODEL_LEN = 8192
Message = dict[str, str]


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser, demo=False)  # which continues Python, and knows no turns
    parser.add_argument(
        "--system-prompt", metavar="TEXT", help="first message of every conversation"
    )
    add_sampling_flags(parser, max_tokens=512)
    add_engine_flags(parser)


def main(args: argparse.Namespace) -> int:
    sampling_params(args)  # mistakes in flags are told before weights are read
    engine_options(args)
    model, mesh = load_model(args)
    if jax.process_count() > 1:
        raise UsageError(
            "chat reads a terminal, which belongs to one process, and there are several: use "
            "generate"
        )
    params, tokenizer = sampling_params(args, model), model.tokenizer
    encode_chat(
        tokenizer, [{"role": "user", "content": ""}]
    )  # a tokenizer without a template fails now
    longest = min(MAX_MODEL_LEN, model.config.max_position_embeddings)
    options = engine_options(args, max_model_len=longest, max_num_seqs=1, decode_steps=1)
    engine = start_engine(args, model, mesh, options)
    del model  # the engine has its own copy of the layers: memory for one, not two
    log(
        "/reset forgets the conversation, /exit ends it, Ctrl-C stops a reply; /help lists the rest"
    )
    Chat(engine, tokenizer, params, args.system_prompt).loop()
    return OK


class Chat:
    """A conversation, and what a line does to it."""

    def __init__(self, engine: Engine, tokenizer: Any, params: SamplingParams, system: str | None):
        self._engine, self._tokenizer, self._params = engine, tokenizer, params
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages: list[Message] = list(self._system)
        self._last: tuple[RequestOutput, int, int] | None = None
        """Last event of the last reply, its tokens, and those of its prompt."""
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: log(
                __doc__.partition("commands:\n\n")[2].rstrip() if __doc__ else ""
            ),
            "/load": self._load,
            "/reset": self._reset,
            "/save": self._save,
            "/save!": lambda path: self._save(path, replace=True),
            "/stats": self._stats,
            "/system": self._set_system,
            "/undo": self._undo,
        }

    def loop(self) -> None:
        """Until /exit, or the end of standard input."""
        while (line := _read_line()) not in (None, "/exit"):
            command, _, rest = line.partition(" ")
            try:
                if command in self._commands:
                    self._commands[command](rest.strip())
                elif command.startswith("/"):
                    log(
                        f"error: {command}: no such command; known are /exit, "
                        f"{', '.join(self._commands)}"
                    )
                elif line:
                    self._turn(line)
            except (UsageError, DataError, OSError) as error:
                log(f"error: {error}")

    # Turns --------------------------------------------------------------------

    def _turn(self, line: str) -> None:
        """The user's line and the reply, printed as it comes. Raises `UsageError` if the line does
        not fit, and forgets it."""
        asked = [*self.messages, {"role": "user", "content": line}]
        prompt = encode_chat(self._tokenizer, asked)
        room, limit = self._engine.max_model_len - len(prompt), self._engine.max_model_len
        if room < 1:
            raise UsageError(
                f"the conversation would have {len(prompt)} tokens, and needs at least one more "
                f"for a reply, above the limit of {limit}: "
                "/undo, /reset, or a higher --max-model-len"
            )
        tokens = min(self._params.max_tokens, room)
        params = dataclasses.replace(
            self._params, max_tokens=tokens, min_tokens=min(self._params.min_tokens, tokens)
        )
        reply, end = self._reply(Request(prompt, params))
        self.messages = [*asked, {"role": "assistant", "content": reply}]
        if end == "length" and tokens == room:
            log(f"(the conversation has reached the limit of {limit} tokens: /undo or /reset)")

    def _reply(self, request: Request) -> tuple[str, str | None]:
        """The text, and why it ended; None if Ctrl-C did it. Raises `DataError` where the model
        broke down."""
        stream, reply, end = TextStream.of(self._tokenizer, request), "", None
        id = self._engine.add_request(request)
        with _interrupts() as interrupted:
            while end is None and not interrupted:
                for event in self._engine.step():
                    if event.request == id:
                        reply += _print(stream.push(event.tokens))
                        end = "stop" if stream.stopped else event.finish_reason
                        self._last = event, len(stream.token_ids), len(request.prompt)
        self._engine.abort_request(id)
        reply += _print(stream.finish())
        _print("\n")
        if interrupted:
            log("(stopped)")
        if end == "error":
            raise DataError(NOT_FINITE)
        return reply, end

    # Commands -----------------------------------------------------------------

    def _reset(self, _: str) -> None:
        self.messages = list(self._system)

    def _undo(self, _: str) -> None:
        if len(self.messages) < 2 or self.messages[-1]["role"] != "assistant":
            raise UsageError("/undo: there is nothing to forget")
        del self.messages[-2:]

    def _set_system(self, text: str) -> None:
        begun = (
            self.messages[1:]
            if self.messages and self.messages[0]["role"] == "system"
            else self.messages
        )
        self._system = [{"role": "system", "content": text}] if text else []
        self.messages = [*self._system, *begun]

    def _stats(self, _: str) -> None:
        if self._last is None:
            raise UsageError("/stats: nothing has been said yet")
        event, tokens, prompt = self._last
        timing = event.timing
        assert timing.first_token is not None and timing.last_token is not None
        seconds = timing.last_token - timing.first_token
        rate = f", {(tokens - 1) / seconds:.1f} tokens/s" if tokens > 1 and seconds > 0 else ""
        log(
            f"prompt: {prompt} tokens, {event.cached_tokens} cached; first token after "
            f"{timing.first_token - timing.submitted:.3f} s; "
            f"reply: {tokens} tokens{rate}"
        )

    def _save(self, name: str, *, replace: bool = False) -> None:
        path = _path("/save", name)
        if path.exists() and not replace:
            raise UsageError(f"/save {path}: exists already; /save! {path} replaces it")
        write_json(path, {"messages": self.messages})
        log(f"saved {len(self.messages)} messages in {path}")

    def _load(self, name: str) -> None:
        path = _path("/load", name)
        try:
            messages = parse(path.read_bytes()).get("messages")
        except DataError as error:
            raise DataError(f"/load {path}: {error}") from None
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise DataError(
                f'/load {path}: expected {{"messages": [{{"role": ..., "content": ...}}, ...]}}'
            )
        encode_chat(self._tokenizer, messages)  # what the template refuses is not taken over
        self.messages = messages
        log(f"loaded {len(messages)} messages from {path}")


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"role", "content"}
        and all(isinstance(text, str) for text in value.values())
    )


def _path(command: str, name: str) -> Path:
    if not name:
        raise UsageError(f"{command} needs the name of a file")
    return Path(name).expanduser()


def _read_line() -> str | None:
    print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    return line.strip() if line else None


def _print(text: str) -> str:
    print(text, end="", flush=True)
    return text


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Grows by one with each Ctrl-C, so that it falls between two steps, never into one."""
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
