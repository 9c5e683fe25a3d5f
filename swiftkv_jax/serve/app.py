"""State that all routes share: the model's tokenizer and engine, keys, options."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from .. import __version__
from ..infer.engine.engine import Engine
from ..infer.engine.grammar import Matcher
from ..infer.structured.structured_outputs import GrammarCompiler
from ..text.chat_messages import normalize_tools
from .bodies.forms import Form
from .bodies.media import replace_media
from .bodies.params import truncation_of
from .bodies.template_options import template_options, variables_of
from .errors import APIError, invalid, unsupported
from .http.auth import Keys
from .options import ServerOptions
from .protocol import MAX_MESSAGES, ChatBody, TokenizeBody
from .service.adapters import NO_ADAPTER, ServedAdapter, ServedAdapters
from .service.service import Service
from .text.grammar_process import CheckedCompiler
from .text.grammars import GrammarQueue
from .text.prompts import Encoding, Prompt, PromptEncoder
from .text.reasoning import Reasoning, reasoning_of
from .text.token_text import TokenSpellings
from .text.tool_formats import ToolFormat, tool_format_of


class Loaded(NamedTuple):
    """A loaded model, as a server needs it."""

    engine: Engine
    tokenizer: Any
    sampling_defaults: Mapping[str, Any]
    """Fields of `SamplingParams` that checkpoint and flags set, for requests that leave them
    out."""
    prefill_rate: float = 0.0
    """Tokens/s, as measured before the first request; 0 if it is not known."""
    compiler: GrammarCompiler | None = None
    """Compiler for structured outputs; None refuses them."""
    adapters: Mapping[str, str] = {}
    """The engine's adapters, and the directory of each."""
    facts: Mapping[str, str] = {}
    """Facts on which draws depend besides the engine's options: the digest of the weights, the
    mesh, the kind of device."""


class App:
    """Everything that the handlers use. Made before the model is loaded; `prepare` follows."""

    def __init__(self, options: ServerOptions, model_name: str):
        self.options = options
        self.model_names = options.served_model_name or (model_name,)
        self.service = Service(options, self.model_names[0])
        self.adapters = ServedAdapters(self.service, {}, 0)
        self.keys = Keys(options.api_keys)
        self.allowed_hosts = frozenset(host.lower() for host in options.allowed_hosts or ())
        self.created = int(time.time())
        self.max_body_size = options.body_limit(0)
        self.scoring = False
        self.fingerprint = ""
        self.sampling_defaults: Mapping[str, Any] = {}
        self.tokenizer: Any = None
        self.encoder: PromptEncoder
        self.grammars: GrammarQueue | None = None
        """Compiler of grammars; None refuses them."""
        self.reasoning: Reasoning | None = None
        self.tool_format: ToolFormat | None = None
        """Format of calls; None refuses tools."""

    def prepare(self, loaded: Loaded) -> None:
        """Make what requests need besides the service, in the thread that has loaded the model: it
        takes a moment."""
        engine = loaded.engine
        options = engine.options
        tokenizer = loaded.tokenizer
        template = str(getattr(tokenizer, "chat_template", None) or "")
        self.tokenizer = tokenizer
        self.sampling_defaults = loaded.sampling_defaults
        places = engine.model_runner.shapes.num_adapters
        adapters = {
            name: ServedAdapter(name, root, engine.adapters.prompt_digest(name))
            for name, root in loaded.adapters.items()
        }
        self.adapters = ServedAdapters(self.service, adapters, places)
        self.max_body_size = self.options.body_limit(engine.max_model_len)
        self.scoring = options.scoring
        self.fingerprint = system_fingerprint(engine, loaded.facts)
        self.encoder = PromptEncoder(
            tokenizer,
            max_model_len=engine.max_model_len,
            vocab_size=engine.config.vocab_size,
            page_size=engine.model_runner.shapes.page_size,
            caching=options.enable_prefix_caching,
        )
        if loaded.compiler is not None:
            compiler = CheckedCompiler(loaded.compiler)
            self.grammars = GrammarQueue(compiler, queue_timeout=self.options.queue_timeout)
        self.template_variables = variables_of(template)
        self.reasoning = reasoning_of(
            self.options.reasoning_parser,
            tokenizer,
            template,
            vocab_size=engine.config.vocab_size,
            eos_token_ids=engine.eos_token_ids,
        )
        if "tools" in self.template_variables:
            parser = self.options.tool_call_parser
            self.tool_format = tool_format_of(parser, tokenizer, template)
        self.spellings = TokenSpellings(tokenizer)
        self.spellings_as_ids = TokenSpellings(tokenizer, as_ids=True)

    def check_model(self, name: str | None) -> None:
        """Raise `APIError` for a model that is not served. None is the one that is."""
        if name is not None and name not in self.model_names and self.adapters.get(name) is None:
            served = ", ".join(map(repr, [self.model_names[0], *self.adapters.names()]))
            message = f"the model {name!r} is not served here; served are: {served}"
            raise APIError(404, "model_not_found", message, param="model")

    def adapter_of(self, name: str | None) -> ServedAdapter:
        """The adapter of a request for this model; `NO_ADAPTER` for the model itself. Raises
        `APIError` for one that was unloaded since `check_model`."""
        self.check_model(name)
        return self.adapters.get(name) or NO_ADAPTER

    async def encode_chat(
        self,
        body: ChatBody | TokenizeBody,
        salt: str,
        num_bytes: int,
        *,
        counting: bool = False,
        prompt_digest: bytes = b"",
    ) -> Prompt:
        """The prompt of the messages of a body, on which `replace_media` is done. `counting` and
        `prompt_digest` are those of `Encoding`. Raises `APIError`."""
        if not body.messages or len(body.messages) > MAX_MESSAGES:
            raise invalid("messages", f"`messages` must have 1 to {MAX_MESSAGES} messages")
        if not getattr(self.tokenizer, "chat_template", None):
            raise unsupported(
                "messages", "this model has no chat template: use /v1/completions, or a chat model"
            )
        go_on = bool(body.continue_final_message)
        if body.add_generation_prompt and go_on:
            raise invalid(
                "continue_final_message",
                "`continue_final_message` and `add_generation_prompt` exclude each other",
            )
        variables = template_options(
            body,
            self.template_variables,
            self.options.chat_template_kwargs,
            reasons=self.reasoning is not None,
        )
        truncation = None
        if isinstance(body, ChatBody):
            truncation = truncation_of(body, self.service.max_model_len)
        body.messages = replace_media(body.messages)
        return await self.encoder.encode_chat(
            body.messages,
            Encoding(
                salt,
                "messages",
                bool(body.add_special_tokens),
                truncation,
                counting,
                prompt_digest,
            ),
            variables=variables,
            num_bytes=num_bytes,
            add_generation_prompt=not go_on and body.add_generation_prompt is not False,
            continue_final_message=go_on,
            tools=normalize_tools(msgspec.to_builtins(body.tools)),
        )

    async def matcher_of(self, form: Form) -> Matcher | None:
        """Return the matcher that keeps an answer in its form; None for free text. Raises
        `APIError`."""
        if form.grammar is None:
            return None
        if self.grammars is None:
            raise unsupported(form.param, f"`{form.param}`: this server follows no grammars")
        return await self.grammars.matcher_of(form.grammar, form.param)

    def close(self) -> bool:
        """End the threads that make prompts and grammars; False if a grammar is still compiled."""
        self.encoder.close()
        return self.grammars is None or self.grammars.close()


def system_fingerprint(engine: Engine, facts: Mapping[str, str]) -> str:
    """Equal for servers that answer a seed alike: version, weights, architecture, cut, cache, mesh
    and kind of device. `facts` are those of `Loaded`."""
    options = engine.options
    cache = options.kv_cache_dtype, options.page_size, options.generated_kv
    digest = hashlib.sha256(repr((engine.config, cache, sorted(facts.items()))).encode())
    return f"swiftkv-{__version__}-{digest.hexdigest()[:8]}"
