"""The routes, and around every one of them keys, errors, the log and the counts."""

from __future__ import annotations

import base64
import datetime
import functools
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from ... import __version__
from ..app import App
from ..errors import APIError, internal, printable
from ..http.exchange import ClientGone, HTTPExchange, Receive, Scope, Send
from ..protocol import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    LoadAdapterBody,
    ScoreBody,
    TokenizeBody,
    UnloadAdapterBody,
)
from .adapters import load_adapter, unload_adapter
from .exposition import exposition
from .generate import chat, completion
from .message_bodies import CountTokensBody, MessagesBody
from .message_events import use_message_errors
from .messages import count_tokens, message
from .response_bodies import ResponsesBody
from .responses import response
from .run import Prepare, run
from .schema import openapi
from .score import score
from .token_routes import detokenize, tokenize, tokenizer_info

logger = logging.getLogger(__name__)

Handler = Callable[[App, HTTPExchange], Awaitable[None]]
OTHER_MODELS = ("embeddings", "audio", "images", "files", "fine_tuning", "moderations", "batches")
"""Paths that OpenAI has under /v1/ besides those for text."""
POLLED = ("/", "/health", "/ready", "/ping", "/metrics", "/load", "/v1/models")
"""Routes of which the log has only refusals and failures: not what succeeds, nor the 503 of a
server that is not ready."""


def asgi(app: App) -> Starlette:
    """The application that a web server runs."""
    served = [one for one in ROUTES if one.path != "/" or app.options.page]
    routes = [Route(one.path, Endpoint(app, one), methods=one.methods.split()) for one in served]
    middleware = []
    if app.options.allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(app.options.allowed_origins),
                allow_methods=["GET", "POST"],
                allow_private_network=True,
                allow_headers=["*"],  # OpenAI's JavaScript client sends x-stainless-* too
                expose_headers=["x-request-id", "server-timing", "retry-after"],
            )
        )
    found = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={HTTPException: Endpoint(app, OTHER).of_exception},
    )
    found.router.redirect_slashes = False  # to whatever Host a client names
    return found


class ServerRoute(NamedTuple):
    path: str
    methods: str
    handler: Handler
    summary: str = ""
    """Words of the OpenAPI document, which leaves out a route without any."""
    body: type[Body] | None = None
    public: bool = False
    """True for a route that needs no key."""


class Endpoint:
    """A handler as an ASGI application."""

    def __init__(self, app: App, route: ServerRoute):
        self._app = app
        self._route = route.path
        self._handler = route.handler
        self._public = route.public or (route.path == "/metrics" and app.options.metrics_public)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        exchange = HTTPExchange(scope, receive, send, write_timeout=app.options.write_timeout)
        if app.service.state == "draining":
            exchange.extra["connection"] = "close"
        if f"{scope['path']}/".startswith("/v1/messages/"):
            use_message_errors(exchange)
        try:
            try:
                exchange.check_head()
                self._check_host(exchange)
                if not self._public:
                    exchange.client = app.keys.client_of(exchange.headers)
                await self._handler(app, exchange)
                await exchange.flush()
            except APIError as error:
                await exchange.send_error(error)
            except ClientGone:
                raise
            except Exception:
                logger.exception("request %s failed", exchange.request_id)
                message = f"an internal error; the log has it under {exchange.request_id}"
                await exchange.send_error(internal(message))
        except ClientGone as gone:
            app.service.metrics.slow_clients += bool(gone.args)
            exchange.log["error"] = "slow_client" if gone.args else "client_gone"
        finally:
            exchange.close()
            app.service.metrics.http[self._route, exchange.status] += 1
            is_poll = self._route in POLLED and (exchange.status < 400 or exchange.status == 503)
            if not is_poll:
                self._log(exchange)

    async def of_exception(self, request: Any, error: Exception) -> Any:
        """Starlette's own refusals, of paths and methods, in our shape."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            scope["refusal"] = error
            await self(scope, receive, send)

        return answer

    def _check_host(self, exchange: HTTPExchange) -> None:
        """A web page whose name resolves to a loopback address must not reach the server."""
        allowed = self._app.allowed_hosts
        if not allowed or b"host" not in exchange.headers:  # only HTTP/1.0 may leave it out
            return
        host = exchange.headers[b"host"].decode("latin-1")
        name = host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
        if name.lower().rstrip(".") not in allowed:
            message = f"the host {name!r} is not among the server's --allowed-hosts"
            raise APIError(403, "host_not_allowed", message)

    def _log(self, exchange: HTTPExchange) -> None:
        total = 1e3 * (time.monotonic() - exchange.arrival)
        found = {
            "id": exchange.request_id,
            "key": exchange.client.name,
            "route": self._route,
            "status": exchange.status,
            **exchange.log,
            "total_ms": round(total, 1),
            "bytes_in": exchange.num_bytes_in,
            "bytes_out": exchange.num_bytes_out,
        }
        if self._app.options.log_json:
            logger.info("request", extra={"fields": found})
        else:
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
            shown = {"time": now} | found
            parts = (f"{name}={value}" for name, value in shown.items() if value not in ("", []))
            room = 1000
            if self._app.options.log_requests:
                room += self._app.options.max_log_len
            logger.info("%s", printable(" ".join(parts), room))


# Handlers ---------------------------------------------------------------------------


async def refuse(app: App, exchange: HTTPExchange) -> None:
    """Answer a path that no route has with 404, and a method that its route lacks with 405."""
    error = exchange.scope["refusal"]
    path = exchange.scope["path"]
    if error.status_code == 405:
        message = f"{exchange.method} is not possible here"
        raise APIError(405, "method_not_allowed", message, headers=dict(error.headers or {}))
    if any(path.startswith(f"/v1/{name}") for name in OTHER_MODELS):
        raise APIError(404, "unknown_route", f"{path}: this server only generates text")
    raise APIError(404, "unknown_route", f"there is no {path}")


async def health(app: App, exchange: HTTPExchange) -> None:
    await exchange.send_json(200, {"status": "ok", "server": _progress(app)})


async def ready(app: App, exchange: HTTPExchange) -> None:
    found = _progress(app)
    await exchange.send_json(200 if found["status"] == "ready" else 503, found)


def _progress(app: App) -> dict[str, Any]:
    """The state of the server, and while it starts, how far it is."""
    service = app.service
    is_ending = service.state == "ready" and service.is_shutting_down
    found: dict[str, Any] = {"status": "draining" if is_ending else service.state}
    return found | service.start if service.state == "starting" else found


async def version(app: App, exchange: HTTPExchange) -> None:
    await exchange.send_json(200, {"version": __version__})


async def load(app: App, exchange: HTTPExchange) -> None:
    await exchange.send_json(200, {"server_load": app.service.num_admitted})


async def metrics(app: App, exchange: HTTPExchange) -> None:
    accept = exchange.headers.get(b"accept", b"").decode("latin-1")
    await exchange.send_bytes(200, *exposition(app.service, accept, app.adapters.facts()))


async def schema(app: App, exchange: HTTPExchange) -> None:
    await exchange.send_json(200, _schema())


@functools.cache
def _schema() -> dict[str, Any]:
    return openapi((one.path, one.methods, one.summary, one.body) for one in ROUTES if one.summary)


async def models(app: App, exchange: HTTPExchange) -> None:
    cards = [_card(app, name) for name in (*app.model_names, *app.adapters.names())]
    await exchange.send_json(200, {"object": "list", "data": cards})


async def model(app: App, exchange: HTTPExchange) -> None:
    name = exchange.scope["path_params"]["id"]
    app.check_model(name)
    await exchange.send_json(200, _card(app, name))


def _card(app: App, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {"max_model_len": None, "has_chat_template": None}
    if app.service.is_open:
        found["max_model_len"] = app.service.max_model_len
        found["has_chat_template"] = bool(app.tokenizer.chat_template)
    root = app.model_names[0]
    parent = None
    if (adapter := app.adapters.get(name)) is not None:
        parent = root
        root = adapter.root
    return {
        "id": name,
        "object": "model",
        "created": app.created,
        "owned_by": "swiftkv-jax",
        "root": root,
        "parent": parent,
        "default_max_tokens": app.options.default_max_tokens,
        "default_sampling": dict(app.sampling_defaults),
        "permission": [],
    } | found


async def web_page(app: App, exchange: HTTPExchange) -> None:
    """Send a page to talk to the model, with a key that its reader types."""
    content, policy = _web_page()
    exchange.extra |= {
        "content-security-policy": policy,
        "referrer-policy": "no-referrer",
        "x-frame-options": "DENY",
    }
    await exchange.send_bytes(200, content, "text/html; charset=utf-8")


_WEB_PAGE = {"style": ["style.css"], "script": ["markdown.js", "chats.js", "page.js"]}
"""Files that go into the elements of index.html."""


@functools.cache
def _web_page() -> tuple[bytes, str]:
    """(the page, a policy under which nothing but its own script and style runs)."""
    files = resources.files(__package__).joinpath("web")
    text = files.joinpath("index.html").read_text("utf-8")
    allowed: dict[str, str] = {}
    for name, parts in _WEB_PAGE.items():
        inside = "".join(files.joinpath(part).read_text("utf-8") for part in parts)
        text = text.replace(f"<{name}></{name}>", f"<{name}>{inside}</{name}>")
        allowed[name] = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
    policy = "; ".join(
        [
            "default-src 'none'",
            "connect-src 'self'",
            *(f"{name}-src 'sha256-{digest}'" for name, digest in allowed.items()),
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )
    return text.encode(), policy


# Routes -----------------------------------------------------------------------------


def _engine[B: Body](path: str, kind: type[B], prepare: Prepare[B], summary: str) -> ServerRoute:
    """A route whose requests the engine runs."""
    handler = functools.partial(run, kind=kind, prepare=prepare)
    return ServerRoute(path, "POST", handler, summary, kind)


ROUTES = (
    _engine("/v1/chat/completions", ChatBody, chat, "Continue a conversation"),
    _engine("/v1/completions", CompletionBody, completion, "Continue prompts"),
    _engine("/v1/responses", ResponsesBody, response, "Answer, in items"),
    _engine("/v1/messages", MessagesBody, message, "Answer, in blocks"),
    ServerRoute(
        "/v1/messages/count_tokens",
        "POST",
        count_tokens,
        "Number of tokens of a prompt of /v1/messages",
        CountTokensBody,
    ),
    ServerRoute("/v1/score", "POST", score, "Log-likelihoods of continuations", ScoreBody),
    ServerRoute("/v1/models", "GET", models, "Models that are served"),
    ServerRoute("/v1/models/{id:path}", "GET", model, "One of them"),
    ServerRoute(
        "/tokenize", "POST", tokenize, "Token ids of a text or a conversation", TokenizeBody
    ),
    ServerRoute("/detokenize", "POST", detokenize, "Text of token ids", DetokenizeBody),
    ServerRoute(
        "/tokenizer_info",
        "GET",
        tokenizer_info,
        "Special tokens and chat template, with --enable-tokenizer-info",
    ),
    ServerRoute(
        "/v1/load_lora_adapter",
        "POST",
        load_adapter,
        "Load an adapter, with --allow-runtime-lora",
        LoadAdapterBody,
    ),
    ServerRoute(
        "/v1/unload_lora_adapter",
        "POST",
        unload_adapter,
        "Unload one, with --allow-runtime-lora",
        UnloadAdapterBody,
    ),
    ServerRoute("/health", "GET", health, "The process answers", public=True),
    ServerRoute("/ready", "GET", ready, "Requests are taken", public=True),
    ServerRoute("/ping", "GET POST", ready, "The same", public=True),
    ServerRoute("/metrics", "GET", metrics, "Metrics for Prometheus"),
    ServerRoute("/version", "GET", version, "Version of the package", public=True),
    ServerRoute("/load", "GET", load, "Requests that wait and run"),
    ServerRoute("/openapi.json", "GET", schema),
    ServerRoute("/", "GET", web_page, public=True),
)
OTHER = ServerRoute("other", "", refuse, public=True)
"""Paths and methods that no route has."""
