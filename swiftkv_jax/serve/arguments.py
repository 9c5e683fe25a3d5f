"""`python -m swiftkv_jax.infer serve`: an OpenAI-compatible server.

    python -m swiftkv_jax.infer serve --model runs/8b/model
    curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\
        -d '{"prompt": "Once upon a time", "max_tokens": 32}'

Clients of OpenAI's API work with it: chat, completions, streams, log-probabilities. It needs the
extra `serve`: pip install 'swiftkv-jax[serve]'. docs/server.md describes it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path

from ..cli import token_count
from ..cli.fields import add_flags, group
from ..cli.model_options import ModelOptions
from ..infer.engine.options import EngineOptions
from ..infer.engine.sampling_params import SamplingParams
from .options import REASONING_PARSERS, SCHEDULING_POLICIES
from .text.tool_formats import FORMATS

OF_REQUESTS = (
    *("max_tokens", "min_tokens", "logit_bias", "seed", "stop", "stop_token_ids", "ignore_eos"),
    *("n", "logprobs"),
)
"""Sampling parameters that only requests choose."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all arguments of the server, in groups; `ServerOptions` says more about each."""
    parser.usage = f"{parser.prog} [DIR] [options]"
    parser.add_argument("directory", nargs="?", metavar="DIR", help="model, the same as --model")
    add_flags(group(parser, "model"), ModelOptions)
    add_names_and_formats(parser.add_argument_group("names and formats"))
    add_address(parser.add_argument_group("address"))
    add_access(parser.add_argument_group("access"))
    add_limits(parser.add_argument_group("limits of requests"))
    add_admission(parser.add_argument_group("admission"))
    add_timeouts(parser.add_argument_group("timeouts"))
    add_endpoints(parser.add_argument_group("optional features"))
    add_logs(parser.add_argument_group("logs and events"))
    add_flags(
        group(parser, "sampling of requests that do not choose"),
        SamplingParams,
        leave_out=OF_REQUESTS,
        shown={"temperature": 1.0},
    )
    add_flags(group(parser, "engine"), EngineOptions)


def add_names_and_formats(parser: argparse._ActionsContainer) -> None:
    """What the model is called, and how its texts are written and read."""
    add = parser.add_argument
    add(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="name of the model in the API; repeat to accept further ones (default: that on "
        "the Hub, or of the folder)",
    )
    add(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="Jinja template that replaces the checkpoint's; `plain` is one that is packaged, "
        "which writes a conversation as plain text",
    )
    _add_listed(
        parser, "--chat-template-kwargs", "variables of the chat template that requests may set"
    )
    add(
        "--tool-call-parser",
        choices=("auto", *FORMATS, "none"),
        help="format in which the model calls tools (default: that of its chat template)",
    )
    add(
        "--enable-auto-tool-choice",
        action="store_true",
        help="accepted for command lines of vLLM; has no effect",
    )
    add(
        "--reasoning-parser",
        type=lambda name: "think" if name in ("qwen3", "deepseek_r1") else name,
        choices=REASONING_PARSERS,
        help="how the model marks its reasoning; think is also qwen3 and deepseek_r1 (default: as "
        "its chat template does)",
    )


def add_address(parser: argparse._ActionsContainer) -> None:
    """Where the server listens."""
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    add("--uds", type=Path, metavar="FILE", help="Unix domain socket, instead of --host and --port")
    add("--root-path", metavar="PATH", help="prefix of all paths behind a proxy, such as /llm")
    add("--ssl-certfile", type=Path, metavar="FILE", help="TLS certificate chain, PEM")
    add("--ssl-keyfile", type=Path, metavar="FILE", help="its private key, without a password")


def add_access(parser: argparse._ActionsContainer) -> None:
    """Who may ask."""
    add = parser.add_argument
    add("--api-key", action="append", metavar="KEY", help="key that requests need; repeatable")
    add(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="file with a line NAME:KEY for each key, of mode 600; read again on SIGHUP",
    )
    add("--insecure", action="store_true", help="listen beyond this machine without keys")
    _add_switch(parser, "metrics_public", "answer /metrics without a key", "--metrics-public")
    _add_switch(
        parser,
        "share_prefix_cache",
        "share cached prefixes between keys: response times then tell what others have asked",
        "--share-prefix-cache",
    )
    _add_listed(
        parser,
        "--allowed-origins",
        "origins of web pages that may call the server (CORS); * is all",
        _check_origin,
    )
    _add_listed(
        parser, "--allowed-hosts", "Host headers to answer (default: on loopback its own, else all)"
    )


def add_limits(parser: argparse._ActionsContainer) -> None:
    """What a request may ask for."""
    add = parser.add_argument
    add(
        "--default-max-tokens",
        type=token_count,
        metavar="N",
        help="max_tokens of chats that name none (default: all that fit)",
    )
    add("--max-tokens-limit", type=token_count, metavar="N", help="largest max_tokens accepted")
    add(
        "--unknown-fields",
        choices=("refuse", "ignore"),
        help="what to do with fields that the API does not have (default: refuse)",
    )
    add(
        "--max-body-size",
        type=int,
        metavar="N",
        help="bytes of a request's body (default: 64 for each token of --max-model-len)",
    )


def add_admission(parser: argparse._ActionsContainer) -> None:
    """How many requests are accepted, and in which order they run."""
    add, number = parser.add_argument, {"type": int, "metavar": "N"}
    add("--max-connections", **number, help="(default: 4096)")
    add(
        "--max-num-queued-reqs",
        **number,
        help="sequences that wait or run (default: four for each slot, at least 64)",
    )
    add(
        "--max-num-queued-tokens",
        type=token_count,
        metavar="N",
        help="prompt tokens that wait (default: those of 30 s of prefill, "
        "at least four times --max-model-len)",
    )
    add("--max-queued-bytes", **number, help="bytes of bodies in memory (default: 256 MiB)")
    add("--max-reqs-per-key", **number, help="sequences of one key (default: no limit)")
    add(
        "--scheduling-policy",
        choices=SCHEDULING_POLICIES,
        help="order of the requests of one key: of arrival, or of their `priority` (default: fcfs)",
    )


def add_timeouts(parser: argparse._ActionsContainer) -> None:
    """How long things may take."""
    for name, text in (
        ("queue-timeout", "a request may wait (default: 120)"),
        ("request-timeout", "a request may take (default: 3600)"),
        ("write-timeout", "a client may leave a stream unread (default: 60)"),
        ("keep-alive-timeout", "a connection may be idle (default: 75)"),
        ("stall-timeout", "without an engine step after which /ready fails (default: 60)"),
        ("shutdown-timeout", "requests may take after SIGTERM (default: 30)"),
        ("shutdown-delay", "after SIGTERM in which requests are still accepted (default: 0)"),
        ("sse-keep-alive", "of silence after which a stream gets a comment (default: 10)"),
    ):
        parser.add_argument(f"--{name}", type=float, metavar="S", help=f"seconds {text}")


def add_endpoints(parser: argparse._ActionsContainer) -> None:
    """What the server offers, or does not."""
    _add_switch(
        parser,
        "structured_outputs",
        "no grammars, JSON schemas and forced tool calls, and fewer programs to compile",
        "--no-structured-outputs",
        value=False,
    )
    _add_switch(
        parser,
        "scoring",
        "log-probabilities of prompts: /v1/score, prompt_logprobs, and echo with logprobs",
        "--enable-scoring",
    )
    _add_switch(
        parser,
        "tokenizer_info",
        "/tokenizer_info: special tokens and the chat template",
        "--enable-tokenizer-info",
        "--enable-tokenizer-info-endpoint",
    )
    _add_switch(
        parser,
        "request_metrics",
        "`metrics` in answers: the times of the request",
        "--enable-per-request-metrics",
    )
    _add_switch(
        parser, "page", "no page at / to talk to the model", "--no-page", "--no-ui", value=False
    )


def add_logs(parser: argparse._ActionsContainer) -> None:
    """What is logged and published."""
    add = parser.add_argument
    _add_switch(
        parser,
        "log_requests",
        "log the beginning of each prompt",
        "--log-requests",
        "--enable-log-requests",
    )
    add("--max-log-len", type=int, metavar="N", help="characters of it (default: 200)")
    _add_switch(parser, "log_json", "log JSON objects, one in a line", "--log-json")
    add(
        "--kv-events-config",
        metavar="JSON",
        help="publish what enters and leaves the prefix cache, as vLLM does: "
        '{"endpoint": "tcp://*:5557", "replay_endpoint", "topic", ...}',
    )


def _add_switch(
    parser: argparse._ActionsContainer, dest: str, text: str, *flags: str, value: bool = True
) -> None:
    """Any of the flags sets `dest` to `value`. Without them it is None: the default is that of
    `ServerOptions`."""
    parser.add_argument(
        *flags, dest=dest, action="store_const", const=value, default=None, help=text
    )


def _add_listed(
    parser: argparse._ActionsContainer,
    flag: str,
    text: str,
    check: Callable[[str], object] = lambda entry: None,
) -> None:
    """A flag with a list, A,B or in JSON as vLLM takes it; `check` raises for a wrong entry what
    argparse reports."""

    def parse(value: str) -> tuple[str, ...]:
        entries: object = value.split(",")
        if value.lstrip()[:1] in ("[", '"'):
            try:
                entries = json.loads(value)
            except ValueError as error:
                raise argparse.ArgumentTypeError(f"{value!r} is not JSON: {error}") from None
        entries = [entries] if isinstance(entries, str) else entries
        if not (isinstance(entries, list) and all(isinstance(one, str) for one in entries)):
            raise argparse.ArgumentTypeError(f"{value!r} is not a list of texts")
        entries = [entry.strip() for entry in entries]
        if "" in entries:
            raise argparse.ArgumentTypeError(f"{value!r} has an empty entry")
        for entry in entries:
            check(entry)
        return tuple(entries)

    parser.add_argument(flag, type=parse, metavar="A,B", help=text)


def _check_origin(text: str) -> None:
    """An origin as browsers send it (RFC 6454, section 6.2): nothing else can match one."""
    if text in ("*", "null") or re.fullmatch(r"[a-z][a-z\d+.-]*://[^/\s?#@*A-Z]+", text):
        return
    raise argparse.ArgumentTypeError(
        f"{text!r} is not an origin, such as https://app.example or http://localhost:3000: "
        "scheme, host and port in lower case, without a path; * is every origin"
    )
