"""The application: routes, and around every one of them keys, errors, the log and the counts."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from ... import __version__
from ..engine.engine import Engine
from ..engine.grammar import Matcher
from ..structured_outputs import GrammarCompiler
from . import generate
from .auth import Keys
from .errors import APIError, invalid, printable, unsupported
from .exchange import ClientGone, Exchange, Receive, Scope, Send
from .followers import Followers
from .forms import Form
from .grammars import GrammarQueue
from .options import ServerOptions
from .page import page
from .prompts import Prompt, PromptEncoder
from .protocol import MAX_MESSAGES, ChatBody, TokenizeBody
from .reasoning import Reasoning, reasoning_of
from .responses import responses
from .schema import openapi
from .score import score
from .service import Service
from .template_options import template_options, variables_of
from .token_routes import detokenize, tokenize
from .token_text import TokenSpellings
from .tool_calls import format_of

logger = logging.getLogger(__name__)

Handler = Callable[["App", Exchange], Awaitable[None]]
OTHER_MODELS = ("embeddings", "audio", "images", "files", "fine_tuning", "moderations", "batches")
"""What OpenAI has under /v1/ besides text."""
QUIET = ("/", "/health", "/ready", "/ping", "/metrics", "/load")
"""Routes that are not logged."""


class App:
    """Everything that the handlers use. Made before the model is loaded; `open` follows."""

    def __init__(self, options: ServerOptions, model_name: str):
        self.options = options
        self.model_names = options.served_model_name or (model_name,)
        self.service = Service(options, self.model_names[0])
        self.keys = Keys(options.api_keys)
        self.created = int(time.time())
        self.max_body_size = options.body_limit(0)
        self.scoring = False
        self.fingerprint = ""
        self.sampling_defaults: Mapping[str, Any] = {}
        self.tokenizer: Any = None
        self.encoder: PromptEncoder
        self.reasoning: Reasoning | None = None

    def open(
        self,
        engine: Engine,
        tokenizer: Any,
        sampling_defaults: Mapping[str, Any],
        prefill_rate: float,
        compiler: GrammarCompiler | None,
        followers: Followers | None = None,
    ) -> None:
        """Take requests, now that the engine is ready; the arguments are those of `Loaded`, and
        the other processes of the engine's mesh."""
        options = engine.options
        self.tokenizer, self.sampling_defaults = tokenizer, sampling_defaults
        self.max_body_size = self.options.body_limit(engine.max_model_len)
        self.scoring = options.scoring
        self.fingerprint = _fingerprint(engine)
        self.encoder = PromptEncoder(
            tokenizer,
            max_model_len=engine.max_model_len,
            vocab_size=engine.config.vocab_size,
            page_size=engine.model_runner.shapes.page_size,
            caching=options.enable_prefix_caching,
        )
        self.grammars: GrammarQueue | None = None
        """None refuses grammars."""
        if compiler is not None:
            self.grammars = GrammarQueue(compiler, queue_timeout=self.options.queue_timeout)
        template = str(getattr(tokenizer, "chat_template", None) or "")
        self.template_variables = variables_of(template)
        self.reasoning = reasoning_of(
            self.options.reasoning_parser,
            tokenizer,
            template,
            vocab_size=engine.config.vocab_size,
            eos_token_ids=engine.eos_token_ids,
        )
        chosen = self.options.tool_call_parser
        if chosen == "auto":
            self.tool_format = format_of(template)
        else:
            self.tool_format = None if chosen == "none" else chosen
        self.spellings = TokenSpellings(tokenizer)
        self.spellings_as_ids = TokenSpellings(tokenizer, as_ids=True)
        self.service.open(engine, prefill_rate, followers)

    def check_model(self, name: str | None) -> None:
        """Raise `APIError` for a model that is not served. None is the one that is."""
        if name is not None and name not in self.model_names:
            raise APIError(
                404,
                "model_not_found",
                f"the model {name!r} is not served here; {self.model_names[0]!r} is",
                param="model",
            )

    async def encode_chat(self, body: ChatBody | TokenizeBody, salt: str, num_bytes: int) -> Prompt:
        """The prompt of the messages of a body. Raises `APIError`."""
        if not body.messages or len(body.messages) > MAX_MESSAGES:
            raise invalid("messages", f"`messages` must have 1 to {MAX_MESSAGES} messages")
        if not getattr(self.tokenizer, "chat_template", None):
            raise unsupported(
                "messages", "this model has no chat template: use /v1/completions, or a chat model"
            )
        generation_prompt = body.add_generation_prompt
        go_on = bool(body.continue_final_message)
        if generation_prompt is None:
            generation_prompt = not go_on
        if generation_prompt and go_on:
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
        return await self.encoder.encode_chat(
            body.messages,
            variables=variables,
            num_bytes=num_bytes,
            salt=salt,
            add_generation_prompt=generation_prompt,
            continue_final_message=go_on,
            add_special_tokens=bool(body.add_special_tokens),
            tools=None if body.tools is None else msgspec.to_builtins(body.tools),
        )

    async def compile_grammar(self, form: Form) -> Matcher | None:
        """What keeps an answer in its form; None for free text. Raises `APIError`."""
        if (grammar := form.grammar) is None:
            return None
        if self.grammars is None:
            raise unsupported(form.param, f"`{form.param}`: this server follows no grammars")
        return await self.grammars.compile(grammar, form.param)

    def close(self) -> None:
        """End the threads that make prompts and grammars."""
        self.encoder.close()
        if self.grammars is not None:
            self.grammars.close()

    def asgi(self) -> Starlette:
        """The application that a web server runs."""
        root = [
            ("/v1/chat/completions", ["POST"], generate.chat_completions),
            ("/v1/completions", ["POST"], generate.completions),
            ("/v1/responses", ["POST"], responses),
            ("/v1/score", ["POST"], score),
            ("/v1/models", ["GET"], models),
            ("/v1/models/{id:path}", ["GET"], model),
            ("/tokenize", ["POST"], tokenize),
            ("/detokenize", ["POST"], detokenize),
            ("/health", ["GET"], health),
            ("/ready", ["GET"], ready),
            ("/ping", ["GET", "POST"], ready),
            ("/metrics", ["GET"], metrics),
            ("/version", ["GET"], version),
            ("/load", ["GET"], load),
            ("/openapi.json", ["GET"], schema),
        ]
        public = {"/health", "/ready", "/ping", "/version", "/"}
        if self.options.page:
            root.append(("/", ["GET"], page))
        if self.options.metrics_public:
            public.add("/metrics")
        routes = [
            Route(path, Endpoint(self, path, handler, path in public), methods=methods)
            for path, methods, handler in root
        ]
        middleware = []
        if self.options.allowed_origins:
            middleware.append(
                Middleware(
                    CORSMiddleware,
                    allow_origins=list(self.options.allowed_origins),
                    allow_methods=["GET", "POST"],
                    allow_headers=["authorization", "content-type", "x-api-key", "x-request-id"],
                    expose_headers=["x-request-id", "server-timing", "retry-after"],
                )
            )
        found = Starlette(
            routes=routes,
            middleware=middleware,
            exception_handlers={HTTPException: Endpoint(self, "other", refuse, True).of_exception},
        )
        found.router.redirect_slashes = False  # to whatever Host a client names
        return found


class Endpoint:
    """A handler as an ASGI application."""

    def __init__(self, app: App, route: str, handler: Handler, public: bool):
        self._app, self._route, self._handler, self._public = app, route, handler, public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        exchange = Exchange(scope, receive, send, write_timeout=app.options.write_timeout)
        if app.service.state == "draining":
            exchange.extra["connection"] = "close"
        try:
            try:
                exchange.check_head()
                self._check_host(exchange)
                if not self._public:
                    exchange.key = app.keys.name_of(exchange.headers)
                await self._handler(app, exchange)
                await exchange.flush()
            except APIError as error:
                await exchange.send_error(error)
            except ClientGone:
                raise
            except Exception as error:
                logger.exception("request %s failed", exchange.request_id)
                message = f"an internal error; the log has it under {exchange.request_id}"
                if not isinstance(error, OSError):
                    await exchange.send_error(APIError(500, "internal", message))
        except ClientGone as gone:
            app.service.metrics.slow_clients += bool(gone.args)
            exchange.log["error"] = "slow_client" if gone.args else "client_gone"
        finally:
            exchange.close()
            app.service.metrics.http[self._route, exchange.status] += 1
            if self._route not in QUIET:
                self._log(exchange)

    async def of_exception(self, request: Any, error: Exception) -> Any:
        """Starlette's own refusals, of paths and methods, in our shape."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            scope["refusal"] = error
            await self(scope, receive, send)

        return answer

    def _check_host(self, exchange: Exchange) -> None:
        """A web page whose name resolves to a loopback address must not reach the server."""
        allowed = self._app.options.allowed_hosts
        if allowed is None:
            return
        host = exchange.headers.get(b"host", b"").decode("latin-1")
        name = host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
        if name not in allowed:
            raise APIError(403, "host_not_allowed", f"the host {name!r} is not served here")

    def _log(self, exchange: Exchange) -> None:
        total = 1e3 * (time.monotonic() - exchange.arrival)
        found = {
            "id": exchange.request_id,
            "key": exchange.key,
            "route": self._route,
            "status": exchange.status,
            **exchange.log,
            "total_ms": round(total, 1),
            "bytes_in": exchange.num_bytes_in,
            "bytes_out": exchange.num_bytes_out,
        }
        if self._app.options.log_json:
            logger.info("%s", json.dumps(found))
        else:
            parts = (f"{name}={value}" for name, value in found.items() if value not in ("", []))
            logger.info("%s", printable(" ".join(parts), 1000))


# Handlers ---------------------------------------------------------------------------


async def refuse(app: App, exchange: Exchange) -> None:
    """A path or a method that is none."""
    error, path = exchange.scope["refusal"], exchange.scope["path"]
    if error.status_code == 405:
        message = f"{exchange.method} is not possible here"
        raise APIError(405, "method_not_allowed", message, headers=dict(error.headers or {}))
    if any(path.startswith(f"/v1/{name}") for name in OTHER_MODELS):
        raise APIError(404, "unknown_route", f"{path}: this server only generates text")
    raise APIError(404, "unknown_route", f"there is no {path}")


async def health(app: App, exchange: Exchange) -> None:
    """GET /health: the process answers."""
    await exchange.send_json(200, {"status": "ok"})


async def ready(app: App, exchange: Exchange) -> None:
    """GET /ready, /ping: requests are taken."""
    service = app.service
    found: dict[str, Any] = {"status": service.state}
    if service.state == "starting":
        found["phase"] = service.phase
    await exchange.send_json(200 if service.state == "ready" else 503, found)


async def version(app: App, exchange: Exchange) -> None:
    """GET /version"""
    await exchange.send_json(200, {"version": __version__})


async def load(app: App, exchange: Exchange) -> None:
    """GET /load: requests that wait and run."""
    await exchange.send_json(200, {"server_load": app.service.num_admitted})


async def metrics(app: App, exchange: Exchange) -> None:
    """GET /metrics"""
    accept = exchange.headers.get(b"accept", b"").decode("latin-1")
    await exchange.send_bytes(200, *app.service.metrics.exposition(accept))


async def schema(app: App, exchange: Exchange) -> None:
    """GET /openapi.json"""
    await exchange.send_json(200, openapi())


async def models(app: App, exchange: Exchange) -> None:
    """GET /v1/models"""
    cards = [_card(app, name) for name in app.model_names]
    await exchange.send_json(200, {"object": "list", "data": cards})


async def model(app: App, exchange: Exchange) -> None:
    """GET /v1/models/{id}"""
    name = exchange.scope["path_params"]["id"]
    app.check_model(name)
    await exchange.send_json(200, _card(app, name))


def _card(app: App, name: str) -> dict[str, Any]:
    is_open = app.service.engine is not None
    return {
        "id": name,
        "object": "model",
        "created": app.created,
        "owned_by": "swiftkv-jax",
        "root": app.model_names[0],
        "parent": None,
        "max_model_len": app.service.max_model_len if is_open else None,
        "default_max_tokens": app.options.default_max_tokens,
        "has_chat_template": bool(app.tokenizer.chat_template) if is_open else None,
        "permission": [],
    }


def _fingerprint(engine: Engine) -> str:
    """Equal for servers that answer a seed alike: version, architecture, cut and cache."""
    options = engine.options
    facts = repr((engine.config, options.kv_cache_dtype, options.page_size, options.generated_kv))
    digest = hashlib.sha256(facts.encode()).hexdigest()[:8]
    return f"swiftkv-{__version__}-{digest}"
