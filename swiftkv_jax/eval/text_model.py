"""A model for lm-evaluation-harness: log-likelihoods and texts, in the order of the requests.

Texts are split, marked, truncated and windowed by the harness's rules.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..errors import DataError, UsageError
from ..infer.commands.batch import Result, Row, run_rows
from ..infer.commands.output import ProgressWriter
from ..infer.commands.results import Completions
from ..infer.commands.score import Scores
from ..infer.engine.engine import Engine
from ..infer.engine.requests import Request, ScoreRequest
from ..infer.engine.sampling_params import SamplingParams
from ..infer.text import check_unicode, first_token
from ..text.chat_messages import normalize_messages
from ..text.chat_template import render_chat
from ..text.special_tokens import brings_first_token

logger = logging.getLogger(__name__)

MAX_GEN_TOKS = 256
"""New tokens if a task sets none: the harness's own default."""
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of one setting; the first that is given counts, as in
`lm_eval.models.utils.normalize_gen_kwargs`."""


def harness(module: str) -> Any:
    """Import a module of lm-evaluation-harness. Raises `UsageError` if it is not installed."""
    try:
        return importlib.import_module(f"lm_eval.{module}")
    except ImportError as error:
        raise UsageError(
            f"tasks need lm-evaluation-harness ({error}): pip install 'swiftkv-jax[eval]'"
        ) from None


class TextModel:
    """An engine made with `EngineOptions(scoring=True)` and the model's tokenizer, with the methods
    of an `lm_eval.api.model.TemplateLM`: see `harness_class`. A request is any object with the
    `args` of an `lm_eval.api.instance.Instance`."""

    def __init__(self, engine: Engine, tokenizer: Any, *, progress: bool = False):
        """`progress` shows a bar on a terminal. Raises `UsageError` without a tokenizer, and if the
        tokenizer has no token to put before a text."""
        super().__init__()
        if tokenizer is None:
            raise UsageError("this checkpoint has no tokenizer: tasks are text")
        self.engine = engine
        self.tokenizer = tokenizer
        self.max_length = engine.max_model_len
        self.tokenizer_name = str(tokenizer.name_or_path).replace("/", "__")
        self.eot_token_id: Any = tokenizer.eos_token_id
        self.prefix_token_id = first_token(tokenizer)
        """Token that stands before a text without context."""
        added = tokenizer.added_tokens_decoder.items()
        self._special_tokens = {token.content: id for id, token in added if token.special}
        self._progress = progress
        # Twice what decodes together: when a row ends, the next is queued already. And enough for
        # scores to fill their chunks.
        self._in_flight = 2 * max(64, engine.options.max_num_seqs)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """ln p(continuation | context) of requests (texts, context, continuation), and whether
        greedy decoding would generate the continuation.

        Texts that are too long lose their beginning. Raises `UsageError` if a continuation alone is
        too long, `DataError` if one has no token.
        """

        def made() -> Iterator[tuple[ScoreRequest, Scores]]:
            for number, (_, context, continuation) in enumerate(requests):
                if len(continuation) >= self.max_length:
                    raise UsageError(
                        f"request {number}: its continuation has {len(continuation)} tokens: raise "
                        f"`max_model_len`={self.max_length}"
                    )
                tokens = self._last([*context, *continuation], self.max_length)
                request = ScoreRequest(tokens, len(tokens) - len(continuation))
                yield request, Scores(request)

        return [(one.logprob, one.is_greedy) for one in self._run(made(), len(requests))]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood of the whole text of requests (text,), in the windows of the harness if it
        is too long for one."""
        utils = harness("utils")
        first = self.prefix_token_id
        parts = [
            (number, *utils.make_disjoint_window(window))
            for number, request in enumerate(requests)
            for window in utils.get_rolling_token_windows(
                self.tok_encode(*request.args), first, self.max_length - 1, context_len=1
            )
        ]
        totals = [0.0] * len(requests)
        found = self._loglikelihood_tokens(parts)
        for (number, *_), (logprob, _) in zip(parts, found, strict=True):
            totals[number] += logprob
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generated text of requests (context, gen_kwargs), up to the first of the stop strings or
        an end token.

        A context that is too long loses its beginning. Raises `UsageError` that names a setting
        which is not supported.
        """

        def made() -> Iterator[tuple[Request, Completions]]:
            for number, request in enumerate(requests):
                context, gen_kwargs = request.args
                params = generation(gen_kwargs, self._special_tokens)
                room = self.max_length - params.max_tokens
                if room < 1:
                    raise UsageError(
                        f"max_gen_toks={params.max_tokens} leaves no room for a prompt: raise "
                        f"`max_model_len`={self.max_length}"
                    )
                prompt = self._last(self.tok_encode(context), room)
                one = Request(prompt, params, rng_stream=number)
                yield one, Completions(self.tokenizer, one)

        return [one.samples[0].text for one in self._run(made(), len(requests))]

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
            raise UsageError("--apply_chat_template: this model's tokenizer has no chat template")
        render = functools.partial(
            render_chat,
            self.tokenizer,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        messages = normalize_messages(chat_history)
        try:
            return render(messages)
        except DataError:
            return render([message for message in messages if message["role"] != "system"])

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids; None adds the tokenizer's special tokens unless the text brings its own first
        one."""
        check_unicode(string)
        if add_special_tokens is None:
            add_special_tokens = not brings_first_token(self.tokenizer, string)
        return list(self.tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"])

    def _last(self, tokens: list[int], most: int) -> list[int]:
        self._cut += len(tokens) > most
        return tokens[-most:]

    def _run[R: Result](
        self, requests: Iterable[tuple[Request | ScoreRequest, R]], total: int
    ) -> list[R]:
        """Run `total` requests, made when there is room for them; returns their results. Raises
        `DataError` if one has failed, once all have ended."""
        self._cut = 0
        results: list[R] = []

        def rows() -> Iterator[Row]:
            for number, (request, result) in enumerate(requests):
                results.append(result)
                yield Row(number, f"request {number}", request, result)

        writer = ProgressWriter(total=total, progress=self._progress)
        with contextlib.closing(writer):
            run_rows(self.engine, rows(), writer, in_flight=self._in_flight)
        if writer.failed:
            writer.end()
            raise DataError(f"{writer.failed} of {total} requests failed")
        if self._cut:
            logger.warning(
                f"{self._cut} of {total} prompts do not fit into {self.max_length} tokens and lost "
                f"their beginning: raise `max_model_len`"
            )
        if summary := writer.throughput.summary(self.engine):
            logger.info(summary)
        return results


def generation(gen_kwargs: Mapping[str, Any], special_tokens: Mapping[str, int]) -> SamplingParams:
    """Sampling parameters of a task's `gen_kwargs`, with the defaults of the harness.

    `do_sample` False is greedy whatever `temperature` says; left out, a temperature above 0
    samples; True without a temperature samples at 1. A stop string that is one of `special_tokens`
    (text -> id) becomes a stop token: decoded text never shows those. Raises `UsageError` that
    names what is unknown or out of range.
    """
    fields = dict(gen_kwargs)
    if fields.pop("n", 1) != 1:
        raise UsageError("n is not supported: the harness takes one text for each request")
    limits = [limit for name in _LIMITS if (limit := fields.pop(name, None)) is not None]
    stops = [stop for name in ("until", "stop") for stop in _listed(fields.pop(name, None))]
    tokens = [special_tokens[stop] for stop in stops if stop in special_tokens]
    do_sample = fields.pop("do_sample", None)
    if do_sample not in (None, True, False):
        raise UsageError(f"do_sample={do_sample!r} must be true or false")
    if do_sample:
        fields.setdefault("temperature", 1.0)
    elif do_sample is not None:
        fields["temperature"] = 0.0
    fields["max_tokens"] = next(iter(limits), MAX_GEN_TOKS)
    fields["stop_token_ids"] = [*(fields.get("stop_token_ids") or ()), *dict.fromkeys(tokens)]
    fields["stop"] = [stop for stop in stops if stop not in special_tokens]
    return SamplingParams.from_json({"temperature": 0.0} | fields, SamplingParams())


def _listed(stops: Any) -> list[Any]:
    """One or several stop strings, without empty ones: tasks use those for "none"."""
    if not isinstance(stops, list | tuple):
        stops = [stops]
    return [stop for stop in stops if stop not in (None, "")]


@functools.cache
def harness_class() -> Any:
    """The `TextModel` as an `lm_eval.api.model.LM`, which the harness calls `swiftkv`. Raises
    `UsageError` without the harness."""

    @harness("api.registry").register_model("swiftkv")
    class SwiftKVLM(TextModel, harness("api.model").TemplateLM):
        max_length = prefix_token_id = eot_token_id = tokenizer_name = None  # set in `__init__`

    return SwiftKVLM
