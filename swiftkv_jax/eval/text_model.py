"""A model as lm-evaluation-harness asks it: text in, log-likelihoods and text out, in the order of
the requests.

Knows the harness's rules (how texts are split, marked, cut and windowed), and nothing of the
harness itself: a request is anything whose `args` are those of an `lm_eval.api.instance.Instance`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from tqdm import tqdm

from ..errors import DataError, UsageError
from ..infer.engine.engine import Engine
from ..infer.engine.requests import NOT_FINITE, Request, RequestOutput, ScoreRequest
from ..infer.text import TextStream, brings_first_token, check_unicode, encode_pair, first_token
from .generation import Generation, generation


class Asked(Protocol):
    """A request of the harness."""

    @property
    def args(self) -> tuple[Any, ...]: ...


class TextModel:
    """An engine made with `EngineOptions(scoring=True)`, and the model's tokenizer."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        *,
        log: Callable[[str], None] = lambda message: None,
        progress: bool = False,
    ):
        """`log` is told of texts that were cut. Raises `UsageError` if the tokenizer has no token
        to put before a text."""
        if tokenizer is None:
            raise UsageError("this checkpoint has no tokenizer: tasks are text")
        self.engine, self.tokenizer = engine, tokenizer
        self.prefix_token_id = first_token(tokenizer)
        """Stands before a text that has no context."""
        self._special = {
            token.content: id
            for id, token in tokenizer.added_tokens_decoder.items()
            if token.special
        }
        self._log, self._progress = log, progress
        # Twice what decodes together, so that a row that ends is followed by one that waits; scores
        # want full chunks.
        self._in_flight = 2 * max(64, engine.options.max_num_seqs)

    # What the harness asks ----------------------------------------------------

    def loglikelihood(self, requests: Sequence[Asked]) -> list[tuple[float, bool]]:
        """Of (context, continuation): ln p(continuation | context), and whether greedy decoding
        would say it.

        What is too long loses its beginning. Raises `UsageError` if a continuation alone is too
        long, `DataError` if one has no token.
        """
        cut = _Cut(self.engine.max_model_len)
        pairs = (self._pair(number, *request.args) for number, request in enumerate(requests))
        scores = (cut.score(number, *pair) for number, pair in enumerate(pairs))
        found = self._score(scores, len(requests), "loglikelihood")
        self._report(cut)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Asked]) -> list[float]:
        """Of (text,): the log-likelihood of all of it, in windows (see `windows`) if it is too long
        for one."""
        texts = [self.tok_encode(*request.args) for request in requests]
        owners = [
            (text, window)
            for text, ids in enumerate(texts)
            for window in windows(ids, self.prefix_token_id, self._window)
        ]
        scores = (
            ScoreRequest([*context, *wanted], len(context)) for _, (context, wanted) in owners
        )
        found = self._score(scores, len(owners), "loglikelihood_rolling")
        totals = [0.0] * len(texts)
        for (text, _), (logprob, _) in zip(owners, found, strict=True):
            totals[text] += logprob
        return totals

    def generate_until(self, requests: Sequence[Asked]) -> list[str]:
        """Of (context, gen_kwargs): the text that follows, up to the first of its stop strings or
        an end token.

        A context that is too long loses its beginning. Raises `UsageError` for settings it cannot
        honour, by name.
        """
        cut = _Cut(self.engine.max_model_len)
        texts, streams = [""] * len(requests), dict[int, TextStream]()

        def ask() -> Iterator[Request]:
            for number, request in enumerate(requests):
                context, gen_kwargs = request.args
                made = self.generation(gen_kwargs)
                prompt = cut.prompt(self.tok_encode(context), made)
                streams[number] = TextStream(self.tokenizer, made.stops, prompt=prompt)
                yield Request(prompt, made.params, rng_stream=number)

        def take(number: int, event: RequestOutput) -> bool:
            if event.finish_reason == "error":
                raise DataError(f"request {number}: {NOT_FINITE}")
            stream = streams[number]
            texts[number] += stream.push(event.tokens)
            done = stream.stopped or event.finish_reason is not None
            if done:
                texts[number] += streams.pop(number).finish()
            return done

        self._run(ask(), take, len(requests), "generate_until")
        self._report(cut)
        return texts

    def generation(self, gen_kwargs: dict[str, Any]) -> Generation:
        """See `generation.generation`."""
        return generation(gen_kwargs, self._special)

    def apply_chat_template(
        self, chat_history: Sequence[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The conversation as one text; `add_generation_prompt` False leaves its last message open,
        to be continued.

        A template that refuses a system message is tried without it, as the harness's own models
        do.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise UsageError("--apply-chat-template: this model's tokenizer has no chat template")
        import jinja2

        def render(messages: list[dict[str, str]]) -> str:
            return self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )

        try:
            return render(list(chat_history))
        except jinja2.TemplateError:
            return render([message for message in chat_history if message["role"] != "system"])

    # Tokens -------------------------------------------------------------------

    def tok_encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Token ids; None adds the tokenizer's special tokens unless the text brings its own first
        one."""
        check_unicode(text)
        add = (
            not brings_first_token(self.tokenizer, text)
            if add_special_tokens is None
            else add_special_tokens
        )
        return list(self.tokenizer(text, add_special_tokens=add)["input_ids"])

    def _pair(self, number: int, context: str, continuation: str) -> tuple[list[int], list[int]]:
        try:
            return encode_pair(self.tokenizer, context, continuation)
        except UsageError as error:
            raise DataError(f"request {number}: {error}") from None

    @property
    def _window(self) -> int:
        """Tokens that a window may predict: its context is one more, and what is predicted last
        needs no room in a model."""
        return self.engine.max_model_len - 1

    def _report(self, cut: _Cut) -> None:
        if cut.count:
            self._log(
                f"warning: {cut.count} of {cut.total} prompts do not fit into "
                f"{self.engine.max_model_len} tokens and lost their beginning: "
                "raise --max-model-len"
            )

    # Running ------------------------------------------------------------------

    def _score(
        self, requests: Iterable[ScoreRequest], total: int, what: str
    ) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = [(math.nan, False)] * total
        wanted = dict[int, Sequence[int]]()

        def ask() -> Iterator[ScoreRequest]:
            for number, request in enumerate(requests):
                wanted[number] = request.tokens[request.start :]
                yield request

        def take(number: int, event: RequestOutput) -> bool:
            assert event.logprobs is not None
            logprob = math.fsum(entry.logprob for entry in event.logprobs)
            if not math.isfinite(logprob):
                raise DataError(f"request {number}: {NOT_FINITE}")
            found[number] = logprob, event.tokens == list(wanted.pop(number))
            return True

        self._run(ask(), take, total, what)
        return found

    def _run(
        self,
        requests: Iterator[Request | ScoreRequest],
        take: Callable[[int, RequestOutput], bool],
        total: int,
        what: str,
    ) -> None:
        """Runs all requests; `take` gets the number and events of each, and says whether that was
        enough of it."""
        source, running = enumerate(requests), dict[int, int]()
        with tqdm(total=total, desc=what, disable=None if self._progress else True) as bar:
            try:
                while True:
                    for number, request in itertools.islice(source, self._in_flight - len(running)):
                        running[self._submit(number, request)] = number
                    if not running:
                        return
                    for event in self.engine.step():
                        if event.request in running and take(running[event.request], event):
                            self.engine.abort_request(event.request)  # an ended one is left alone
                            del running[event.request]
                            bar.update()
            finally:
                for id in running:
                    self.engine.abort_request(id)

    def _submit(self, number: int, request: Request | ScoreRequest) -> int:
        try:
            return self.engine.add_request(request)
        except UsageError as error:
            raise UsageError(f"request {number}: {error}") from None


class _Cut:
    """Makes requests that fit into `limit` tokens, and counts those that lost their beginning for
    it."""

    def __init__(self, limit: int):
        self._limit = limit
        self.count = self.total = 0

    def score(self, number: int, context: list[int], continuation: list[int]) -> ScoreRequest:
        if len(continuation) >= self._limit:
            raise UsageError(
                f"request {number}: its continuation has {len(continuation)} tokens: raise "
                f"--max-model-len {self._limit}"
            )
        tokens = self._last([*context, *continuation], self._limit)
        return ScoreRequest(tokens, len(tokens) - len(continuation))

    def prompt(self, tokens: list[int], made: Generation) -> list[int]:
        room = self._limit - made.params.max_tokens
        if room < 1:
            raise UsageError(
                f"max_gen_toks={made.params.max_tokens} leaves no room for a prompt: raise "
                f"--max-model-len {self._limit}"
            )
        return self._last(tokens, room)

    def _last(self, tokens: list[int], most: int) -> list[int]:
        self.total += 1
        self.count += len(tokens) > most
        return tokens[-most:]


def windows(tokens: Sequence[int], prefix: int, most: int) -> Iterator[tuple[list[int], list[int]]]:
    """(context, tokens to predict) of consecutive pieces that predict each token once, at most
    `most` at a time.

    The first piece follows `prefix`, the others the token before them; the last has as much context
    as fits. As `lm_eval.utils.get_rolling_token_windows` with a context of 1 makes them, and
    `make_disjoint_window` then parts them.
    """
    for start in range(0, len(tokens), most):
        piece = list(tokens[start : start + most])
        if not start:
            yield [prefix], piece
        else:
            yield list(tokens[start + len(piece) - most - 1 : start]), piece
