"""`python -m swiftkv_jax.infer serve`: an OpenAI-compatible server.

    python -m swiftkv_jax.infer serve --model llama-3.1-8b-swiftkv
    curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\
        -d '{"prompt": "Once upon a time", "max_tokens": 32}'

Every client of OpenAI's API works with it: chat, completions, streams, log-probabilities. It needs
the extra `serve`: pip install 'swiftkv-jax[serve]'. docs/server.md describes it.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib.util
import ipaddress
import logging
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from ...chat_template import render_chat
from ...cli import OK, json_log
from ...cli.model_options import (
    ModelOptions,
    add_model_arguments,
    open_model,
    read_model,
    setup_model_devices,
)
from ...distributed import announces_several
from ...errors import DataError, UsageError
from ...model import Model
from ..commands.engine_options import (
    add_engine_arguments,
    given_engine_options,
    given_fields,
    start_engine,
    token_count,
)
from ..commands.sampling_options import (
    add_distribution_arguments,
    checkpoint_params,
    given_sampling_params,
)
from ..engine.engine import Engine
from ..engine.options import EngineOptions
from ..engine.requests import Request
from ..engine.sampling_params import SamplingParams
from ..structured_outputs import GrammarCompiler
from .options import FAIR_BY, KVEventsConfig, ServerOptions
from .text.reasoning import FORMATS as REASONING_FORMATS
from .text.tool_calls import FORMATS

if TYPE_CHECKING:
    from .distributed.followers import Followers

logger = logging.getLogger(__name__)

PACKAGES = ("starlette", "uvicorn", "msgspec", "prometheus_client", "llguidance")
"""What the extra `serve` installs."""
PACKAGED_TEMPLATE = "plain"
"""Name of the chat template that is packaged."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("directory", nargs="?", type=Path, metavar="DIR", help="the checkpoint, as --model")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="0 chooses a free one (default: %(default)s)")
    add("--uds", type=Path, metavar="FILE", help="Unix domain socket, in place of host and port")
    add("--root-path", metavar="PATH", help="path under which a proxy serves this, like /llm")
    add("--ssl-certfile", type=Path, metavar="FILE", help="certificate chain of TLS, in PEM")
    add("--ssl-keyfile", type=Path, metavar="FILE", help="its private key, without a password")
    add(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="name of the model; repeat to add more (default: its folder's)",
    )
    add(
        "--api-key",
        action="append",
        metavar="KEY",
        help="accept requests with this key; repeatable",
    )
    add("--api-key-file", type=Path, metavar="FILE", help="a key a line, NAME:KEY; mode 600")
    add("--insecure", action="store_true", help="listen beyond this machine without keys")
    add("--metrics-public", action="store_true", default=None, help="/metrics needs no key")
    _add_listed(parser, "--allowed-origins", "web pages that may call the server")
    _add_listed(
        parser, "--allowed-hosts", "values of the header Host; default on loopback: its own"
    )
    add("--unknown-fields", choices=("refuse", "ignore"), help="(default: refuse)")
    add(
        "--tool-call-parser",
        choices=("auto", *FORMATS, "none"),
        help="how the model writes calls of tools (default: by its chat template)",
    )
    add(
        "--reasoning-parser",
        choices=("auto", *REASONING_FORMATS, "none"),
        help="how the model marks its reasoning (default: by its chat template)",
    )
    add(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="Jinja, in place of the checkpoint's chat template; `plain` is packaged: a "
        "conversation as plain text",
    )
    _add_listed(
        parser, "--chat-template-kwargs", "variables of the chat template that requests may set"
    )
    add(
        "--no-structured-outputs",
        dest="structured_outputs",
        action="store_false",
        default=None,
        help="no grammars, JSON schemas and forced calls; some programs fewer to compile",
    )
    add(
        "--share-prefix-cache",
        action="store_true",
        default=None,
        help="keys share cached prefixes; times then tell what others asked",
    )
    add(
        "--enable-scoring",
        dest="scoring",
        action="store_true",
        default=None,
        help="log-probabilities of prompts (echo with logprobs)",
    )
    add(
        "--enable-tokenizer-info",
        "--enable-tokenizer-info-endpoint",
        dest="tokenizer_info",
        action="store_true",
        default=None,
        help="/tokenizer_info: special tokens and the chat template",
    )
    number = {"type": int, "metavar": "N"}
    add("--max-connections", **number, help="(default: 4096)")
    add("--max-body-size", **number, help="bytes (default: 64 for each token of max-model-len)")
    add("--max-num-queued-reqs", **number, help="sequences that wait and run (default: 4 a slot)")
    add(
        "--max-num-queued-tokens",
        type=token_count,
        metavar="N",
        help="prompt tokens that wait (default: 30 s of prefill)",
    )
    add("--max-queued-bytes", **number, help="bytes of bodies in memory (default: 256 MiB)")
    add("--max-reqs-per-key", **number, help="sequences of one key (default: no limit)")
    add("--overload-status", type=int, choices=(429, 503), help="(default: 429)")
    add("--fair-by", choices=FAIR_BY, help="whose requests take turns (default: key)")
    for name, text in (
        ("queue", "a request may wait (default: 120)"),
        ("request", "a request may take (default: 3600)"),
        ("write", "a stream may stay unread (default: 60)"),
        ("shutdown", "requests may take after SIGTERM (default: 30)"),
        ("stall", "without an engine step before /ready fails (default: 60)"),
        ("keep-alive", "a connection may be idle (default: 75)"),
    ):
        add(f"--{name}-timeout", type=float, metavar="S", help=f"seconds {text}")
    add(
        "--shutdown-delay",
        type=float,
        metavar="S",
        help="seconds in which requests are accepted after SIGTERM (default: 0)",
    )
    add(
        "--sse-keep-alive",
        type=float,
        metavar="S",
        help="seconds of silence in a stream before a comment (default: 10)",
    )
    add(
        "--default-max-tokens",
        type=token_count,
        metavar="N",
        help="max_tokens of chats that name none (default: what there is room for)",
    )
    add("--max-tokens-limit", type=token_count, metavar="N", help="most max_tokens")
    add("--max-temperature", type=float, help="(default: 2)")
    add(
        "--no-ignore-eos",
        dest="allow_ignore_eos",
        action="store_false",
        default=None,
        help="refuse ignore_eos",
    )
    add(
        "--no-page",
        "--no-ui",
        dest="page",
        action="store_false",
        default=None,
        help="no page to talk to the model at /",
    )
    add(
        "--enable-per-request-metrics",
        dest="request_metrics",
        action="store_true",
        default=None,
        help="`metrics` in answers: the times of the request",
    )
    add(
        "--log-requests",
        "--enable-log-requests",
        action="store_true",
        default=None,
        help="log the beginning of prompts",
    )
    add("--max-log-len", **number, help="characters of them (default: 200)")
    add("--log-json", action="store_true", default=None, help="a log of JSON, an object a line")
    add(
        "--kv-events-config",
        metavar="JSON",
        help="publish events of the prefix cache, as in vLLM: "
        '{"endpoint": "tcp://*:5557", "replay_endpoint", "topic", ...}',
    )
    add_model_arguments(parser)
    add_distribution_arguments(parser, temperature=1)
    add_engine_arguments(parser)


def _add_listed(parser: argparse.ArgumentParser, flag: str, text: str) -> None:
    parser.add_argument(flag, type=lambda value: tuple(value.split(",")), metavar="A,B", help=text)


def main(args: argparse.Namespace) -> int:
    if args.log_json:
        json_log.begin()
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise UsageError(f"the server needs {', '.join(missing)}: pip install 'swiftkv-jax[serve]'")
    if args.directory is not None:
        if args.model is not None:
            raise UsageError(f"{args.directory} and `model`={args.model}: give one of them")
        args.model = args.directory
    model_options, options = ModelOptions.from_args(args), server_options(args)
    defaults: dict[str, Any] = {"structured_outputs": True, "single_step_rows": None}
    engine_options = EngineOptions(**defaults | given_engine_options(args))
    if options.kv_events_config is not None and not engine_options.enable_prefix_caching:
        raise UsageError("`kv_events_config` has no events without `enable_prefix_caching`")
    sampling = given_sampling_params(args)
    SamplingParams(**sampling)
    template = None if args.chat_template is None else chat_template_text(args.chat_template)
    from ...checkpoints.auxiliary import has_tokenizer
    from . import processes, server  # after the look for their packages

    def load(mesh: Mesh | None, say: Callable[[str], None]) -> server.Loaded:
        model = read_model(model_options, mesh)
        defaults = {"temperature": 1.0} | checkpoint_params(model) | sampling
        tokenizer = model.tokenizer
        if template is not None:
            set_chat_template(tokenizer, template, str(args.chat_template))
        facts = model_facts(model, mesh, model.uses_swiftkv(model_options.uses_swiftkv))
        say("compiling")
        compiler, chosen = None, engine_options
        if chosen.structured_outputs:
            try:
                compiler = GrammarCompiler(
                    tokenizer,
                    vocab_size=model.config.vocab_size,
                    eos_token_ids=model.eos_token_ids,
                )
            except UsageError as error:
                logger.warning("no structured outputs: %s", error)
                chosen = dataclasses.replace(chosen, structured_outputs=False)
        engine = start_engine(model, mesh, chosen, model_options)
        say("warming")
        return server.Loaded(engine, tokenizer, defaults, warm(engine), compiler, facts)

    def serve(load: processes.Load, followers: Followers | None = None) -> int:
        if not has_tokenizer(open_model(model_options).auxiliary_files):
            raise UsageError("this checkpoint has no tokenizer: a server needs one")
        if args.uds is not None:
            listener, at = server.listen_unix(args.uds), f"unix:{args.uds}"
        else:
            listener = server.listen(args.host, args.port)
            host = f"[{args.host}]" if ":" in args.host else args.host
            scheme = "http" if options.ssl_certfile is None else "https"
            at = f"{scheme}://{host}:{listener.getsockname()[1]}"
        logger.info(f"listening on {at}")
        name = model_options.path.resolve().name
        again = None if args.api_key_file is None else (lambda: _keys(args))
        with asyncio.Runner(loop_factory=server.loop_factory()) as runner:
            served = server.serve(
                options, name, listener, load, read_keys=again, followers=followers
            )
            try:
                return runner.run(served) or OK
            finally:
                if args.uds is not None:
                    args.uds.unlink(missing_ok=True)

    if announces_several(model_options.coordinator_address):
        return processes.run(model_options, engine_options, options.stall_timeout, load, serve)
    return serve(lambda say: load(setup_model_devices(model_options), say))


def chat_template_text(file: Path) -> str:
    """A chat template's, of a file or of the one that is packaged. Raises `UsageError`."""
    try:
        if str(file) == PACKAGED_TEMPLATE and not file.exists():
            return resources.files(__package__).joinpath("plain.jinja").read_text("utf-8")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"`chat_template`={file}: {error}") from None


def set_chat_template(tokenizer: Any, template: str, name: str) -> None:
    """Let `tokenizer` use `template`, which errors call `name`. Raises `UsageError` for one that
    cannot render a message of a user."""
    tokenizer.chat_template = template
    try:
        render_chat(tokenizer, [{"role": "user", "content": "?"}], add_generation_prompt=True)
    except DataError as error:
        raise UsageError(f"`chat_template`={name}: {error}") from None


def model_facts(model: Model, mesh: Mesh | None, swiftkv: bool) -> dict[str, str]:
    """What the answers to a seed depend on, for `system_fingerprint`. The digest of the weights is
    one read of them by the devices; with several processes, all of them call this."""
    from ...checkpoints.digest import digest_all

    shape = {} if mesh is None else {name: size for name, size in mesh.shape.items() if size > 1}
    return {
        "weights": digest_all(jax.tree.leaves((model.llama, model.swiftkv))),
        "swiftkv": str(swiftkv),
        "mesh": str(shape),
        "device": jax.devices()[0].device_kind,
    }


def warm(engine: Engine) -> float:
    """Run a chunk and a decode call, twice: the first time is slower. Nothing of it is counted.
    Returns the tokens/s of the second, a lower bound of prefill's."""
    length = min(engine.model_runner.limits.chunk_tokens, engine.max_model_len - 1)
    seconds = 1.0
    for salt in ("first", "second"):
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        start = time.perf_counter()
        for _ in engine.run([Request([0] * length, params, cache_salt=salt)]):
            pass
        seconds = time.perf_counter() - start
    engine.reset_stats()
    return length / seconds


def server_options(args: argparse.Namespace) -> ServerOptions:
    """From the arguments of `add_flags`. Raises `UsageError`."""
    given: dict[str, Any] = given_fields(ServerOptions, args)
    given["served_model_name"] = tuple(args.served_model_name or ())
    given["api_keys"] = _keys(args)
    if args.kv_events_config is not None:
        given["kv_events_config"] = KVEventsConfig.from_json(args.kv_events_config)
    loopback = args.uds is not None or is_loopback(args.host)
    if not loopback and not given["api_keys"] and not args.insecure:
        raise UsageError(
            f"`host`={args.host} can be reached from other machines: give `api_key` or "
            f"`api_key_file`, or say `insecure`"
        )
    if loopback and args.uds is None and args.allowed_hosts is None:
        given["allowed_hosts"] = ("localhost", "127.0.0.1", "[::1]", args.host)
    return ServerOptions(**given)


def _keys(args: argparse.Namespace) -> dict[str, str]:
    from .http.auth import read_keys

    return read_keys(args.api_key or (), args.api_key_file)


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
