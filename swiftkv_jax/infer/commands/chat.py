"""The command `chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
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
from ...process import interrupts
from ..engine.engine import Engine
from ..engine.options import EngineOptions
from ..engine.requests import Request
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
    template = chat_template_text(file)
    _check_can_chat(open_model(model_options).auxiliary_files, template)
    model, mesh = load_model(model_options)
    if jax.process_count() > 1:
        raise UsageError(
            "chat reads a terminal, which is that of one process, and there are several: use "
            "generate"
        )
    params = sampling_params(sampling_fields, model)
    tokenizer = model.tokenizer
    set_chat_template(tokenizer, template, file)
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
        self._system = system
        self._turns: list[Message] = []

    def loop(self) -> None:
        """Read lines until /exit or the end of standard input."""
        while (line := _read_line()) not in (None, "/exit"):
            try:
                self._handle(line)
            except (UsageError, DataError) as error:
                logger.error("%s", error)

    def _handle(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        if command == "/help":
            logger.info(LINES)
        elif command == "/reset":
            self._turns = []
        elif command == "/system":
            self._system = rest.strip()
        elif line.startswith("/") and not line.startswith("//"):
            raise UsageError(
                f"{command}: no such command; known are /exit, /help, /reset, /system; /{line} "
                f"sends the line"
            )
        elif line:
            self._answer(line.removeprefix("/"))

    def _answer(self, line: str) -> None:
        """Add the user's line and the reply, which is printed as it comes. Raises `UsageError` if
        the line does not fit, and leaves the conversation as it was."""
        turns = [*self._turns, {"role": "user", "content": line}]
        system = [{"role": "system", "content": self._system}] if self._system else []
        prompt = encode_chat(self._tokenizer, [*system, *turns])
        room = self._engine.max_model_len - len(prompt)
        limit = self._engine.max_model_len
        if room < 1:
            raise UsageError(
                f"the conversation would have {len(prompt)} tokens, and needs at least one more "
                f"for a reply, above the limit of {limit}: "
                "/reset, or a higher `max_model_len`"
            )
        tokens = min(self._params.max_tokens, room)
        params = dataclasses.replace(
            self._params, max_tokens=tokens, min_tokens=min(self._params.min_tokens, tokens)
        )
        reply, end = self._reply(Request(prompt, params))
        self._turns = [*turns, {"role": "assistant", "content": reply}]
        if end == "length" and tokens == room:
            logger.info(f"(the conversation has reached the limit of {limit} tokens: /reset)")

    def _reply(self, request: Request) -> tuple[str, str | None]:
        """Text of the reply, and its finish reason, None if Ctrl-C ended it. Raises `DataError` if
        the model's logits are not finite."""
        stream = TextStream.of(self._tokenizer, request)
        reply = ""
        end = None
        error = ""
        request_id = self._engine.add_request(request)
        with interrupts.held_back() as seen:
            while end is None and not seen:
                for output in self._engine.step():
                    if output.request_id == request_id:
                        reply += _print(stream.push(output.token_ids))
                        end = "stop" if stream.stopped else output.finish_reason
                        error = output.error
            interrupted = bool(seen)
            seen.clear()
        self._engine.abort_request(request_id)
        reply += _print(stream.finish())
        _print("\n")
        if interrupted:
            logger.info("(stopped)")
        if end == "error":
            raise DataError(error)
        return reply, end


def _read_line() -> str | None:
    print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    return line.strip() if line else None


def _print(text: str) -> str:
    print(text, end="", flush=True)
    return text
