"""A model for lm-evaluation-harness: log-likelihoods and texts, in the order of the requests.

Texts are split, marked, truncated and windowed by the harness's rules.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from tqdm import tqdm

from ..errors import DataError, UsageError
from ..infer.commands.score import Scores
from ..infer.engine.engine import Engine
from ..infer.engine.requests import Request, RequestOutput, ScoreRequest
from ..infer.text import TextStream, check_unicode, encode_pair, first_token
from ..text.chat_messages import normalize_messages
from ..text.chat_template import render_chat
from ..text.special_tokens import brings_first_token
from .generation import generation
from .tasks import harness

logger = logging.getLogger(__name__)


class HarnessRequest(Protocol):
    """A request: an `lm_eval.api.instance.Instance`, or another object with its `args`."""

    @property
    def args(self) -> tuple[Any, ...]: ...


class TextModel:
    """An engine made with `EngineOptions(scoring=True)` and the model's tokenizer, with the methods
    of an `lm_eval.api.model.TemplateLM`: see `harness_model`."""

    def __init__(self, engine: Engine, tokenizer: Any, *, progress: bool = False):
        """`progress` shows a bar on a terminal. Raises `UsageError` without a tokenizer, and if the
        tokenizer has no token to put before a text."""
        super().__init__()
        if tokenizer is None:
            raise UsageError("this checkpoint has no tokenizer: tasks are text")
        self.engine = engine
        self.tokenizer = tokenizer
        self._first = first_token(tokenizer)
        self.special_tokens = {
            token.content: id
            for id, token in tokenizer.added_tokens_decoder.items()
            if token.special
        }
        """Text -> id."""
        self._progress = progress
        # Twice what decodes together: when a row ends, the next is queued already. And enough for
        # scores to fill their chunks.
        self._in_flight = 2 * max(64, engine.options.max_num_seqs)

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Token that stands before a text without context."""
        return self._first

    @property
    def max_length(self) -> int:
        return self.engine.max_model_len

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    # Requests of the harness --------------------------------------------------

    def loglikelihood(
        self, requests: Sequence[HarnessRequest], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """ln p(continuation | context) of requests (context, continuation), and whether greedy
        decoding would generate the continuation.

        Texts that are too long lose their beginning. Raises `UsageError` if a continuation alone is
        too long, `DataError` if one has no token.
        """
        cut = 0

        def made() -> Iterator[ScoreRequest]:
            nonlocal cut
            for number, request in enumerate(requests):
                try:
                    context, continuation = encode_pair(self.tokenizer, *request.args)
                except UsageError as error:
                    raise DataError(f"request {number}: {error}") from None
                if len(continuation) >= self.max_length:
                    raise UsageError(
                        f"request {number}: its continuation has {len(continuation)} tokens: raise "
                        f"`max_model_len`={self.max_length}"
                    )
                tokens = [*context, *continuation]
                cut += len(tokens) > self.max_length
                tokens = tokens[-self.max_length :]
                yield ScoreRequest(tokens, len(tokens) - len(continuation))

        found = self._score(made(), len(requests), "loglikelihood")
        self._warn_of_truncation(cut, len(requests))
        return found

    def loglikelihood_rolling(
        self, requests: Sequence[HarnessRequest], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood of the whole text of requests (text,), in the windows of the harness if it
        is too long for one."""
        utils = harness("utils")
        parts = [
            (number, utils.make_disjoint_window(window))
            for number, request in enumerate(requests)
            for window in utils.get_rolling_token_windows(
                self.tok_encode(*request.args), self._first, self.max_length - 1, context_len=1
            )
        ]
        scores = (ScoreRequest([*context, *scored], len(context)) for _, (context, scored) in parts)
        found = self._score(scores, len(parts), "loglikelihood_rolling")
        totals = [0.0] * len(requests)
        for (number, _), (logprob, _) in zip(parts, found, strict=True):
            totals[number] += logprob
        return totals

    def generate_until(
        self, requests: Sequence[HarnessRequest], disable_tqdm: bool = False
    ) -> list[str]:
        """Generated text of requests (context, gen_kwargs), up to the first of the stop strings or
        an end token.

        A context that is too long loses its beginning. Raises `UsageError` that names a setting
        which is not supported.
        """
        streams = dict[int, TextStream]()
        cut = 0

        def made() -> Iterator[Request]:
            nonlocal cut
            for number, request in enumerate(requests):
                context, gen_kwargs = request.args
                params, stops = generation(gen_kwargs, self.special_tokens)
                room = self.max_length - params.max_tokens
                if room < 1:
                    raise UsageError(
                        f"max_gen_toks={params.max_tokens} leaves no room for a prompt: raise "
                        f"`max_model_len`={self.max_length}"
                    )
                prompt = self.tok_encode(context)
                cut += len(prompt) > room
                prompt = prompt[-room:]
                streams[number] = TextStream(self.tokenizer, stops, prompt=prompt)
                yield Request(prompt, params, rng_stream=number)

        texts = [""] * len(requests)

        def update(number: int, output: RequestOutput) -> bool:
            stream = streams[number]
            texts[number] += stream.push(output.token_ids)
            done = stream.stopped or output.finish_reason is not None
            if done:
                texts[number] += stream.finish()
                del streams[number]
            return done

        self._run(made(), len(requests), update, "generate_until")
        self._warn_of_truncation(cut, len(requests))
        return texts

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

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids; None adds the tokenizer's special tokens unless the text brings its own first
        one."""
        check_unicode(string)
        if add_special_tokens is None:
            add_special_tokens = not brings_first_token(self.tokenizer, string)
        return list(self.tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"])

    # Running ------------------------------------------------------------------

    def _warn_of_truncation(self, cut: int, total: int) -> None:
        if cut:
            logger.warning(
                f"{cut} of {total} prompts do not fit into {self.max_length} tokens and lost their "
                f"beginning: raise `max_model_len`"
            )

    def _score(
        self, requests: Iterable[ScoreRequest], count: int, what: str
    ) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = [(math.nan, False)] * count
        running = dict[int, Scores]()

        def update(number: int, output: RequestOutput) -> bool:
            if running[number].update(output):
                return False
            scores = running.pop(number)
            found[number] = scores.logprob, scores.is_greedy
            return True

        def noted() -> Iterator[ScoreRequest]:
            for number, request in enumerate(requests):
                running[number] = Scores(request)
                yield request

        self._run(noted(), count, update, what)
        return found

    def _run(
        self,
        requests: Iterator[Request | ScoreRequest],
        count: int,
        update: Callable[[int, RequestOutput], bool],
        what: str,
    ) -> None:
        """Run `count` requests, made when there is room for them. `update` gets the number and the
        outputs of each, and returns whether the request is done."""
        outputs = self.engine.run(requests, in_flight=self._in_flight)
        bar = tqdm(total=count, desc=what, disable=None if self._progress else True)
        with bar, contextlib.closing(outputs):
            for number, output in outputs:
                if output.finish_reason == "error":
                    raise DataError(f"request {number}: {output.error}")
                if update(number, output):
                    self.engine.abort_request(output.request_id)  # no effect if it has ended
                    bar.update()


def harness_model(engine: Engine, tokenizer: Any, *, progress: bool = False) -> Any:
    """The `TextModel` as an `lm_eval.api.model.LM`, for `lm_eval.simple_evaluate(model=...)` too.
    Raises `UsageError` without the harness."""

    class SwiftKVLM(TextModel, harness("api.model").TemplateLM):
        def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[tuple[float, bool]]:
            raise NotImplementedError  # `loglikelihood` does it all

    return SwiftKVLM(engine, tokenizer, progress=progress)
