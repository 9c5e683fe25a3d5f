"""Cells, each of them one measurement, and the times of requests."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Literal

STUDENT = "swiftkv"
TEACHER = "teacher"
"""Names of the variants."""
Mode = Literal["prefill", "decode", "offline", "latency"]
ALONE: tuple[Mode, ...] = ("prefill", "decode")
"""Modes in which all rows begin together and nothing else runs."""
QUEUED: tuple[Mode, ...] = ("offline", "latency")
"""Modes in which requests wait for room in the cache."""
MODES = (*ALONE, *QUEUED)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One measurement, repeated, of each variant."""

    input_len: int
    """Tokens of each prompt."""
    output_len: int
    """New tokens of each prompt, exactly: end tokens are ignored. 1 in prefill."""
    prompts: int
    """Rows that run together in prefill and decode; all requests of offline and latency."""
    request_rate: float | None = None
    """Requests a second on average, at the times of a Poisson process; infinite is all at once.
    For latency only."""
    max_concurrency: int | None = None
    """Requests in the engine at a time; later ones wait outside. For latency only."""
    prediction_error: float | None = None
    """Share of wrong tokens in the prediction that each row has of its own answer; None predicts
    nothing. For decode only."""

    @property
    def length(self) -> int:
        """Most tokens of a row."""
        return self.input_len + self.output_len

    def __str__(self) -> str:
        text = f"{self.input_len} in, {self.output_len} out, {self.prompts} prompts"
        if self.request_rate is not None:
            text += f", {self.request_rate:g} a second"
        if self.max_concurrency is not None:
            text += f", {self.max_concurrency} at a time"
        if self.prediction_error is not None:
            text += f", predicted but for {self.prediction_error:.3g}"
        return text


def num_pages(cells: Sequence[Cell], rows: int, page_size: int) -> int:
    """Pages that the largest cell fills with `rows` rows at a time."""
    return max(min(rows, cell.prompts) * math.ceil(cell.length / page_size) for cell in cells)


def arrival_times(count: int, rate: float, seed: int) -> list[float]:
    """Times of `count` requests of a Poisson process in seconds, ascending; `rate` a second on
    average, infinite is all at once."""
    import numpy as np  # the arguments of the command are parsed without it

    rng = np.random.default_rng([seed, 1])
    return np.cumsum(rng.gamma(1.0, 1 / rate, count)).tolist()


@dataclasses.dataclass
class Timed:
    """Times and counts of one request. Times are seconds of `time.perf_counter`."""

    sent: float = 0.0
    """Time at which the request arrives, or its first byte is written."""
    arrivals: list[float] = dataclasses.field(default_factory=list)
    """Times of the outputs."""
    num_tokens: int = 0
    """Tokens of the answer, by the server's count where it gives one."""
    num_prompt_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def e2e(self) -> float:
        return self.arrivals[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, as in `vllm bench serve`; None for one token."""
        if self.num_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.num_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Times between outputs, as vLLM's client takes them."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return [after - before for before, after in pairs]


DRAFTS = "drafts", "draft_tokens", "accepted_tokens"
"""Counts of `DraftStats` that are measured where an engine drafts."""
TIMES = ("ttft", "tpot", "itl", "e2e")


def times_of(requests: Sequence[Timed]) -> dict[str, list[float]]:
    """The values of each of `TIMES`, without those that are None."""
    return {
        "ttft": [one.ttft for one in requests],
        "tpot": [one.tpot for one in requests if one.tpot is not None],
        "itl": [wait for one in requests for wait in one.itl],
        "e2e": [one.e2e for one in requests],
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles of one value or more."""
    cuts = [values[0]] * 99
    if len(values) > 1:
        cuts = statistics.quantiles(values, n=100, method="inclusive")
    parts = {f"p{percent}": cuts[percent - 1] for percent in (50, 90, 99)}
    return {"mean": statistics.fmean(values)} | parts
