"""Answers to completions and chats, whole and as a stream: OpenAI's objects, with vLLM's
additions."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, ClassVar

import msgspec

from ...infer.engine.sampling_params import SamplingParams
from ..app import App
from ..http.exchange import DONE, HTTPExchange
from ..protocol import ChatBody, CompletionBody, StreamOptions
from ..service.generation import Choice, EngineRequest, Generation, TextDelta
from . import run
from .logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs


def usage(generation: Generation) -> dict[str, Any]:
    prompt = generation.num_prompt_tokens
    completion = generation.num_tokens
    details = {"reasoning_tokens": generation.num_reasoning_tokens}
    if (predicted := generation.prediction_tokens) is not None:
        names = "accepted_prediction_tokens", "rejected_prediction_tokens"
        details |= zip(names, predicted, strict=True)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
        "completion_tokens_details": details,
    }


class Writer[B: ChatBody | CompletionBody](run.Writer):
    """The choices of one request, whole or in chunks."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    prefix: ClassVar[str]

    def __init__(
        self,
        app: App,
        exchange: HTTPExchange,
        body: B,
        params: SamplingParams,
        scored: list[EngineRequest],
    ):
        """`scored` has the scores of each prompt, if they were asked for."""
        self.body = body
        self.params = params
        self.with_logprobs = params.logprobs is not None
        # They take microseconds for each token, and there may be many.
        self.takes_long = self.with_logprobs or body.prompt_logprobs is not None
        self._scored = scored
        self._wanted = body.stream_options or StreamOptions()
        self._begun = set[int]()
        self._ended = set[int]()
        """Indices of choices in the stream."""
        self._has_metrics = app.options.request_metrics
        self._num_drafts = app.service.num_speculative_tokens
        self._spellings = app.spellings
        if body.return_tokens_as_token_ids:
            self._spellings = app.spellings_as_ids
        self._head = {
            "id": f"{self.prefix}-{exchange.request_id}",
            "object": self.kind,
            "created": int(time.time()),
            "model": body.model or app.model_names[0],
        }
        self._fingerprint = app.fingerprint

    def whole(self, generation: Generation) -> dict[str, Any]:
        return self._head | {
            "choices": self._choices(generation),
            "usage": usage(generation),
            "system_fingerprint": self._fingerprint,
            **self._metrics(generation),
        }

    def events(self, generation: Generation) -> bytes:
        """Chunks, one for each choice that has grown, and [DONE]."""
        wanted = self._wanted
        num_choices = sum(len(part.choices) for part in generation.parts)
        fields: dict[str, Any] = {}
        if wanted.continuous_usage_stats:
            fields["usage"] = usage(generation)
        elif wanted.include_usage:
            fields["usage"] = None
        events: list[bytes] = []
        for part in generation.parts:
            for choice in part.choices:
                if choice.index in self._ended or not choice.is_ready:
                    continue
                if choice.index not in self._begun:
                    self._begun.add(choice.index)
                    events += self.first(part, choice, **fields)
                if choice.finish_reason is not None:
                    self._ended.add(choice.index)
                if len(self._ended) == num_choices and not wanted.include_usage:
                    fields |= self._metrics(generation)
                events.append(self.event([self.next(choice, choice.take())], **fields))
        if generation.is_done:
            if wanted.include_usage:
                metrics = self._metrics(generation)
                events.append(self.event([], usage=usage(generation), **metrics))
            events.append(DONE)
        return b"".join(events)

    def _metrics(self, generation: Generation) -> dict[str, Any]:
        """vLLM's `metrics` of an answer, if the server gives them."""
        if not self._has_metrics:
            return {}
        found: dict[str, Any] = generation.times.request_metrics(
            generation.num_tokens, generation.longest
        )
        if self._num_drafts:
            found["speculative_decoding"] = self._speculation(generation)
        return {"metrics": found}

    def _speculation(self, generation: Generation) -> dict[str, Any] | None:
        """vLLM's summary of the drafts of an answer; None for several samples."""
        samples = list(generation.choices)
        if len(samples) != 1:
            return None
        drafts = samples[0].drafts
        return {
            "mean_acceptance_length": 1 + drafts.accepted / max(drafts.steps, 1),
            "draft_acceptance_rate": drafts.accepted / max(drafts.tokens, 1),
            "num_spec_steps": drafts.steps,
            "num_accepted_draft_tokens": drafts.accepted,
            "num_draft_tokens": drafts.tokens,
            "num_spec_tokens": self._num_drafts,
        }

    def event(self, choices: list[dict[str, Any]], **fields: Any) -> bytes:
        """An event of a stream."""
        chunk = self._head | {
            "object": self.chunk_kind,
            "choices": choices,
            "system_fingerprint": self._fingerprint,
            **fields,
        }
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"

    def first(self, part: EngineRequest, choice: Choice, **fields: Any) -> list[bytes]:
        """Events that come before the text of a choice."""
        raise NotImplementedError

    def next(self, choice: Choice, delta: TextDelta) -> dict[str, Any]:
        """The entry of a choice in a chunk."""
        raise NotImplementedError

    def _choices(self, generation: Generation) -> list[dict[str, Any]]:
        return [self._choice(part, choice) for part in generation.parts for choice in part.choices]

    def _choice(self, part: EngineRequest, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _of_prompt(self, number: int) -> dict[str, Any]:
        """The `prompt_logprobs` of a prompt, if they were asked for."""
        count = self.body.prompt_logprobs
        if count is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self._scored[number], count, self._spellings)}

    def _ids(self, delta: TextDelta) -> dict[str, Any]:
        return {"token_ids": delta.token_ids} if self.body.return_token_ids else {}

    def _prompt_ids(self, part: EngineRequest) -> dict[str, Any]:
        if not self.body.return_token_ids:
            return {}
        return {"prompt_token_ids": part.prompt.token_ids.tolist()}


class ChatWriter(Writer[ChatBody]):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def whole(self, generation: Generation) -> dict[str, Any]:
        found = super().whole(generation) | {"service_tier": None}
        return found | self._prompt_ids(generation.parts[0]) | self._of_prompt(0)

    def _choice(self, part: EngineRequest, choice: Choice) -> dict[str, Any]:
        delta = choice.take()
        return {
            "index": choice.index,
            "message": _message(delta),
            "logprobs": self._logprobs(delta),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **self._ids(delta),
        }

    def _logprobs(self, delta: TextDelta) -> dict[str, Any] | None:
        return chat_logprobs(delta, self._spellings) if self.with_logprobs else None

    def first(self, part: EngineRequest, choice: Choice, **fields: Any) -> list[bytes]:
        delta = {"role": "assistant", "content": ""}
        found = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        if choice.index == 0:
            fields |= self._prompt_ids(part)
        return [self.event([found], **fields)]

    def next(self, choice: Choice, delta: TextDelta) -> dict[str, Any]:
        result = {
            "index": choice.index,
            "delta": _delta(delta),
            "logprobs": self._logprobs(delta),
            "finish_reason": choice.finish_reason,
        }
        if choice.finish_reason is not None:
            result["stop_reason"] = choice.stop_reason
        return result | self._ids(delta)


def _message(delta: TextDelta) -> dict[str, Any]:
    """A whole answer. Its content is null where it only reasons or calls."""
    found = _delta(delta)
    for call in found.get("tool_calls", ()):
        del call["index"]
    content = None if found else ""
    return {"role": "assistant", "content": content, "refusal": None} | found


def _delta(delta: TextDelta) -> dict[str, Any]:
    """The `delta` of a chunk: what there is of reasoning, content and calls."""
    found = {"reasoning": delta.reasoning, "content": delta.text, "tool_calls": _tool_calls(delta)}
    return {name: value for name, value in found.items() if value}


def _tool_calls(delta: TextDelta) -> list[dict[str, Any]]:
    """The calls that have grown: name and id of each come once, with what there is of its
    arguments."""
    calls: list[dict[str, Any]] = []
    for call in delta.calls:
        if call.name is not None:
            function = {"name": call.name, "arguments": call.arguments}
            one = {"index": call.index, "id": call.id, "type": "function", "function": function}
            calls.append(one)
        elif calls and calls[-1]["index"] == call.index:
            calls[-1]["function"]["arguments"] += call.arguments
        else:
            calls.append({"index": call.index, "function": {"arguments": call.arguments}})
    return calls


class CompletionWriter(Writer[CompletionBody]):
    kind = "text_completion"
    chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, *args: Any, prompt_texts: list[str]):
        """`prompt_texts` has the text of each prompt for `echo`, and else nothing."""
        super().__init__(*args)
        self._prompt_texts = prompt_texts
        self._lists: dict[int, CompletionLogprobs] = {}

    def _choices(self, generation: Generation) -> list[dict[str, Any]]:
        if self.body.max_tokens != 0:
            return super()._choices(generation)
        found = []
        for index in range(len(self._scored) * self.params.n):
            number = index // self.params.n
            logprobs = None
            if self.with_logprobs:
                logprobs = self._prompt_lists(index)
            choice = {"index": index, "text": self._prompt_texts[number], "logprobs": logprobs}
            choice |= {"finish_reason": "length", "stop_reason": None}
            found.append(choice | self._of_prompt(number))
        return found

    def _prompt_lists(self, index: int) -> dict[str, Any]:
        """Lists of a prompt's tokens, the first of which nothing predicts."""
        number = index // self.params.n
        part = self._scored[number]
        logprobs = (
            dataclasses.replace(one, top_logprobs=one.top_logprobs[: self.params.logprobs])
            for one in part.logprobs
        )
        ids = part.prompt.token_ids.tolist()
        return self._lists_of(index).of(ids, [None, *logprobs], self._prompt_texts[number])

    def _lists_of(self, index: int) -> CompletionLogprobs:
        with_special = self.body.skip_special_tokens is False
        lists = CompletionLogprobs(self._spellings, with_special=with_special)
        return self._lists.setdefault(index, lists)

    def _logprobs(self, choice: Choice, delta: TextDelta) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        return self._lists_of(choice.index).of(delta.token_ids, list(delta.logprobs))

    def _choice(self, part: EngineRequest, choice: Choice) -> dict[str, Any]:
        delta = choice.take()
        number = choice.index // self.params.n
        before = {}
        if self.body.echo and self.with_logprobs:
            before = self._prompt_lists(choice.index)
        found = self.next(choice, delta)
        for name, values in before.items():
            found["logprobs"][name] = values + found["logprobs"][name]
        if self.body.echo:
            found["text"] = self._prompt_texts[number] + found["text"]
        return found | self._of_prompt(number) | self._prompt_ids(part)

    def first(self, part: EngineRequest, choice: Choice, **fields: Any) -> list[bytes]:
        if not (self.body.echo or self.body.return_token_ids):
            return []
        found: dict[str, Any] = {"index": choice.index, "text": "", "logprobs": None}
        found |= {"finish_reason": None, "stop_reason": None}
        if self.body.echo:
            found["text"] = self._prompt_texts[choice.index // self.params.n]
        return [self.event([found | self._prompt_ids(part)], **fields)]

    def next(self, choice: Choice, delta: TextDelta) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": delta.text,
            "logprobs": self._logprobs(choice, delta),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **self._ids(delta),
        }
