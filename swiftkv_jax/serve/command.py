"""The command `serve`: loads a model and serves it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import importlib.util
import logging
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from ..cli import OK, json_log
from ..cli.fields import given
from ..cli.model_loading import open_model, read_model, setup_model_devices
from ..cli.model_options import ModelOptions
from ..errors import UsageError
from ..infer.commands.chat_template import chat_template_text, set_chat_template
from ..infer.commands.sampling_options import checkpoint_params
from ..infer.commands.start import start_engine
from ..infer.engine.engine import Engine
from ..infer.engine.options import EngineOptions
from ..infer.engine.requests import Request
from ..infer.engine.sampling_params import SamplingParams
from ..infer.runner.build import check_speculative
from ..infer.runner.serving_form import served_config
from ..infer.structured.structured_outputs import GrammarCompiler
from ..model.model import Model
from ..process.distributed import announces_several
from .arguments import ServeCommand
from .lora_modules import check_lora_modules
from .options import DEFAULT_TEMPERATURE, ServerOptions, is_loopback

if TYPE_CHECKING:
    from ..checkpoints.source import Source
    from .distributed.followers import Followers

logger = logging.getLogger(__name__)

PACKAGES = ("starlette", "uvicorn", "msgspec", "prometheus_client", "llguidance")
"""Packages that the extra `serve` installs."""


def main(args: argparse.Namespace) -> int:
    if args.log_json:
        json_log.begin()
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise UsageError(f"the server needs {', '.join(missing)}: pip install 'swiftkv-jax[serve]'")
    if args.directory is not None:
        if args.model is not None:
            raise UsageError(f"{args.directory} and `model`={args.model}: give one of them")
        args.model = args.directory
    command = ServeCommand(**given(ServeCommand, args))
    model_options = ModelOptions.from_args(args)
    options = server_options(args)
    defaults: dict[str, Any] = {"structured_outputs": True, "single_step_rows": None}
    engine_options = EngineOptions(**defaults | given(EngineOptions, args))
    if options.kv_events_config is not None and not engine_options.enable_prefix_caching:
        raise UsageError("`kv_events_config` has no events without `enable_prefix_caching`")
    sampling = given(SamplingParams, args)
    SamplingParams(**sampling)
    if options.allow_runtime_lora is not None and not engine_options.enable_lora:
        raise UsageError("`allow_runtime_lora` needs `enable_lora`")
    template = chat_template_text(command.chat_template)
    modules: dict[str, Path] = {}
    from ..checkpoints.auxiliary import has_tokenizer
    from ..checkpoints.hub import local_path
    from ..checkpoints.tokenizer import has_chat_template
    from . import processes, server  # after the look for their packages

    opened = functools.cache(functools.partial(open_model, model_options))

    def load(mesh: Mesh | None, report: server.Report) -> server.Loaded:
        check_options(engine_options, opened(), model_options.uses_swiftkv, mesh)
        model = read_model(model_options, mesh)
        defaults = checkpoint_params(model) | sampling
        if "temperature" not in defaults:
            logger.info(
                "neither checkpoint nor flags set a temperature: requests that leave it out draw "
                "at %s; a small model may need less",
                DEFAULT_TEMPERATURE,
            )
        tokenizer = model.tokenizer
        set_chat_template(tokenizer, template, command.chat_template)
        facts = model_facts(model, mesh, model.uses_swiftkv(model_options.uses_swiftkv))
        report("compiling")
        compiler = None
        chosen = engine_options
        if chosen.structured_outputs:
            try:
                compiler = GrammarCompiler(
                    tokenizer, vocab_size=model.config.vocab_size, eos_token_ids=model.eos_token_ids
                )
            except UsageError as error:
                logger.warning("no structured outputs: %s", error)
                chosen = dataclasses.replace(chosen, structured_outputs=False)
        engine = start_engine(
            model, mesh, chosen, model_options, on_compile=functools.partial(report, "compiling")
        )
        report("warming")
        for name, path in modules.items():
            engine.adapters.load(name, path)
        adapters = {name: str(path) for name, path in modules.items()}
        rate = warm(engine)
        return server.Loaded(engine, tokenizer, defaults, rate, compiler, adapters, facts)

    def serve(load: processes.Load, followers: Followers | None = None) -> int:
        source = opened()
        files = source.auxiliary_files
        for name, path in command.lora_modules.items():
            modules[name] = local_path(path, weights=False)
        taken = options.served_model_name or (model_options.name,)
        swiftkv, config = model_options.uses_swiftkv, source.config
        if not (source.has_delta if swiftkv is None else swiftkv):
            config = config.cut(config.num_layers)
        check_lora_modules(modules, engine_options, config, taken)
        if not has_tokenizer(files):
            raise UsageError("this checkpoint has no tokenizer: a server needs one")
        if template is None and not has_chat_template(files.contents):
            logger.warning(
                "this checkpoint has no chat template: chats will be refused; `chat_template` FILE "
                "gives one"
            )
        removing: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if command.uds is not None:
            listener = server.listen_unix(command.uds)
            removing = server.removing_unix(command.uds)
            at = f"unix:{command.uds}"
        else:
            listener = server.listen(command.host, command.port)
            host = f"[{command.host}]" if ":" in command.host else command.host
            scheme = "http" if options.ssl_certfile is None else "https"
            at = f"{scheme}://{host}:{listener.getsockname()[1]}"
        logger.info(f"listening on {at}")
        name = model_options.name
        again = command.api_key_file and (lambda: _keys(command))
        with removing, asyncio.Runner(loop_factory=server.loop_factory()) as runner:
            served = server.serve(
                options, name, listener, load, read_keys=again, followers=followers
            )
            return runner.run(served) or OK

    if announces_several(model_options.coordinator_address):
        opened()  # a download ends before the others are waited for
        return processes.run(model_options, engine_options, options.stall_timeout, load, serve)
    return serve(lambda report: load(setup_model_devices(model_options), report))


def check_options(
    options: EngineOptions, source: Source, swiftkv: bool | None, mesh: Mesh | None
) -> None:
    """Raise `UsageError`, `CheckpointError` or `ConfigError` for what the model cannot be served
    with, before its weights are read."""
    swiftkv = source.has_delta if swiftkv is None else swiftkv
    generated_kv, exact_tail = options.generated_kv, options.exact_tail
    served = served_config(source.config, swiftkv, generated_kv, exact_tail, mesh=mesh)
    check_speculative(options.speculative, served)


def model_facts(model: Model, mesh: Mesh | None, swiftkv: bool) -> dict[str, str]:
    """Return the facts on which answers to a seed depend, for `system_fingerprint`. The digest of
    the weights is one read of them by the devices; with several processes, all of them call
    this."""
    from ..checkpoints.digest import digest_all

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
    length = min(engine.model_runner.shapes.chunks[-1], engine.max_model_len - 1)
    seconds = 1.0
    for _ in range(2):
        salt = secrets.token_hex()  # an earlier server may have left pages on disk
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        start = time.perf_counter()
        for _ in engine.run([Request([0] * length, params, cache_salt=salt)]):
            pass
        seconds = time.perf_counter() - start
    engine.reset_stats()
    return length / seconds


def server_options(args: argparse.Namespace) -> ServerOptions:
    """Make the options from the arguments of `add_arguments`. Raises `UsageError`."""
    command = ServeCommand(**given(ServeCommand, args))
    fields = given(ServerOptions, args)
    fields["api_keys"] = _keys(command)
    loopback = command.uds is not None or is_loopback(command.host)
    if not loopback and not fields["api_keys"] and not command.insecure:
        raise UsageError(
            f"`host`={command.host} can be reached from other machines: give `api_key` or "
            f"`api_key_file`, or say `insecure`"
        )
    if fields.get("allow_runtime_lora") is not None and not fields["api_keys"]:
        raise UsageError("`allow_runtime_lora` needs `api_key` or `api_key_file`")
    if "allowed_hosts" in fields or (loopback and command.uds is None):
        own = "localhost", "127.0.0.1", "[::1]", command.host
        fields["allowed_hosts"] = (*own, *fields.get("allowed_hosts", ()))
    return ServerOptions(**fields)


def _keys(command: ServeCommand) -> dict[str, str]:
    from .http.auth import read_keys

    return read_keys(command.api_key, command.api_key_file)
