"""The routes that generate: completions and chats, whole or as a stream."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Awaitable, Callable

from ...infer.engine.sampling_params import SamplingParams
from ..app import App
from ..bodies.forms import Form
from ..bodies.params import (
    check_logprob_entries,
    check_prompt_logprob_entries,
    priority_of,
    prompt_logprobs,
    refuse_unsupported,
    sampling_params,
)
from ..bodies.token_filters import filtered
from ..errors import unsupported
from ..http.exchange import DONE, HTTPExchange
from ..protocol import ChatBody, CompletionBody, Sampling
from ..service.admission import Reservation
from ..service.generation import Choice, EngineRequest, Generation, request_of, score_of
from ..text.prompts import Prompt
from ..text.reasoning import ReasoningParser, Start
from ..text.token_text import WithSpecialTokens
from .answers import ChatWriter, CompletionWriter, Writer
from .run import changes, run, until_done


async def completions(app: App, exchange: HTTPExchange) -> None:
    """POST /v1/completions"""
    await _generate(app, exchange, CompletionBody, _completion)


async def chat_completions(app: App, exchange: HTTPExchange) -> None:
    """POST /v1/chat/completions"""
    await _generate(app, exchange, ChatBody, _chat)


async def _generate[B: CompletionBody | ChatBody](
    app: App,
    exchange: HTTPExchange,
    kind: type[B],
    prepare: Callable[[App, HTTPExchange, B, Reservation], Awaitable[tuple[Generation, Writer]]],
) -> None:
    async def checked(
        app: App, exchange: HTTPExchange, body: B, reservation: Reservation
    ) -> tuple[Generation, Writer]:
        refuse_unsupported(body)
        priority = priority_of(body, app.options)
        if body.request_id is not None:
            exchange.request_id = body.request_id
        generation, writer = await prepare(app, exchange, body, reservation)
        generation.priority = priority
        return generation, writer

    await run(app, exchange, kind, checked, _answer)


# Prompts --------------------------------------------------------------------------------


def salt_of(app: App, exchange: HTTPExchange, cache_salt: str | None) -> str:
    """Salt of the prefix cache: of the key, and of the request."""
    key = "" if app.options.share_prefix_cache else exchange.key
    if not key and not cache_salt:
        return ""
    return hashlib.sha256(f"{key}\0{cache_salt or ''}".encode()).hexdigest()


async def _completion(
    app: App, exchange: HTTPExchange, body: CompletionBody, reservation: Reservation
) -> tuple[Generation, Writer]:
    texts = body.prompts()
    salt = salt_of(app, exchange, body.cache_salt)
    wanted = prompt_logprobs(body, scoring=app.scoring)
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
        truncation=app.truncation_of(body),
    )
    app.service.metrics.tokenize.observe(time.perf_counter() - start)
    form = await app.form_of(body, None, exchange.num_bytes_in)
    params = _params(app, body, prompts)
    total = sum(len(prompt.token_ids) for prompt in prompts)
    # Each choice repeats what is echoed.
    check_logprob_entries(params, params.n * total if scores else 0, len(prompts))
    check_prompt_logprob_entries(wanted, params.n * total)
    generates = body.max_tokens != 0
    top = max(params.logprobs or 0, wanted or 0)
    scored = [EngineRequest(score_of(prompt, top, salt=salt), prompt) for prompt in prompts]
    is_scored = scores or wanted is not None
    parts = [part for part in scored if is_scored and len(part.prompt.token_ids) > 1]
    if generates:
        parts += await _parts(app, body, prompts, params, salt, form)
    _count(reservation, parts, "n" if params.n > 1 else "prompt")
    prompt_texts = []
    if body.echo:
        prompt_texts = [
            await app.encoder.detokenize(prompt.token_ids.tolist())
            if prompt.text is None
            else prompt.text
            for prompt in prompts
        ]
    writer = CompletionWriter(
        *_facts(app, exchange, body),
        with_logprobs=params.logprobs is not None,
        with_token_ids=bool(body.return_token_ids),
        num_logprobs=params.logprobs or 0,
        echo=bool(body.echo),
        prompt_texts=prompt_texts,
        with_special=body.skip_special_tokens is False,
    )
    writer.scored = scored
    writer.prompt_logprobs = wanted
    writer.generates = generates
    writer.num_samples = params.n
    return Generation(prompts, parts, reservation, exchange.arrival), writer


async def _chat(
    app: App, exchange: HTTPExchange, body: ChatBody, reservation: Reservation
) -> tuple[Generation, Writer]:
    generation, params = await chat_generation(app, exchange, body, reservation)
    writer = ChatWriter(
        *_facts(app, exchange, body),
        with_logprobs=params.logprobs is not None,
        with_token_ids=bool(body.return_token_ids),
    )
    writer.scored = generation.parts
    writer.prompt_logprobs = body.prompt_logprobs
    return generation, writer


async def chat_generation(
    app: App, exchange: HTTPExchange, body: ChatBody, reservation: Reservation
) -> tuple[Generation, SamplingParams]:
    """Return the engine requests of a chat and its parameters. Scores of the prompt come first, if
    they are asked for. Raises `APIError`."""
    wanted = prompt_logprobs(body, scoring=app.scoring)
    form = await app.form_of(body, app.tool_format, exchange.num_bytes_in)
    salt = salt_of(app, exchange, body.cache_salt)
    start = time.perf_counter()
    prompt = await app.encode_chat(body, salt, exchange.num_bytes_in)
    app.service.metrics.tokenize.observe(time.perf_counter() - start)
    params = _params(app, body, [prompt])
    check_logprob_entries(params, 0, 1)
    check_prompt_logprob_entries(wanted, len(prompt.token_ids))
    begin: Start = "over"
    if app.reasoning is not None:
        begin = app.reasoning.start(prompt.text, continued(body))
    parts = []
    if wanted is not None and len(prompt.token_ids) > 1:
        parts.append(EngineRequest(score_of(prompt, wanted, salt=salt), prompt))
    parts += await _parts(app, body, [prompt], params, salt, form, begin)
    _count(reservation, parts, "n")
    return Generation([prompt], parts, reservation, exchange.arrival), params


def continued(body: ChatBody) -> str:
    """Text of the message that the answer goes on with."""
    if not body.continue_final_message:
        return ""
    return str(body.messages[-1].rendered(len(body.messages) - 1)["content"])


def _facts(app: App, exchange: HTTPExchange, body: Sampling) -> tuple:
    spellings = app.spellings_as_ids if body.return_tokens_as_token_ids else app.spellings
    name = body.model or app.model_names[0]
    return name, int(time.time()), app.fingerprint, exchange.request_id, spellings


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
    parts = []
    matcher = await app.compile_grammar(form)
    tokenizer = app.tokenizer
    if app.reasoning is not None and matcher is not None:
        if (reasoned := app.reasoning.before(matcher, start)) is None:
            start = "over"
        matcher = reasoned or matcher
    if app.reasoning is not None and start != "over":
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
    for number, prompt in enumerate(prompts):
        rng_stream = number if body.seed is None else 0
        request = request_of(prompt, params, rng_stream=rng_stream, salt=salt, grammar=grammar)
        part = EngineRequest(request, prompt, grammar_param=form.param)
        for sample in range(params.n):
            index = number * params.n + sample
            stop = bool(body.include_stop_str_in_output)
            reader = None if start == "over" else ReasoningParser(start, omit=omit)
            part.choices.append(Choice(index, tokenizer, request, stop, form.parser(), reader))
        parts.append(part)
    return parts


def _count(reservation: Reservation, parts: list[EngineRequest], param: str) -> None:
    """Scores of a prompt that is continued too are not counted as sequences of their own."""
    tokens = sum(len(part.prompt.token_ids) for part in parts)
    samples = sum(len(part.choices) for part in parts)
    reservation.count(tokens, samples or max(len(parts), 1), param)


# Answers --------------------------------------------------------------------------------


async def _answer(
    app: App,
    exchange: HTTPExchange,
    body: CompletionBody | ChatBody,
    generation: Generation,
    writer: Writer,
) -> None:
    if body.stream:
        await _stream(app, exchange, body, generation, writer)
        return
    await until_done(exchange, generation)
    exchange.extra["server-timing"] = server_timing(generation)
    extra = {"metrics": request_metrics(generation)} if app.options.request_metrics else {}
    # Log-probabilities take microseconds for each token, and there may be many.
    if writer.with_logprobs or writer.prompt_logprobs is not None:
        work = functools.partial(writer.whole, generation)
        length = generation.num_prompt_tokens
        whole = await app.encoder.in_thread(work, length + generation.num_tokens)
    else:
        whole = writer.whole(generation)
    await exchange.send_json(200, whole | extra)


async def _stream(
    app: App,
    exchange: HTTPExchange,
    body: CompletionBody | ChatBody,
    generation: Generation,
    writer: Writer,
) -> None:
    """Send what becomes certain, all that there is at once. A stream that cannot go on ends
    with an error and [DONE]."""
    wanted = body.stream_options
    each_usage = bool(wanted and wanted.continuous_usage_stats)
    last_usage = bool(wanted and wanted.include_usage)
    begun = set[int]()
    ended = set[int]()
    num_choices = sum(len(part.choices) for part in generation.parts)
    async for _ in changes(exchange, generation, silence=app.options.sse_keep_alive):
        fields = {"usage": writer.usage(generation)} if each_usage else {}
        if last_usage and not each_usage:
            fields = {"usage": None}
        events: list[bytes] = []
        done = generation.is_done
        last = {}
        if done and app.options.request_metrics:
            last = {"metrics": request_metrics(generation)}
        for part in generation.parts:
            for choice in part.choices:
                if choice.index in ended or not choice.is_ready:
                    continue
                if choice.index not in begun:
                    begun.add(choice.index)
                    events += writer.first(part, choice, **fields)
                if choice.finish_reason is not None:
                    ended.add(choice.index)
                if len(ended) == num_choices and not last_usage:
                    fields |= last
                events.append(writer.event([writer.next(choice, choice.take())], **fields))
        if done:
            if last_usage:
                events.append(writer.event([], usage=writer.usage(generation), **last))
            events.append(DONE)
        if events:
            if not exchange.status:
                exchange.extra["server-timing"] = server_timing(generation, whole=False)
            await exchange.send_events(b"".join(events), more=not done)


def request_metrics(generation: Generation) -> dict[str, float | None]:
    """The times of a request that has ended, under vLLM's names; null for one that ran nothing. As
    in vLLM, the time to the first token is that after the queue."""
    started = generation.started
    first = generation.first_token
    last = generation.last_token
    tokens = generation.num_tokens
    longest = max((choice.num_tokens for choice in generation.choices), default=0)
    found: dict[str, float | None] = {
        "time_to_first_token_ms": 1e3 * (first - started),
        "generation_time_ms": 1e3 * (last - first),
        "queue_time_ms": 1e3 * (started - generation.arrival),
        "mean_itl_ms": 1e3 * (last - first) / (longest - 1) if longest > 1 else None,
        "tokens_per_second": tokens / (last - started) if last > started else None,
    }
    ran = first > 0
    return {name: round(one, 3) if ran and one is not None else None for name, one in found.items()}


def server_timing(generation: Generation, *, whole: bool = True) -> str:
    """The times of a request in milliseconds (W3C Server-Timing)."""
    arrival = generation.arrival
    first = generation.first_token
    started = generation.started or arrival
    times = {"queue": started - arrival, "ttft": max(first - arrival, 0.0)}
    if whole:
        times |= {
            "prefill": max(first - started, 0.0),
            "decode": max(generation.last_token - first, 0.0),
            "total": time.monotonic() - arrival,
        }
    return ", ".join(f"{name};dur={1e3 * seconds:.1f}" for name, seconds in times.items())
