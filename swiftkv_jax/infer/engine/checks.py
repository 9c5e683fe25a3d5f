"""Checks of a request before it is queued."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ...errors import ContextLengthError, UsageError
from ...model.config import Config
from ..structured.token_filter import TokenFilter
from .options import EngineOptions
from .page_pool import PagePool
from .request_state import RequestState
from .requests import Request, ScoreRequest
from .sampling_params import MAX_LOGPROBS, SamplingParams
from .shapes import Shapes


def check_request(request: Request | ScoreRequest, config: Config, options: EngineOptions) -> None:
    """Raise `UsageError` (a `ValueError`) for a request that can never run on an engine with these
    options."""
    limit = options.max_model_len or config.max_position_embeddings
    if isinstance(request, ScoreRequest):
        _check_ids("tokens", request.tokens, config)
        if not options.scoring:
            raise UsageError(
                "this engine cannot score: make it with the option `scoring`=True", option="scoring"
            )
        if not 1 <= request.start < len(request.tokens):
            raise UsageError(
                f"`start`={request.start} must be from 1 to {len(request.tokens) - 1}: the first "
                f"token is predicted by nothing",
                option="start",
            )
        if not 0 <= request.top_logprobs <= MAX_LOGPROBS:
            raise UsageError(
                f"`top_logprobs`={request.top_logprobs} must be from 0 to {MAX_LOGPROBS}",
                option="top_logprobs",
            )
        if len(request.tokens) > limit:
            raise ContextLengthError(
                f"{len(request.tokens)} tokens are above the limit of {limit}: shorten them or "
                f"raise `max_model_len`",
                prompt_tokens=len(request.tokens),
                new_tokens=0,
                limit=limit,
            )
        return
    if not isinstance(request, Request):
        raise UsageError(
            f"`request` must be a Request or a ScoreRequest, got {type(request).__name__}",
            option="request",
        )
    params = request.params
    if not isinstance(params, SamplingParams):
        raise UsageError(
            f"`params` must be SamplingParams, got {type(params).__name__}", option="params"
        )
    _check_ids("the prompt", request.prompt, config)
    if type(request.rng_stream) is not int or not 0 <= request.rng_stream < 2**32:
        raise UsageError(
            f"`rng_stream`={request.rng_stream!r} must be a whole number below 2**32",
            option="rng_stream",
        )
    params.check_vocabulary(config.vocab_size)
    if not options.sampling and not params.is_plain_greedy:
        raise UsageError(
            "this engine is for plain greedy requests: make it with the option `sampling`=True",
            option="sampling",
        )
    if len(request.prompt) + params.max_tokens > limit:
        raise ContextLengthError(
            f"the prompt has {len(request.prompt)} tokens, with {params.max_tokens} new ones that "
            f"is {len(request.prompt) + params.max_tokens}, above the limit of {limit}: shorten "
            f"it, lower `max_tokens` or raise `max_model_len`",
            prompt_tokens=len(request.prompt),
            new_tokens=params.max_tokens,
            limit=limit,
        )
    if not isinstance(request.speculative, bool | np.bool_):
        raise UsageError(
            f"`speculative`={request.speculative!r} must be True or False", option="speculative"
        )
    if not _is_list(request.prediction) or len(request.prediction):
        _check_prediction(request.prediction, limit, config, options)
    if request.grammar is not None:
        if not options.structured_outputs:
            raise UsageError(
                "this engine follows no grammar: make it with the option `structured_outputs`=True",
                option="structured_outputs",
            )
        filter_only = isinstance(request.grammar, TokenFilter) and request.grammar.grammar is None
        if (params.ignore_eos or params.min_tokens) and not filter_only:
            name = "ignore_eos" if params.ignore_eos else "min_tokens"
            raise UsageError(
                f"`{name}` does not go with a grammar, which says where the text ends", option=name
            )
    if params.n > options.max_num_seqs:
        raise UsageError(
            f"`n`={params.n} samples do not fit into `max_num_seqs`={options.max_num_seqs}",
            option="n",
        )


def _check_prediction(
    prediction: Sequence[int], limit: int, config: Config, options: EngineOptions
) -> None:
    if _is_list(prediction) and options.speculative is None:
        raise UsageError(
            "`prediction` needs an engine with the option `speculative`", option="prediction"
        )
    _check_ids("the prediction", prediction, config)
    if len(prediction) > limit:
        raise UsageError(
            f"`prediction` has {len(prediction)} tokens: it may have at most {limit} tokens, as a "
            f"sequence",
            option="prediction",
        )


def check_ends(request: Request | ScoreRequest, eos_token_ids: Sequence[int]) -> None:
    """Raise `UsageError` if `min_tokens` forbids every token that the request allows."""
    if isinstance(request, ScoreRequest):
        return
    end_token_ids = request.params.end_token_ids(eos_token_ids)
    allowed = getattr(request.grammar, "allowed_token_ids", None)
    if request.params.min_tokens and allowed is not None and set(allowed) <= set(end_token_ids):
        raise UsageError(
            f"`min_tokens`={request.params.min_tokens} goes with no `allowed_token_ids` that all "
            f"end the text",
            option="min_tokens",
        )


def check_fits(state: RequestState, pool: PagePool, shapes: Shapes) -> None:
    """Raise `UsageError` for a request that is too large for the whole cache or for all slots
    together."""
    needed = _all_pages(state, pool)
    if needed > shapes.num_pages or state.num_samples > shapes.slots:
        raise UsageError(
            f"the request needs {needed} pages of KV cache and {state.num_samples} slots, "
            f"there are {shapes.num_pages} and {shapes.slots}"
            f"{' on each device' if shapes.dp_size > 1 else ''}: lower `max_tokens` or `n`, or "
            f"raise `kv_cache_memory` or `max_num_seqs`",
            option="max_tokens",
        )


def most_new_tokens(request: Request, config: Config, shapes: Shapes) -> int:
    """Tokens, up to its `max_tokens`, that each sample of a request can have for all of them to fit
    into the cache."""
    state = RequestState(0, request, own_start(request, config), config.exact_head)
    pool = PagePool(0, shapes.page_size, pages_per_own_page=shapes.pages_per_own_page)

    def pages(tokens: int) -> int:
        state.num_remaining_tokens = tokens
        return _all_pages(state, pool)

    counts = range(1, request.params.max_tokens + 1)
    return bisect.bisect_right(counts, shapes.num_pages, key=pages)


def _all_pages(state: RequestState, pool: PagePool) -> int:
    """Pages that all sequences of a request can fill together."""
    return pool.total(state.pages_of_one(pool)) + state.pages_of_others(pool)


def own_start(request: Request | ScoreRequest, config: Config) -> int:
    """`RequestState.own_start` of a checked request, for the served `config`."""
    return config.own_start(request.start)


def iterate[T](requests: Iterable[T]) -> Iterator[T]:
    """`iter`, which raises `UsageError` for what is not iterable."""
    if not isinstance(requests, Iterable):
        raise UsageError(
            f"`requests` must be an iterable of requests, got {type(requests).__name__}",
            option="requests",
        )
    return iter(requests)


def _is_list(tokens: object) -> bool:
    return isinstance(tokens, Sequence | np.ndarray) and not isinstance(tokens, str)


def _check_ids(what: str, tokens: Sequence[int], config: Config) -> None:
    if not _is_list(tokens):
        raise UsageError(f"{what} must be a list of token ids, got {type(tokens).__name__}")
    if len(tokens) == 0:
        raise UsageError(f"{what} must not be empty")
    ids = np.asarray(tokens)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise UsageError(f"{what} must be a list of token ids, that is of whole numbers")
    if (outside := ids[(ids < 0) | (ids >= config.vocab_size)]).size:
        raise UsageError(
            f"{what}: token id {outside[0]} is outside the vocabulary of {config.vocab_size}"
        )
