"""Results of a prompt: its samples as they grow, and the row of output that they make (see
`complete`)."""

from __future__ import annotations

import math
from typing import Any

from ...errors import DataError
from ..engine.requests import Logprob, Request, RequestOutput, Timing
from ..text import TextStream


class Completion:
    """One sample of a row."""

    def __init__(self, tokenizer: Any, request: Request):
        """Begin without tokens. With `tokenizer` None there is no text, and no stop string can be
        found."""
        self._params = request.params
        self._has_text = tokenizer is not None
        self._stream = TextStream.of(tokenizer, request)
        self._stop_reason: str | int | None = None
        self._logprobs: list[Logprob] = []
        self.text = ""
        self.finish_reason: str | None = None

    def push(self, output: RequestOutput) -> None:
        """Add an output. A stop string ends the sample and drops the tokens after it. Raises
        `DataError` if the model's logits are not finite."""
        if output.finish_reason == "error":
            raise DataError(output.error)
        self.finish_reason = output.finish_reason
        if output.stop_token in self._params.stop_token_ids:
            self._stop_reason = output.stop_token
        self._logprobs += output.logprobs or ()
        self.text += self._stream.push(output.token_ids)
        if output.finish_reason and not self._stream.stopped:
            self.text += self._stream.finish()
        if self._stream.stopped:
            self.finish_reason = "stop"
            self._stop_reason = self._stream.stop_reason

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self._stream.token_ids)

    def to_json(self) -> dict[str, Any]:
        token_ids = self._stream.token_ids
        result = {"text": self.text, "token_ids": token_ids, "finish_reason": self.finish_reason}
        if not self._has_text:
            result["text"] = None
        if self._stop_reason is not None:
            result["stop_reason"] = self._stop_reason
        if self._params.logprobs is not None:
            result["logprobs"] = [
                _logprob_json(*pair) for pair in zip(token_ids, self._logprobs, strict=False)
            ]
        return result


def _logprob_json(token: int, logprob: Logprob) -> dict[str, Any]:
    found: dict[str, Any] = _token_json(token, logprob.logprob)
    if logprob.top_logprobs:
        found["top"] = [_token_json(*pair) for pair in logprob.top_logprobs]
    return found


def _token_json(token: int, logprob: float) -> dict[str, Any]:
    """A token with its log-probability, null for an infinity, which JSON does not have."""
    return {"token_id": token, "logprob": logprob if math.isfinite(logprob) else None}


class Completions:
    """Samples of one prompt."""

    def __init__(self, tokenizer: Any, request: Request):
        self.samples = [Completion(tokenizer, request) for _ in range(request.params.n)]
        self.timing: Timing | None = None
        self._prompt_tokens = len(request.prompt)
        self._cached_tokens = 0

    @property
    def done(self) -> bool:
        return all(sample.finish_reason for sample in self.samples)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.samples))

    def update(self, output: RequestOutput) -> bool:
        sample = self.samples[output.sample]
        sample.push(output)
        self.timing = output.timing
        self._cached_tokens = output.num_cached_tokens
        return sample.finish_reason is None

    def to_json(self) -> dict[str, Any]:
        if len(self.samples) == 1:
            result = self.samples[0].to_json()
        else:
            result = {
                "choices": [
                    {"index": index} | sample.to_json() for index, sample in enumerate(self.samples)
                ]
            }
        usage = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self.tokens,
            "cached_tokens": self._cached_tokens,
        }
        return result | {"usage": usage, "timing": timing_json(self.timing)}


def timing_json(timing: Timing | None) -> dict[str, float | None]:
    """Times of a row in seconds since it entered the engine."""
    found: dict[str, float | None] = dict.fromkeys(("queue_s", "ttft_s", "total_s"))
    if timing is not None:
        moments = (timing.started, timing.first_token, timing.last_token)
        for name, at in zip(found, moments, strict=True):
            if at is not None:
                found[name] = round(at - timing.submitted, 6)
    return found
