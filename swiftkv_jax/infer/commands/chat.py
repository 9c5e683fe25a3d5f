"""The command `chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from ...checkpoints.auxiliary import has_tokenizer
from ...checkpoints.tokenizer import has_chat_template
from ...cli import OK
from ...cli.fields import given
from ...cli.model_loading import load_model, open_model
from ...cli.model_options import ModelOptions
from ...errors import DataError, UsageError
from ...model.model import AuxiliaryFiles
from ...process.files import write_json
from ...process.jsonl import parse_object
from ..engine.engine import Engine
from ..engine.options import EngineOptions
from ..engine.requests import Request, RequestOutput
from ..engine.sampling_params import SamplingParams
from ..text import TextStream, encode_chat
from .chat_arguments import LINES, MAX_TOKENS, ChatOptions
from .chat_template import PACKAGED_TEMPLATE, chat_template_text, set_chat_template
from .sampling_options import sampling_params
from .start import start_engine

logger = logging.getLogger(__name__)

MAX_MODEL_LEN = 8192
Message = dict[str, str]


def main(args: argparse.Namespace) -> int:
    model_options = ModelOptions.from_args(args)
    command = ChatOptions(**given(ChatOptions, args))
    engine_fields = given(EngineOptions, args)
    sampling_fields: dict[str, Any] = {"max_tokens": MAX_TOKENS}
    sampling_fields |= given(SamplingParams, args)
    # Mistakes in the command line end the run before weights are read.
    SamplingParams(**sampling_fields)
    EngineOptions(**engine_fields)
    file = command.chat_template
    if file is None and model_options.model is None:
        file = Path(PACKAGED_TEMPLATE)  # the demo model has none
    template = None if file is None else chat_template_text(file)
    _check_can_chat(open_model(model_options).auxiliary_files, template)
    model, mesh = load_model(model_options)
    if jax.process_count() > 1:
        raise UsageError(
            "chat reads a terminal, which is that of one process, and there are several: use "
            "generate"
        )
    params = sampling_params(sampling_fields, model)
    tokenizer = model.tokenizer
    if template is not None:
        set_chat_template(tokenizer, template, str(file))
    encode_chat(tokenizer, [{"role": "user", "content": ""}])  # needs a template that works
    longest = min(MAX_MODEL_LEN, model.config.max_position_embeddings)
    defaults: dict[str, Any] = {
        "max_model_len": longest,
        "max_num_seqs": 1,
        "decode_steps": 1,
    }
    engine = start_engine(model, mesh, EngineOptions(**defaults | engine_fields), model_options)
    del model  # the engine has its own copy of the layers: memory for one, not two
    logger.info(
        "/reset forgets the conversation, /exit ends it, Ctrl-C stops a reply; /help lists the rest"
    )
    Chat(engine, tokenizer, params, command.system_prompt).loop()
    return OK


def _check_can_chat(auxiliary_files: AuxiliaryFiles, template: str | None) -> None:
    """Raise `UsageError` for a checkpoint whose files have no tokenizer, or no chat template where
    none is given."""
    if not has_tokenizer(auxiliary_files):
        raise UsageError("this checkpoint has no tokenizer: a chat needs one")
    if template is None and not has_chat_template(auxiliary_files.contents):
        raise UsageError(
            "this checkpoint has no chat template: give one with `chat_template` FILE, or use a "
            "chat model, or plain prompts"
        )


class Chat:
    """A conversation, and the commands that change it."""

    def __init__(self, engine: Engine, tokenizer: Any, params: SamplingParams, system: str | None):
        self._engine = engine
        self._tokenizer = tokenizer
        self._params = params
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages: list[Message] = list(self._system)
        self._last: tuple[RequestOutput, int, int] | None = None
        """Last output of the last reply, number of its tokens, and number of tokens of its
        prompt."""
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: logger.info(LINES),
            "/load": self._load,
            "/reset": self._reset,
            "/save": self._save,
            "/save!": lambda path: self._save(path, replace=True),
            "/stats": self._stats,
            "/system": self._set_system,
            "/undo": self._undo,
        }

    def loop(self) -> None:
        """Read lines until /exit or the end of standard input."""
        while (line := _read_line()) not in (None, "/exit"):
            try:
                self._handle(line)
            except (UsageError, DataError, OSError) as error:
                logger.error("%s", error)

    def _handle(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        if line.startswith("//"):
            self._turn(line[1:])
        elif command in self._commands:
            self._commands[command](rest.strip())
        elif line.startswith("/"):
            raise UsageError(
                f"{command}: no such command; known are /exit, {', '.join(self._commands)}; "
                f"/{line} sends the line"
            )
        elif line:
            self._turn(line)

    # Turns --------------------------------------------------------------------

    def _turn(self, line: str) -> None:
        """Add the user's line and the reply, which is printed as it comes. Raises `UsageError` if
        the line does not fit, and leaves the conversation as it was."""
        messages = [*self.messages, {"role": "user", "content": line}]
        prompt = encode_chat(self._tokenizer, messages)
        room = self._engine.max_model_len - len(prompt)
        limit = self._engine.max_model_len
        if room < 1:
            raise UsageError(
                f"the conversation would have {len(prompt)} tokens, and needs at least one more "
                f"for a reply, above the limit of {limit}: "
                "/undo, /reset, or a higher `max_model_len`"
            )
        tokens = min(self._params.max_tokens, room)
        params = dataclasses.replace(
            self._params, max_tokens=tokens, min_tokens=min(self._params.min_tokens, tokens)
        )
        reply, end = self._reply(Request(prompt, params))
        self.messages = [*messages, {"role": "assistant", "content": reply}]
        if end == "length" and tokens == room:
            logger.info(
                f"(the conversation has reached the limit of {limit} tokens: /undo or /reset)"
            )

    def _reply(self, request: Request) -> tuple[str, str | None]:
        """Text of the reply, and its finish reason, None if Ctrl-C ended it. Raises `DataError` if
        the model's logits are not finite."""
        stream = TextStream.of(self._tokenizer, request)
        reply = ""
        end = None
        error = ""
        request_id = self._engine.add_request(request)
        with _interrupts() as interrupted:
            while end is None and not interrupted:
                for output in self._engine.step():
                    if output.request_id == request_id:
                        reply += _print(stream.push(output.token_ids))
                        end = "stop" if stream.stopped else output.finish_reason
                        error = output.error
                        self._last = output, len(stream.token_ids), len(request.prompt)
        self._engine.abort_request(request_id)
        reply += _print(stream.finish())
        _print("\n")
        if interrupted:
            logger.info("(stopped)")
        if end == "error":
            raise DataError(error)
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
        output, tokens, prompt = self._last
        timing = output.timing
        assert timing.first_token is not None and timing.last_token is not None
        seconds = timing.last_token - timing.first_token
        rate = f", {(tokens - 1) / seconds:.1f} tokens/s" if tokens > 1 and seconds > 0 else ""
        logger.info(
            f"prompt: {prompt} tokens, {output.num_cached_tokens} cached; first token after "
            f"{timing.first_token - timing.submitted:.3f} s; "
            f"reply: {tokens} tokens{rate}"
        )

    def _save(self, name: str, *, replace: bool = False) -> None:
        path = _path("/save", name)
        if path.exists() and not replace:
            raise UsageError(f"/save {path}: exists already; /save! {path} replaces it")
        write_json(path, {"messages": self.messages})
        logger.info(f"saved {len(self.messages)} messages in {path}")

    def _load(self, name: str) -> None:
        path = _path("/load", name)
        try:
            messages = parse_object(path.read_bytes()).get("messages")
        except DataError as error:
            raise DataError(f"/load {path}: {error}") from None
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise DataError(
                f'/load {path}: expected {{"messages": [{{"role": ..., "content": ...}}, ...]}}'
            )
        encode_chat(self._tokenizer, messages)  # raises if the template refuses them
        self.messages = messages
        logger.info(f"loaded {len(messages)} messages from {path}")


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
    """A list that grows by one with each Ctrl-C, to be looked at between two steps."""
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
