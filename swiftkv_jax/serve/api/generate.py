"""The routes that generate, completions and chats: what the engine runs for a body."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Awaitable, Sequence

from ...infer.engine.requests import Request, ScoreRequest
from ...infer.engine.sampling_params import SamplingParams
from ..app import App
from ..bodies.forms import Form, form_of
from ..bodies.params import (
    check_logprob_entries,
    check_prompt_logprobs,
    predicted_text,
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
from ..service.generation import Choice, EngineRequest, Generation
from ..text.prompts import LONG, Encoding, Prompt
from ..text.reasoning import ReasoningParser, Start
from ..text.token_text import WithSpecialTokens
from ..text.tool_formats import ToolFormat
from .answers import ChatWriter, CompletionWriter
from .run import reserve


def salt_of(app: App, exchange: HTTPExchange, cache_salt: str | None) -> str:
    """Salt of the prefix cache: of the key, and of the request."""
    client = "" if app.options.share_prefix_cache else exchange.client.salt
    if not client and not cache_salt:
        return ""
    return hashlib.sha256(f"{client}\0{cache_salt or ''}".encode()).hexdigest()


class _Asked[B: ChatBody | CompletionBody]:
    """A body that generates, and what the engine is asked for it."""

    def __init__(self, app: App, exchange: HTTPExchange, body: B):
        """Check what needs no prompt, and take the body's id. Raises `APIError`."""
        refuse_unsupported(body)
        self.app = app
        self.exchange = exchange
        self.body = body
        self.priority = priority_of(body, app.options)
        if body.request_id is not None:
            exchange.request_id = body.request_id
        check_prompt_logprobs(body, scoring=app.scoring)
        self.predicted = predicted_text(body, possible=app.service.num_speculative_tokens > 0)
        self.salt = salt_of(app, exchange, body.cache_salt)
        self.adapter = app.adapter_of(body.model)

    async def form(self, tool_format: ToolFormat | None) -> Form:
        """The form that the body asks for. Schemas of a megabyte take a tenth of a second to read.
        Raises `APIError`."""
        if self.exchange.num_bytes_in <= LONG:
            return form_of(self.body, tool_format)
        work = functools.partial(form_of, self.body, tool_format)
        return await self.app.encoder.in_thread(work, self.exchange.num_bytes_in)

    async def timed[T](self, encoding: Awaitable[T]) -> T:
        """Return the result of `encoding`, the time of which is in the metrics."""
        start = time.perf_counter()
        found = await encoding
        self.app.service.metrics.tokenize.observe(time.perf_counter() - start)
        return found

    def params(self, prompts: list[Prompt], *, repeats: bool) -> SamplingParams:
        """The parameters of the body. With `repeats` each sample lists the tokens of its prompt.
        Raises `APIError`."""
        lengths = [len(prompt.token_ids) for prompt in prompts]
        service = self.app.service
        params = sampling_params(
            self.body,
            self.app.sampling_defaults,
            self.app.options,
            prompt_tokens=max(lengths),
            max_model_len=service.max_model_len,
            max_num_seqs=service.max_num_seqs,
            most_new_tokens=service.engine.most_new_tokens,
        )
        echoed = sum(lengths) * (params.n if repeats else 1)
        check_logprob_entries(self.body, params, prompts=len(prompts), echoed=echoed)
        return params

    def score(self, prompt: Prompt, top_logprobs: int) -> EngineRequest:
        """Log-probabilities of all tokens of a prompt but the first."""
        request = ScoreRequest(
            prompt.token_ids,  # type: ignore[arg-type]
            start=1,
            top_logprobs=top_logprobs,
            cache_salt=self.salt,
            page_keys=prompt.page_keys or None,
            adapter=self.adapter.engine_name,
        )
        return EngineRequest(request, prompt)

    async def parts(
        self, prompts: list[Prompt], params: SamplingParams, form: Form, start: Start = "over"
    ) -> list[EngineRequest]:
        """Make the engine requests of `prompts`. A prompt with a client's seed gets the answer that
        it gets alone. `start` is where the answers start. Raises `APIError`."""
        app = self.app
        body = self.body
        matcher = await app.matcher_of(form)
        tokenizer = app.tokenizer
        if start != "over":
            assert app.reasoning is not None
            reasoned = None if matcher is None else app.reasoning.before(matcher, start)
            if matcher is not None and reasoned is None:
                start = "over"
            else:
                matcher = reasoned
                tokenizer = app.reasoning.tokenizer
        if body.skip_special_tokens is False:
            tokenizer = WithSpecialTokens(app.tokenizer)
        if body.bad_words or body.allowed_token_ids is not None:
            possible = app.grammars is not None
            vocab_size = app.encoder.vocab_size
            restrict = functools.partial(
                filtered, body, matcher, app.tokenizer, vocab_size, possible=possible
            )
            matcher = await app.encoder.in_thread(restrict, sum(map(len, body.bad_words or ())))
        prediction: Sequence[int] = ()
        if self.predicted:
            prediction = await app.encoder.encode_prediction(self.predicted)  # type: ignore[assignment]
        omit = isinstance(body, ChatBody) and body.include_reasoning is False
        include_stop = bool(body.include_stop_str_in_output)
        parts = []
        for number, prompt in enumerate(prompts):
            rng_stream = number if body.seed is None else 0
            request = Request(
                prompt.token_ids,  # type: ignore[arg-type]
                params,
                rng_stream=rng_stream,
                cache_salt=self.salt,
                page_keys=prompt.page_keys or None,
                grammar=matcher,
                speculative=body.speculative is not False,
                prediction=prediction,
                adapter=self.adapter.engine_name,
            )
            part = EngineRequest(request, prompt, grammar_param=form.param)
            for index in range(number * params.n, (number + 1) * params.n):
                reader = None if start == "over" else ReasoningParser(start, omit=omit)
                choice = Choice(index, tokenizer, request, include_stop, form.parser(), reader)
                part.choices.append(choice)
            parts.append(part)
        return parts

    def generation(
        self,
        reservation: Reservation,
        prompts: list[Prompt],
        parts: list[EngineRequest],
        param: str,
    ) -> Generation:
        """Reserve what the parts cost. Scores of a prompt that is continued too are no sequences of
        their own. Raises `APIError` that names `param`."""
        samples = sum(len(part.choices) for part in parts)
        sequences = samples or max(len(parts), 1)
        reserve(self.app, reservation, parts, sequences, param)
        generation = Generation(prompts, parts, reservation, self.exchange.arrival)
        generation.priority = self.priority
        return generation


async def completion(
    app: App, exchange: HTTPExchange, body: CompletionBody, reservation: Reservation
) -> tuple[Generation, CompletionWriter]:
    """Return what the engine runs for a body, and the writer of the answer. Raises `APIError`."""
    asked = _Asked(app, exchange, body)
    texts = body.prompts()
    scores = bool(body.echo) and body.logprobs is not None
    if scores and not app.scoring:
        raise unsupported("echo", "`echo` with `logprobs` needs the server's --enable-scoring")
    if body.stream and (scores or body.max_tokens == 0):
        raise unsupported(
            "stream", "`stream` does not go with `echo` and `logprobs`, or without new tokens"
        )
    truncation = truncation_of(body, app.service.max_model_len)
    how = Encoding(
        asked.salt,
        "prompt",
        body.add_special_tokens is not False,
        truncation,
        prompt_digest=asked.adapter.prompt_digest,
    )
    prompts = await asked.timed(app.encoder.encode(texts, how))
    form = await asked.form(None)
    params = asked.params(prompts, repeats=True)
    top = max(params.logprobs or 0, body.prompt_logprobs or 0)
    scored = [asked.score(prompt, top) for prompt in prompts]
    parts = []
    if scores or body.prompt_logprobs is not None:
        parts = [part for part in scored if len(part.prompt.token_ids) > 1]
    if body.max_tokens != 0:
        parts += await asked.parts(prompts, params, form)
    param = "n" if params.n > 1 else "prompt"
    generation = asked.generation(reservation, prompts, parts, param)
    echoed = []
    if body.echo:
        echoed = [
            prompt.text or await app.encoder.detokenize(prompt.token_ids.tolist())
            for prompt in prompts
        ]
    writer = CompletionWriter(app, exchange, body, params, scored, prompt_texts=echoed)
    return generation, writer


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
    asked = _Asked(app, exchange, body)
    form = await asked.form(app.tool_format)
    digest = asked.adapter.prompt_digest
    encoding = app.encode_chat(body, asked.salt, exchange.num_bytes_in, prompt_digest=digest)
    prompt = await asked.timed(encoding)
    params = asked.params([prompt], repeats=False)
    start: Start = "over"
    if app.reasoning is not None:
        start = app.reasoning.start(prompt.text, continued(body))
    parts = []
    if body.prompt_logprobs is not None and len(prompt.token_ids) > 1:
        parts.append(asked.score(prompt, body.prompt_logprobs))
    parts += await asked.parts([prompt], params, form, start)
    return asked.generation(reservation, [prompt], parts, "n"), params


def continued(body: ChatBody) -> str:
    """Text of the message that the answer goes on with."""
    if not body.continue_final_message:
        return ""
    return str(body.messages[-1].rendered(len(body.messages) - 1)["content"])
