"""`python -m swiftkv_jax serve`: an OpenAI-compatible server.

    python -m swiftkv_jax serve --model runs/8b/model
    curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\
        -d '{"prompt": "Once upon a time", "max_tokens": 32}'

Clients of OpenAI's API work with it: chat, completions, streams, log-probabilities. It needs the
extra `serve`: pip install 'swiftkv-jax[serve]'. docs/server.md describes it.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path

from ..cli.fields import add_flags, group, option
from ..cli.model_options import ModelOptions
from ..infer.commands.chat_template import chat_template
from ..infer.engine.options import EngineOptions
from ..infer.engine.sampling_params import SamplingParams
from .lora_modules import parse_lora_module
from .options import DEFAULT_TEMPERATURE, ServerOptions

OF_REQUESTS = (
    *("max_tokens", "min_tokens", "logit_bias", "seed", "stop", "stop_token_ids", "ignore_eos"),
    *("n", "logprobs"),
)
"""Sampling parameters that only requests choose."""


@dataclasses.dataclass(frozen=True)
class ServeCommand:
    """Flags of the command that are no options of the server."""

    chat_template: Path | None = chat_template(group="names and formats")
    enable_auto_tool_choice: bool = option(
        False, "accepted for command lines of vLLM; has no effect"
    )
    lora_modules: Mapping[str, str] = option(
        {},
        "LoRA adapters of PEFT that requests choose by these names as their model, with "
        '--enable-lora; also in JSON, {"name", "path"}',
        metavar="NAME=DIR",
        parse=parse_lora_module,
        several=True,
    )
    host: str = option("127.0.0.1", "address to listen on (default: %(default)s)", group="address")
    port: int = option(8000, "0 takes a free one (default: %(default)s)")
    uds: Path | None = option(
        None, "Unix domain socket, instead of --host and --port", metavar="FILE"
    )
    api_key: tuple[str, ...] = option(
        (), "key that requests need; repeatable", metavar="KEY", group="access"
    )
    api_key_file: Path | None = option(
        None,
        "file with a line NAME:KEY for each key, of mode 600; read again on SIGHUP",
        metavar="FILE",
    )
    insecure: bool = option(False, "listen beyond this machine without keys")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{parser.prog} [DIR] [options]"
    parser.add_argument("directory", nargs="?", metavar="DIR", help="model, the same as --model")
    add_flags(group(parser, "model"), ModelOptions)
    add_flags(parser, ServeCommand)
    add_flags(parser, ServerOptions)
    add_flags(group(parser, "optional features"), EngineOptions, scope="server")
    add_flags(
        group(parser, "sampling of requests that do not choose"),
        SamplingParams,
        leave_out=OF_REQUESTS,
        shown={"temperature": DEFAULT_TEMPERATURE},
    )
    add_flags(group(parser, "engine"), EngineOptions)
