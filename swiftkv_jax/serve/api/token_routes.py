"""The routes between texts and token ids, vLLM's."""

from __future__ import annotations

import functools
from typing import Any

from ..app import App
from ..bodies.forms import check_takes_tools
from ..errors import APIError, invalid
from ..http.exchange import HTTPExchange
from ..protocol import DetokenizeBody, TokenizeBody
from ..text.prompts import Encoding
from .run import counted_body

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


async def tokenize(app: App, exchange: HTTPExchange) -> None:
    """POST /tokenize"""
    async with counted_body(app, exchange, TokenizeBody) as body:
        ids = await _token_ids(app, exchange, body)
    found: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": app.service.max_model_len,
        "tokens": ids,
        "token_strs": None,
    }
    if body.return_token_strs:
        spelled = functools.partial(_spellings, app, ids)
        found["token_strs"] = await app.encoder.in_thread(spelled, len(ids))
    await exchange.send_json(200, found)


def _spellings(app: App, ids: list[int]) -> list[str]:
    return [app.spellings[token].text for token in ids]


async def _token_ids(app: App, exchange: HTTPExchange, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "exactly one of `prompt` and `messages` is needed")
    check_takes_tools(body.tools, app.tool_format)
    if body.prompt is None:
        prompt = await app.encode_chat(body, "", exchange.num_bytes_in, counting=True)
    else:
        special = body.add_special_tokens is not False
        how = Encoding("", "prompt", special, counting=True)
        (prompt,) = await app.encoder.encode([body.prompt], how)
    return prompt.token_ids.tolist()


async def detokenize(app: App, exchange: HTTPExchange) -> None:
    """POST /detokenize"""
    async with counted_body(app, exchange, DetokenizeBody) as body:
        text = await app.encoder.detokenize(body.tokens)
    await exchange.send_json(200, {"prompt": text})


async def tokenizer_info(app: App, exchange: HTTPExchange) -> None:
    """GET /tokenizer_info: what tokenizer_config.json says, as far as clients use it."""
    if not app.options.tokenizer_info:
        message = "/tokenizer_info needs the server's --enable-tokenizer-info"
        raise APIError(404, "unknown_route", message)
    app.service.check_ready()
    tokenizer = app.tokenizer
    found: dict[str, Any] = {"tokenizer_class": type(tokenizer).__name__}
    found |= {name: getattr(tokenizer, name, None) for name in SPECIAL_TOKENS}
    added = getattr(tokenizer, "added_tokens_decoder", {})
    found["added_tokens_decoder"] = {str(number): one.content for number, one in added.items()}
    found["model_max_length"] = app.service.max_model_len
    found["chat_template"] = getattr(tokenizer, "chat_template", None)
    await exchange.send_json(200, found)
