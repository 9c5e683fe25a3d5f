"""`python -m swiftkv_jax.infer chat`: a conversation in the terminal.

The conversation so far stays in the KV cache, so each turn prefills only what is new. Ctrl-C stops
a reply and keeps what there is of it; at the prompt it ends the session. Without --model the demo
model answers, which continues Python, by the packaged template `plain`. Lines that begin with / are
commands; //text sends /text:

    /reset        forget the conversation
    /system TEXT  set the first message
    /help         list these lines
    /exit         end the session
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from ...cli.fields import add_flags, group, option
from ...cli.model_options import ModelOptions
from ..engine.options import EngineOptions
from ..engine.sampling_params import SamplingParams
from .chat_template import chat_template

MAX_TOKENS = 512
"""`SamplingParams.max_tokens` of a chat."""
LINES = (__doc__ or "").partition(":\n\n")[2].rstrip()
"""The lines that begin with /, for people."""


@dataclasses.dataclass(frozen=True)
class ChatOptions:
    """The options of the command, beyond those of the model, the sampling and the engine."""

    chat_template: Path | None = chat_template()
    system_prompt: str | None = option(None, "first message of every conversation", metavar="TEXT")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(group(parser, "model"), ModelOptions)
    add_flags(group(parser, "conversation"), ChatOptions)
    shown = {"max_tokens": MAX_TOKENS}
    left_out = ("n", "logprobs")
    add_flags(group(parser, "sampling"), SamplingParams, shown=shown, leave_out=left_out)
    add_flags(group(parser, "engine"), EngineOptions)
