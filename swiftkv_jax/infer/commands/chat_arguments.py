"""`python -m swiftkv_jax.infer chat`: a conversation in the terminal.

The conversation so far stays in the KV cache, so each turn prefills only what is new. Ctrl-C stops
a reply and keeps what there is of it; at the prompt it ends the session. Without --model the demo
model answers, which continues Python, by the packaged template `plain`. Lines that begin with / are
commands; //text sends /text:

    /reset        forget the conversation          /stats        of the last reply
    /undo         forget the last line and reply   /save FILE    the conversation as JSON
    /system TEXT  set the first message            /save! FILE   the same, replacing a file
    /exit         end the session                  /load FILE    go on with one that was saved
"""

from __future__ import annotations

import argparse

from ...cli.model_options import add_model_arguments
from .chat_template import add_chat_template_argument
from .engine_options import add_engine_arguments
from .sampling_options import add_sampling_arguments

LINES = (__doc__ or "").partition(":\n\n")[2].rstrip()
"""The lines that begin with /, for people."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser.add_argument_group("model"))
    conversation = parser.add_argument_group("conversation")
    add_chat_template_argument(conversation)
    conversation.add_argument(
        "--system-prompt", metavar="TEXT", help="first message of every conversation"
    )
    add_sampling_arguments(parser.add_argument_group("sampling"), max_tokens=512)
    add_engine_arguments(parser.add_argument_group("engine"))
