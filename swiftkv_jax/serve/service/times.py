"""The times of one request, and their forms for clients and the log."""

from __future__ import annotations

import time


class Times:
    """Moments of a request, `time.monotonic()`; 0 before they have happened. Its phases are in
    seconds, and 0 before they have begun."""

    def __init__(self, arrival: float):
        self.arrival = arrival
        """When the last byte of the body came."""
        self.submitted = 0.0
        """When the engine got its first prompt."""
        self.started = self.first_token = self.last_token = 0.0

    @property
    def queue(self) -> float:
        """Until prefill began; until now, if it has not."""
        return (self.started or time.monotonic()) - self.arrival

    @property
    def to_first_token(self) -> float:
        return max(self.first_token - self.arrival, 0.0)

    @property
    def prefill(self) -> float:
        return self.first_token - self.started

    @property
    def decode(self) -> float:
        return self.last_token - self.first_token

    @property
    def inference(self) -> float:
        return self.last_token - self.started

    @property
    def total(self) -> float:
        """Until now."""
        return time.monotonic() - self.arrival

    def server_timing(self, *, whole: bool) -> str:
        """The header `Server-Timing` (W3C), in milliseconds: of a whole answer, or of a stream that
        begins."""
        found = {"queue": self.queue, "ttft": self.to_first_token}
        if whole:
            found |= {"prefill": self.prefill, "decode": self.decode, "total": self.total}
        return ", ".join(f"{name};dur={1e3 * seconds:.1f}" for name, seconds in found.items())

    def request_metrics(self, num_tokens: int, longest: int) -> dict[str, float | None]:
        """vLLM's `metrics` of an answer of `num_tokens`, the longest sequence of which has
        `longest`. The time to the first token is that after the queue; None is what a request that
        ran nothing, or has one token, does not have."""
        names = ("time_to_first_token_ms", "generation_time_ms", "queue_time_ms")
        found: dict[str, float | None] = dict.fromkeys((*names, "mean_itl_ms", "tokens_per_second"))
        if self.first_token:
            seconds = self.prefill, self.decode, self.queue
            found |= {name: 1e3 * one for name, one in zip(names, seconds, strict=True)}
            if longest > 1:
                found["mean_itl_ms"] = 1e3 * self.decode / (longest - 1)
            if self.inference:
                found["tokens_per_second"] = num_tokens / self.inference
        return {name: one and round(one, 3) for name, one in found.items()}

    def log_fields(self) -> dict[str, float]:
        """Fields of the request's line in the log; none without a token."""
        if not self.first_token:
            return {}
        found = {"queue_ms": self.queue, "ttft_ms": self.to_first_token}
        return {name: round(1e3 * seconds, 1) for name, seconds in found.items()}
