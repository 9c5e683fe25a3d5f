"""The routes that load and unload adapters while the server runs, vLLM's."""

from __future__ import annotations

from pathlib import Path

from ...errors import CheckpointError, UsageError
from ..app import App
from ..errors import APIError, invalid, of_usage
from ..http.exchange import HTTPExchange
from ..lora_modules import check_adapter_name
from ..protocol import LoadAdapterBody, UnloadAdapterBody
from .run import counted_body


async def load_adapter(app: App, exchange: HTTPExchange) -> None:
    """POST /v1/load_lora_adapter"""
    folder = _folder(app)
    async with counted_body(app, exchange, LoadAdapterBody) as body:
        name = body.lora_name
        try:
            path = (folder / body.lora_path).resolve()
        except (ValueError, RuntimeError, OSError):
            raise invalid("lora_path", "`lora_path` is not a path") from None
        if folder.resolve() not in path.parents:
            message = "`lora_path` is not below the server's --allow-runtime-lora"
            raise invalid("lora_path", message)
        try:
            check_adapter_name(name, app.model_names)
            await app.adapters.load(name, path)
        except UsageError as error:
            names = {"adapter": "lora_name", "max_loras": "--max-loras"}
            raise invalid("lora_name", of_usage(error, names).message) from None
        except CheckpointError as error:
            raise invalid("lora_path", str(error)) from None
    await _succeed(exchange, f"LoRA adapter '{name}' added successfully.")


async def unload_adapter(app: App, exchange: HTTPExchange) -> None:
    """POST /v1/unload_lora_adapter"""
    _folder(app)
    async with counted_body(app, exchange, UnloadAdapterBody) as body:
        name = body.lora_name
        if app.adapters.get(name) is None:
            message = f"The lora adapter {name!r} cannot be found."
            raise APIError(404, "model_not_found", message, param="lora_name")
        app.adapters.unload(name)
    await _succeed(exchange, f"LoRA adapter '{name}' removed successfully.")


def _folder(app: App) -> Path:
    """The directory that adapters may be below. Raises `APIError` if there is none."""
    if app.options.allow_runtime_lora is None:
        message = "this route needs the server's --allow-runtime-lora"
        raise APIError(404, "unknown_route", message)
    return app.options.allow_runtime_lora


async def _succeed(exchange: HTTPExchange, text: str) -> None:
    content = f"Success: {text}".encode()
    await exchange.send_bytes(200, content, "text/plain; charset=utf-8")
