"""POST /v1/score: exact log-likelihoods of continuations, as `infer score` gives them. The upper
layers run for the tokens that are scored alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import UsageError
from ...infer.engine.page_pool import page_keys
from ...infer.engine.requests import ScoreRequest
from ...infer.engine.sampling_params import MAX_LOGPROBS
from ...infer.text import encode_pair
from ..app import App
from ..errors import PromptTooLong, invalid, unsupported
from ..http.exchange import HTTPExchange
from ..options import MAX_LOGPROB_ENTRIES, MAX_PROMPTS
from ..protocol import Pair, ScoreBody
from ..service.adapters import ServedAdapter
from ..service.admission import Reservation
from ..service.generation import EngineRequest, Generation
from ..text.prompts import Prompt
from .generate import salt_of
from .run import Writer, reserve, run


async def score(app: App, exchange: HTTPExchange) -> None:
    """POST /v1/score"""
    app.service.check_ready()
    if not app.scoring:
        raise unsupported("pairs", "scores need the server's --enable-scoring")
    await run(app, exchange, ScoreBody, _prepare)


async def _prepare(
    app: App, exchange: HTTPExchange, body: ScoreBody, reservation: Reservation
) -> tuple[Generation, Writer]:
    parts = await _parts(app, exchange, body, exchange.num_bytes_in)
    prompts = [part.prompt for part in parts]
    reserve(app, reservation, parts, len(parts), "pairs")
    writer = ScoreWriter(body.model or app.model_names[0], bool(body.top_logprobs))
    return Generation(prompts, parts, reservation, exchange.arrival), writer


async def _parts(
    app: App, exchange: HTTPExchange, body: ScoreBody, num_bytes: int
) -> list[EngineRequest]:
    """Return the requests that the engine scores. Raises `APIError`."""
    top = body.top_logprobs or 0
    if not 1 <= len(body.pairs) <= MAX_PROMPTS:
        raise invalid("pairs", f"`pairs` must have 1 to {MAX_PROMPTS} entries")
    if not 0 <= top <= MAX_LOGPROBS:
        raise invalid("top_logprobs", f"`top_logprobs`={top} must be from 0 to {MAX_LOGPROBS}")
    salt, adapter = salt_of(app, exchange, None), app.adapter_of(body.model)

    def work() -> list[EngineRequest]:
        pairs = enumerate(body.pairs)
        return [_part(app, number, pair, top, salt, adapter) for number, pair in pairs]

    parts = await app.encoder.in_thread(work, num_bytes)
    entries = sum(len(part.request.tokens) - part.request.start for part in parts)  # type: ignore[union-attr]
    if entries * (top + 1) > MAX_LOGPROB_ENTRIES:
        raise invalid(
            "pairs", f"{entries} tokens with {top + 1} log-probabilities each are too many"
        )
    return parts


def _part(
    app: App, number: int, pair: Pair, top: int, salt: str, adapter: ServedAdapter
) -> EngineRequest:
    param = f"pairs[{number}]"
    try:
        before, after = encode_pair(app.tokenizer, pair.context, pair.continuation)
    except UsageError as error:
        raise invalid(param, str(error)) from None
    ids = np.asarray(before + after, np.int32)
    limit = app.service.max_model_len
    if ids.size > limit:
        raise PromptTooLong(param, prompt_tokens=ids.size, limit=limit)
    digest = adapter.prompt_digest
    keys = page_keys(ids, app.encoder.page_size, salt, prompt_digest=digest)  # type: ignore[arg-type]
    request = ScoreRequest(
        ids,  # type: ignore[arg-type]
        start=len(before),
        top_logprobs=top,
        cache_salt=salt,
        page_keys=keys,
        adapter=adapter.engine_name,
    )
    return EngineRequest(request, Prompt(ids, keys, None))


class ScoreWriter(Writer):
    """A row for each pair: the sum over its continuation, and each token."""

    takes_long = True

    def __init__(self, model: str, with_top: bool):
        """`with_top` is whether rows have the likeliest tokens."""
        self._model = model
        self._with_top = with_top

    def whole(self, generation: Generation) -> dict[str, Any]:
        tokens = generation.num_prompt_tokens
        return {
            "object": "list",
            "model": self._model,
            "data": [self._row(index, part) for index, part in enumerate(generation.parts)],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    def _row(self, index: int, part: EngineRequest) -> dict[str, Any]:
        assert isinstance(part.request, ScoreRequest)
        ids = part.prompt.token_ids[part.request.start :].tolist()
        logprobs = part.logprobs
        row: dict[str, Any] = {
            "index": index,
            "logprob": sum(one.logprob for one in logprobs),
            "is_greedy": ids == [token for output in part.scores for token in output.token_ids],
            "token_ids": ids,
            "token_logprobs": [one.logprob for one in logprobs],
        }
        if self._with_top:
            row["top_logprobs"] = [
                [{"token_id": token, "logprob": value} for token, value in one.top_logprobs]
                for one in logprobs
            ]
        return row
