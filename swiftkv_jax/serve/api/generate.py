"""The routes that generate, completions and chats: what the engine runs for a body."""

from __future__ import annotations

import functools
import hashlib
import time

from ...infer.engine.sampling_params import SamplingParams
from ..app import App
from ..bodies.forms import Form, form_of
from ..bodies.params import (
    check_logprob_entries,
    check_prompt_logprobs,
    priority_of,
    refuse_unsupported,
    sampling_params,
    truncation_of,
)
from ..bodies.token_filters import filtered
from ..errors import unsupported
from ..http.exchange import HTTPExchange
from ..protocol import ChatBody, CompletionBody
from ..service.admission import Reservation
from ..service.generation import Choice, EngineRequest, Generation, request_of, score_of
from ..text.prompts import LONG, Prompt
from ..text.reasoning import ReasoningParser, Start
from ..text.token_text import WithSpecialTokens
from ..text.tool_formats import ToolFormat
from .answers import ChatWriter, CompletionWriter


def salt_of(app: App, exchange: HTTPExchange, cache_salt: str | None) -> str:
    """Salt of the prefix cache: of the key, and of the request."""
    key = "" if app.options.share_prefix_cache else exchange.key
    if not key and not cache_salt:
        return ""
    return hashlib.sha256(f"{key}\0{cache_salt or ''}".encode()).hexdigest()


async def completion(
    app: App, exchange: HTTPExchange, body: CompletionBody, reservation: Reservation
) -> tuple[Generation, CompletionWriter]:
    """Return what the engine runs for a body, and the writer of the answer. Raises `APIError`."""
    priority = _accept(app, exchange, body)
    texts = body.prompts()
    salt = salt_of(app, exchange, body.cache_salt)
    scores = bool(body.echo) and body.logprobs is not None
    if scores and not app.scoring:
        raise unsupported("echo", "`echo` with `logprobs` needs the server's --enable-scoring")
    if body.stream and (scores or body.max_tokens == 0):
        raise unsupported(
            "stream", "`stream` does not go with `echo` and `logprobs`, or without new tokens"
        )
    start = time.perf_counter()
    prompts = await app.encoder.encode(
        texts,
        add_special_tokens=body.add_special_tokens is not False,
        salt=salt,
        param="prompt",
        truncation=truncation_of(body, app.service.max_model_len),
    )
    app.service.metrics.tokenize.observe(time.perf_counter() - start)
    form = await _form(app, exchange, body, None)
    params = _params(app, body, prompts)
    # Each choice repeats what is echoed.
    echoed = params.n * sum(len(prompt.token_ids) for prompt in prompts)
    check_logprob_entries(body, params, prompts=len(prompts), echoed=echoed)
    top = max(params.logprobs or 0, body.prompt_logprobs or 0)
    scored = [EngineRequest(score_of(prompt, top, salt=salt), prompt) for prompt in prompts]
    parts = []
    if scores or body.prompt_logprobs is not None:
        parts = [part for part in scored if len(part.prompt.token_ids) > 1]
    if body.max_tokens != 0:
        parts += await _parts(app, body, prompts, params, salt, form)
    param = "n" if params.n > 1 else "prompt"
    generation = _generation(exchange, reservation, prompts, parts, param, priority)
    prompt_texts = []
    if body.echo:
        prompt_texts = [await _text(app, prompt) for prompt in prompts]
    writer = CompletionWriter(app, exchange, body, params, scored, prompt_texts=prompt_texts)
    return generation, writer


async def _text(app: App, prompt: Prompt) -> str:
    if prompt.text is not None:
        return prompt.text
    return await app.encoder.detokenize(prompt.token_ids.tolist())


async def chat(
    app: App, exchange: HTTPExchange, body: ChatBody, reservation: Reservation
) -> tuple[Generation, ChatWriter]:
    """Return what the engine runs for a body, and the writer of the answer. Raises `APIError`."""
    generation, params = await chat_generation(app, exchange, body, reservation)
    return generation, ChatWriter(app, exchange, body, params, generation.parts)


async def chat_generation(
    app: App, exchange: HTTPExchange, body: ChatBody, reservation: Reservation
) -> tuple[Generation, SamplingParams]:
    """Return the engine requests of a chat and its parameters. Scores of the prompt come first, if
    they are asked for. Raises `APIError`."""
    priority = _accept(app, exchange, body)
    form = await _form(app, exchange, body, app.tool_format)
    salt = salt_of(app, exchange, body.cache_salt)
    start = time.perf_counter()
    prompt = await app.encode_chat(body, salt, exchange.num_bytes_in)
    app.service.metrics.tokenize.observe(time.perf_counter() - start)
    params = _params(app, body, [prompt])
    check_logprob_entries(body, params, prompts=1, echoed=len(prompt.token_ids))
    begin: Start = "over"
    if app.reasoning is not None:
        begin = app.reasoning.start(prompt.text, continued(body))
    parts = []
    if body.prompt_logprobs is not None and len(prompt.token_ids) > 1:
        parts.append(EngineRequest(score_of(prompt, body.prompt_logprobs, salt=salt), prompt))
    parts += await _parts(app, body, [prompt], params, salt, form, begin)
    return _generation(exchange, reservation, [prompt], parts, "n", priority), params


def continued(body: ChatBody) -> str:
    """Text of the message that the answer goes on with."""
    if not body.continue_final_message:
        return ""
    return str(body.messages[-1].rendered(len(body.messages) - 1)["content"])


def _accept(app: App, exchange: HTTPExchange, body: CompletionBody | ChatBody) -> int:
    """Check what needs no prompt, and take the body's id. Returns the priority. Raises
    `APIError`."""
    refuse_unsupported(body)
    priority = priority_of(body, app.options)
    if body.request_id is not None:
        exchange.request_id = body.request_id
    check_prompt_logprobs(body, scoring=app.scoring)
    return priority


async def _form(
    app: App,
    exchange: HTTPExchange,
    body: CompletionBody | ChatBody,
    tool_format: ToolFormat | None,
) -> Form:
    """The form that a body asks for. Schemas of a megabyte take a tenth of a second to read.
    Raises `APIError`."""
    if exchange.num_bytes_in <= LONG:
        return form_of(body, tool_format)
    work = functools.partial(form_of, body, tool_format)
    return await app.encoder.in_thread(work, exchange.num_bytes_in)


def _params(app: App, body: CompletionBody | ChatBody, prompts: list[Prompt]) -> SamplingParams:
    service = app.service
    return sampling_params(
        body,
        app.sampling_defaults,
        app.options,
        prompt_tokens=max(len(prompt.token_ids) for prompt in prompts),
        max_model_len=service.max_model_len,
        max_num_seqs=service.max_num_seqs,
    )


async def _parts(
    app: App,
    body: CompletionBody | ChatBody,
    prompts: list[Prompt],
    params: SamplingParams,
    salt: str,
    form: Form,
    start: Start = "over",
) -> list[EngineRequest]:
    """Make the engine requests of `prompts`. A prompt with a client's seed gets the answer that it
    gets alone. `start` is where the answers start."""
    matcher = await app.matcher_of(form)
    tokenizer = app.tokenizer
    if start != "over" and matcher is not None:
        assert app.reasoning is not None
        reasoned = app.reasoning.before(matcher, start)
        if reasoned is None:
            start = "over"
        else:
            matcher = reasoned
    if start != "over":
        assert app.reasoning is not None
        tokenizer = app.reasoning.tokenizer
    if body.skip_special_tokens is False:
        tokenizer = WithSpecialTokens(app.tokenizer)
    grammar = matcher
    if body.bad_words or body.allowed_token_ids:
        restrict = functools.partial(
            filtered,
            body,
            matcher,
            app.tokenizer,
            app.encoder.vocab_size,
            possible=app.grammars is not None,
        )
        grammar = await app.encoder.in_thread(restrict, sum(map(len, body.bad_words or ())))
    omit = isinstance(body, ChatBody) and body.include_reasoning is False
    include_stop = bool(body.include_stop_str_in_output)
    parts = []
    for number, prompt in enumerate(prompts):
        rng_stream = number if body.seed is None else 0
        request = request_of(prompt, params, rng_stream=rng_stream, salt=salt, grammar=grammar)
        part = EngineRequest(request, prompt, grammar_param=form.param)
        for index in range(number * params.n, (number + 1) * params.n):
            reader = None
            if start != "over":
                reader = ReasoningParser(start, omit=omit)
            choice = Choice(index, tokenizer, request, include_stop, form.parser(), reader)
            part.choices.append(choice)
        parts.append(part)
    return parts


def _generation(
    exchange: HTTPExchange,
    reservation: Reservation,
    prompts: list[Prompt],
    parts: list[EngineRequest],
    param: str,
    priority: int,
) -> Generation:
    """Reserve what the parts cost. Scores of a prompt that is continued too are no sequences of
    their own. Raises `APIError` that names `param`."""
    tokens = sum(len(part.prompt.token_ids) for part in parts)
    samples = sum(len(part.choices) for part in parts)
    reservation.count(tokens, samples or max(len(parts), 1), param)
    generation = Generation(prompts, parts, reservation, exchange.arrival)
    generation.priority = priority
    return generation
