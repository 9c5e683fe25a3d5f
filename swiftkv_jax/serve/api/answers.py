"""The JSON of answers: OpenAI's objects, with vLLM's additions."""

from __future__ import annotations

import codecs
import dataclasses
import math
from typing import Any

import msgspec

from ...infer.engine.requests import Logprob
from ..service.generation import Choice, EngineRequest, Generation, TextDelta
from ..text.token_text import TokenSpellings

LOWEST = -9999.0
"""Log-probability of what is impossible: JSON has no infinity."""


def usage(generation: Generation) -> dict[str, Any]:
    prompt = generation.num_prompt_tokens
    completion = generation.num_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": generation.num_reasoning_tokens},
    }


# Log-probabilities ------------------------------------------------------------------


def chat_logprobs(delta: TextDelta, spellings: TokenSpellings) -> dict[str, Any]:
    return {
        "content": [
            _entry(token, logprob.logprob, spellings)
            | {"top_logprobs": [_entry(*top, spellings) for top in logprob.top_logprobs]}
            for token, logprob in zip(delta.token_ids, delta.logprobs, strict=True)
        ],
        "refusal": None,
    }


def _entry(token: int, logprob: float, spellings: TokenSpellings) -> dict[str, Any]:
    spelling = spellings[token]
    return {"token": spelling.text, "logprob": _finite(logprob), "bytes": list(spelling.content)}


class CompletionLogprobs:
    """The parallel lists of a completion's log-probabilities, as they grow."""

    def __init__(self, spellings: TokenSpellings, *, with_special: bool):
        """`with_special` is whether the text has special tokens."""
        self._spellings = spellings
        self._with_special = with_special
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(
        self, token_ids: list[int], logprobs: list[Logprob | None], text: str | None = None
    ) -> dict[str, Any]:
        """Lists for the next tokens; None is an entry for a token that nothing predicts. `text` is
        that of a prompt, which has the special tokens that it spells."""
        spellings = [self._spellings[token] for token in token_ids]
        tokens = [spelling.text for spelling in spellings]
        offsets = []
        for spelling in spellings:
            offsets.append(self._offset)
            shown = not spelling.is_special or self._with_special
            if spelling.is_special and text is not None:
                shown = text.startswith(spelling.content.decode(), self._offset)
            if shown:
                self._offset += len(self._decoder.decode(spelling.content))
        return {
            "tokens": tokens,
            "token_logprobs": [None if one is None else _finite(one.logprob) for one in logprobs],
            "top_logprobs": [
                None if one is None else self._top(token, one)
                for token, one in zip(token_ids, logprobs, strict=True)
            ],
            "text_offset": offsets,
        }

    def _top(self, token: int, logprob: Logprob) -> dict[str, float]:
        """The likeliest tokens, and the chosen one. Of two with one spelling the larger value
        stays."""
        found: dict[str, float] = {}
        for other, value in (*logprob.top_logprobs, (token, logprob.logprob)):
            text = self._spellings[other].text
            found[text] = max(found.get(text, LOWEST), _finite(value))
        return found


def prompt_logprobs(
    part: EngineRequest, count: int, spellings: TokenSpellings
) -> list[dict[str, Any] | None]:
    """List each token of a prompt but the first, which nothing predicts, with the `count` likeliest
    ones, as vLLM does. The rank of a token that is not among those is null."""
    entries: list[dict[str, Any] | None] = [None]
    tokens = part.prompt.token_ids.tolist()[1:]
    for token, logprob in zip(tokens, part.logprobs, strict=True):
        found: dict[int, tuple[float, int | None]] = {token: (logprob.logprob, None)}
        for rank, (other, value) in enumerate(logprob.top_logprobs[:count], start=1):
            found[other] = value, rank
        entries.append(
            {
                str(other): {
                    "logprob": _finite(value),
                    "rank": rank,
                    "decoded_token": spellings[other].text,
                }
                for other, (value, rank) in found.items()
            }
        )
    return entries


def _finite(value: float) -> float:
    return value if math.isfinite(value) else LOWEST


# Whole answers ------------------------------------------------------------------------


class Writer:
    """Answers of one request."""

    kind: str
    chunk_kind: str
    prefix: str

    def __init__(
        self,
        model: str,
        created: int,
        fingerprint: str,
        request_id: str,
        spellings: TokenSpellings,
        *,
        with_logprobs: bool,
        with_token_ids: bool,
    ):
        self._spellings = spellings
        self.with_logprobs = with_logprobs
        self._with_token_ids = with_token_ids
        self._head = {"id": f"{self.prefix}-{request_id}", "created": created, "model": model}
        self._fingerprint = fingerprint
        self.scored: list[EngineRequest] = []
        """Tokens of each prompt, and their scores if they were asked for."""
        self.prompt_logprobs: int | None = None
        """Likeliest tokens that are listed for each token of a prompt, if they were asked for."""

    usage = staticmethod(usage)

    def whole(self, generation: Generation) -> dict[str, Any]:
        head = {"id": self._head["id"], "object": self.kind} | self._head
        return head | {
            "choices": self._choices(generation),
            "usage": usage(generation),
            "system_fingerprint": self._fingerprint,
        }

    def _choices(self, generation: Generation) -> list[dict[str, Any]]:
        return [self._choice(part, choice) for part in generation.parts for choice in part.choices]

    def event(self, choices: list[dict[str, Any]], **fields: Any) -> bytes:
        """An event of a stream."""
        head = {"id": self._head["id"], "object": self.chunk_kind} | self._head
        chunk = head | {"choices": choices, "system_fingerprint": self._fingerprint} | fields
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"

    def first(self, part: EngineRequest, choice: Choice, **fields: Any) -> list[bytes]:
        """Events that come before the text of a choice."""
        raise NotImplementedError

    def next(self, choice: Choice, delta: TextDelta) -> dict[str, Any]:
        """The entry of a choice in a chunk."""
        raise NotImplementedError

    def _choice(self, part: EngineRequest, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _of_prompts(self, number: int) -> dict[str, Any]:
        """The log-probabilities of one prompt, if they were asked for."""
        if self.prompt_logprobs is None:
            return {}
        part = self.scored[number]
        return {"prompt_logprobs": prompt_logprobs(part, self.prompt_logprobs, self._spellings)}

    def _ids(self, delta: TextDelta) -> dict[str, Any]:
        return {"token_ids": delta.token_ids} if self._with_token_ids else {}

    def _end(self, choice: Choice) -> dict[str, Any]:
        return {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}


class ChatWriter(Writer):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def whole(self, generation: Generation) -> dict[str, Any]:
        extra: dict[str, Any] = {"service_tier": None}
        if self._with_token_ids:
            extra["prompt_token_ids"] = generation.parts[0].prompt.token_ids.tolist()
        return super().whole(generation) | extra | self._of_prompts(0)

    def _choice(self, part: EngineRequest, choice: Choice) -> dict[str, Any]:
        delta = choice.take()
        logprobs = chat_logprobs(delta, self._spellings) if self.with_logprobs else None
        return {
            "index": choice.index,
            "message": _message(delta),
            "logprobs": logprobs,
            **self._end(choice),
            **self._ids(delta),
        }

    def first(self, part: EngineRequest, choice: Choice, **fields: Any) -> list[bytes]:
        delta = {"role": "assistant", "content": ""}
        found = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        if self._with_token_ids and not choice.index:
            fields["prompt_token_ids"] = part.prompt.token_ids.tolist()
        return [self.event([found], **fields)]

    def next(self, choice: Choice, delta: TextDelta) -> dict[str, Any]:
        logprobs = chat_logprobs(delta, self._spellings) if self.with_logprobs else None
        result = {
            "index": choice.index,
            "delta": _delta(delta),
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }
        if choice.finish_reason is not None:
            result["stop_reason"] = choice.stop_reason
        return result | self._ids(delta)


def _message(delta: TextDelta) -> dict[str, Any]:
    """A whole answer. Its content is null where it only reasons or calls."""
    calls = _tool_calls(delta)
    reasoning = delta.reasoning
    for call in calls:
        del call["index"]
    content = delta.text if delta.text or not (calls or reasoning) else None
    found: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    found |= {"reasoning": reasoning} if reasoning else {}
    return found | ({"tool_calls": calls} if calls else {})


def _delta(delta: TextDelta) -> dict[str, Any]:
    """The `delta` of a chunk."""
    calls = _tool_calls(delta)
    found: dict[str, Any] = {"reasoning": delta.reasoning} if delta.reasoning else {}
    found |= {"content": delta.text} if delta.text else {}
    return found | ({"tool_calls": calls} if calls else {})


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


class CompletionWriter(Writer):
    kind = "text_completion"
    chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(
        self,
        *args: Any,
        num_logprobs: int,
        echo: bool,
        prompt_texts: list[str],
        with_special: bool,
        **fields: Any,
    ):
        """`num_logprobs` is the number of likeliest tokens in a list; `prompt_texts` are those of
        the prompts, one each, for `echo`; `with_special` is whether answers have special
        tokens."""
        super().__init__(*args, **fields)
        self._num_logprobs = num_logprobs
        self._echo = echo
        self._prompt_texts = prompt_texts
        self._with_special = with_special
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self.generates = True
        """False if nothing but the prompts is asked for."""
        self.num_samples = 1
        """Samples of each prompt, `n`."""

    def _choices(self, generation: Generation) -> list[dict[str, Any]]:
        if self.generates:
            return super()._choices(generation)
        n = self.num_samples
        return [
            {
                "index": index,
                "text": text,
                "logprobs": self._of_prompt(index, part) if self.with_logprobs else None,
                "finish_reason": "length",
                "stop_reason": None,
                **self._of_prompts(number),
            }
            for number, (text, part) in enumerate(zip(self._prompt_texts, self.scored, strict=True))
            for index in range(number * n, number * n + n)
        ]

    def _lists(self, index: int) -> CompletionLogprobs:
        lists = CompletionLogprobs(self._spellings, with_special=self._with_special)
        return self._logprobs.setdefault(index, lists)

    def _of_prompt(self, index: int, part: EngineRequest) -> dict[str, Any]:
        """Lists of a prompt's tokens, the first of which nothing predicts."""
        ids = part.prompt.token_ids.tolist()
        logprobs = (
            dataclasses.replace(one, top_logprobs=one.top_logprobs[: self._num_logprobs])
            for one in part.logprobs
        )
        text = self._prompt_texts[index // self.num_samples]
        return self._lists(index).of(ids, [None, *logprobs], text)

    def _choice(self, part: EngineRequest, choice: Choice) -> dict[str, Any]:
        delta = choice.take()
        number = choice.index // max(len(part.choices), 1)
        text = delta.text
        logprobs = None
        if self.with_logprobs:
            before = None
            if self._echo:
                before = self._of_prompt(choice.index, self.scored[number])
            logprobs = self._lists(choice.index).of(delta.token_ids, list(delta.logprobs))
            if before is not None:
                logprobs = {name: before[name] + logprobs[name] for name in logprobs}
        if self._echo:
            text = self._prompt_texts[number] + text
        result = {"index": choice.index, "text": text, "logprobs": logprobs, **self._end(choice)}
        result |= self._of_prompts(number)
        if self._with_token_ids:
            result |= self._ids(delta) | {"prompt_token_ids": part.prompt.token_ids.tolist()}
        return result

    def first(self, part: EngineRequest, choice: Choice, **fields: Any) -> list[bytes]:
        found: dict[str, Any] = {"index": choice.index, "text": "", "logprobs": None}
        found |= {"finish_reason": None, "stop_reason": None}
        if self._echo:
            found["text"] = self._prompt_texts[choice.index // len(part.choices)]
        if self._with_token_ids:
            found["prompt_token_ids"] = part.prompt.token_ids.tolist()
        return [self.event([found], **fields)] if self._echo or self._with_token_ids else []

    def next(self, choice: Choice, delta: TextDelta) -> dict[str, Any]:
        logprobs = None
        if self.with_logprobs:
            logprobs = self._lists(choice.index).of(delta.token_ids, list(delta.logprobs))
        return {
            "index": choice.index,
            "text": delta.text,
            "logprobs": logprobs,
            **self._end(choice),
            **self._ids(delta),
        }
