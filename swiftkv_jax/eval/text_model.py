"""A model with the interface that lm-evaluation-harness needs: text in, log-likelihoods and text
out, in the order of the requests.

Texts are split, marked, truncated and windowed by the harness's rules. The harness itself is not
imported: a request is any object whose `args` are those of an `lm_eval.api.instance.Instance`.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from tqdm import tqdm

from ..errors import DataError, UsageError
from ..infer.engine.engine import Engine
from ..infer.engine.requests import Request, RequestOutput, ScoreRequest
from ..infer.text import TextStream, check_unicode, encode_pair, first_token
from ..text.chat_messages import normalize_messages
from ..text.chat_template import render_chat
from ..text.special_tokens import brings_first_token
from .generation import Generation, generation

logger = logging.getLogger(__name__)


class HarnessRequest(Protocol):
    """A request of the harness."""

    @property
    def args(self) -> tuple[Any, ...]: ...


class TextModel:
    """An engine made with `EngineOptions(scoring=True)`, and the model's tokenizer."""

    def __init__(self, engine: Engine, tokenizer: Any, *, progress: bool = False):
        """`progress` shows a bar on a terminal. Raises `UsageError` without a tokenizer, and if the
        tokenizer has no token to put before a text."""
        if tokenizer is None:
            raise UsageError("this checkpoint has no tokenizer: tasks are text")
        self.engine = engine
        self.tokenizer = tokenizer
        self.prefix_token_id = first_token(tokenizer)
        """Token that stands before a text without context."""
        self._special = {
            token.content: id
            for id, token in tokenizer.added_tokens_decoder.items()
            if token.special
        }
        self._progress = progress
        # Twice what decodes together: when a row ends, the next is queued already. And enough for
        # scores to fill their chunks.
        self._in_flight = 2 * max(64, engine.options.max_num_seqs)

    # Requests of the harness --------------------------------------------------

    def loglikelihood(self, requests: Sequence[HarnessRequest]) -> list[tuple[float, bool]]:
        """ln p(continuation | context) of requests (context, continuation), and whether greedy
        decoding would generate the continuation.

        Texts that are too long lose their beginning. Raises `UsageError` if a continuation alone is
        too long, `DataError` if one has no token.
        """
        truncation = Truncation(self.engine.max_model_len)
        pairs = (self._pair(number, *request.args) for number, request in enumerate(requests))
        scores = (truncation.score(number, *pair) for number, pair in enumerate(pairs))
        found = self._score(scores, len(requests), "loglikelihood")
        self._warn(truncation)
        return found

    def loglikelihood_rolling(self, requests: Sequence[HarnessRequest]) -> list[float]:
        """Log-likelihood of the whole text of requests (text,), in windows (see `windows`) if it is
        too long for one."""
        texts = [self.tok_encode(*request.args) for request in requests]
        parts = [
            (text, window)
            for text, ids in enumerate(texts)
            for window in windows(ids, self.prefix_token_id, self._window)
        ]
        scores = (ScoreRequest([*context, *scored], len(context)) for _, (context, scored) in parts)
        found = self._score(scores, len(parts), "loglikelihood_rolling")
        totals = [0.0] * len(texts)
        for (text, _), (logprob, _) in zip(parts, found, strict=True):
            totals[text] += logprob
        return totals

    def generate_until(self, requests: Sequence[HarnessRequest]) -> list[str]:
        """Generated text of requests (context, gen_kwargs), up to the first of the stop strings or
        an end token.

        A context that is too long loses its beginning. Raises `UsageError` that names a setting
        which is not supported.
        """
        truncation = Truncation(self.engine.max_model_len)
        texts = [""] * len(requests)
        streams = dict[int, TextStream]()

        def make() -> Iterator[Request]:
            for number, request in enumerate(requests):
                context, gen_kwargs = request.args
                made = self.generation(gen_kwargs)
                prompt = truncation.prompt(self.tok_encode(context), made)
                streams[number] = TextStream(self.tokenizer, made.stops, prompt=prompt)
                yield Request(prompt, made.params, rng_stream=number)

        def update(number: int, output: RequestOutput) -> bool:
            if output.finish_reason == "error":
                raise DataError(f"request {number}: {output.error}")
            stream = streams[number]
            texts[number] += stream.push(output.token_ids)
            done = stream.stopped or output.finish_reason is not None
            if done:
                texts[number] += streams.pop(number).finish()
            return done

        self._run(make(), update, len(requests), "generate_until")
        self._warn(truncation)
        return texts

    def generation(self, gen_kwargs: dict[str, Any]) -> Generation:
        """Sampling parameters of a request: see `generation.generation`."""
        return generation(gen_kwargs, self._special)

    def apply_chat_template(
        self, chat_history: Sequence[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Write a conversation as one text; `add_generation_prompt` False leaves its last message
        open, to be continued.

        If the template refuses the messages, they are tried without the system message, as the
        harness's own models do. Raises `UsageError` without a template, and `DataError` if the
        template fails then too.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise UsageError("`apply_chat_template`: this model's tokenizer has no chat template")

        def render(messages: Sequence[dict[str, str]]) -> str:
            return render_chat(
                self.tokenizer,
                normalize_messages(messages),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )

        try:
            return render(chat_history)
        except DataError:
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
        """Tokens that a window may predict. Its context is one token more."""
        return self.engine.max_model_len - 1

    def _warn(self, truncation: Truncation) -> None:
        if truncation.count:
            logger.warning(
                f"{truncation.count} of {truncation.total} prompts do not fit into "
                f"{self.engine.max_model_len} tokens and lost their beginning: raise "
                f"`max_model_len`"
            )

    # Running ------------------------------------------------------------------

    def _score(
        self, requests: Iterable[ScoreRequest], total: int, what: str
    ) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = [(math.nan, False)] * total
        scored = dict[int, Sequence[int]]()
        parts = collections.defaultdict[int, list[RequestOutput]](list)

        def number_scored() -> Iterator[ScoreRequest]:
            for number, request in enumerate(requests):
                scored[number] = request.tokens[request.start :]
                yield request

        def update(number: int, output: RequestOutput) -> bool:
            if output.finish_reason == "error":
                raise DataError(f"request {number}: {output.error}")
            parts[number].append(output)
            if output.finish_reason is None:
                return False
            outputs = parts.pop(number)
            logprob = math.fsum(entry.logprob for part in outputs for entry in part.logprobs or ())
            likeliest = [token for part in outputs for token in part.token_ids]
            found[number] = logprob, likeliest == list(scored.pop(number))
            return True

        self._run(number_scored(), update, total, what)
        return found

    def _run(
        self,
        requests: Iterator[Request | ScoreRequest],
        update: Callable[[int, RequestOutput], bool],
        total: int,
        what: str,
    ) -> None:
        """Run all requests. `update` gets the number and the outputs of each, and returns whether
        the request is done."""
        outputs = self.engine.run(requests, in_flight=self._in_flight)
        bar = tqdm(total=total, desc=what, disable=None if self._progress else True)
        with bar, contextlib.closing(outputs):
            for number, output in outputs:
                if update(number, output):
                    self.engine.abort_request(output.request_id)  # no effect if it has ended
                    bar.update()


class Truncation:
    """Makes requests of at most `limit` tokens, and counts those that lost their beginning."""

    def __init__(self, limit: int):
        self._limit = limit
        self.count = 0
        """Requests that lost their beginning."""
        self.total = 0

    def score(self, number: int, context: list[int], continuation: list[int]) -> ScoreRequest:
        if len(continuation) >= self._limit:
            raise UsageError(
                f"request {number}: its continuation has {len(continuation)} tokens: raise "
                f"`max_model_len`={self._limit}"
            )
        tokens = self._last([*context, *continuation], self._limit)
        return ScoreRequest(tokens, len(tokens) - len(continuation))

    def prompt(self, tokens: list[int], settings: Generation) -> list[int]:
        room = self._limit - settings.params.max_tokens
        if room < 1:
            raise UsageError(
                f"max_gen_toks={settings.params.max_tokens} leaves no room for a prompt: raise "
                f"`max_model_len`={self._limit}"
            )
        return self._last(tokens, room)

    def _last(self, tokens: list[int], most: int) -> list[int]:
        self.total += 1
        self.count += len(tokens) > most
        return tokens[-most:]


def windows(tokens: Sequence[int], prefix: int, most: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (context, tokens to predict) of windows that together predict each token once, at most
    `most` at a time.

    The context of the first window is `prefix`, that of the others the token before them; the last
    has as much context as fits. These are the windows of
    `lm_eval.utils.get_rolling_token_windows` with a context of 1, split by `make_disjoint_window`.
    """
    for start in range(0, len(tokens), most):
        predicted = list(tokens[start : start + most])
        if not start:
            yield [prefix], predicted
        else:
            yield list(tokens[start + len(predicted) - most - 1 : start]), predicted
