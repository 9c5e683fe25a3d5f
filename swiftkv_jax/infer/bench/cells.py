"""Measurements: one cell for each combination of lengths, batches and rates on the command
line."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Literal

from ...errors import UsageError

STUDENT = "swiftkv"
TEACHER = "teacher"
"""Names of the variants."""
Mode = Literal["prefill", "decode", "offline", "latency"]
MODES: tuple[Mode, ...] = ("prefill", "decode", "offline", "latency")
QUEUED: tuple[Mode, ...] = ("offline", "latency")
"""Modes in which requests wait for room in the cache."""


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

    @property
    def length(self) -> int:
        """Most tokens of a row."""
        return self.input_len + self.output_len

    def __str__(self) -> str:
        text = f"{self.input_len} in, {self.output_len} out, {self.prompts} prompts"
        if self.request_rate is not None:
            text += f", {self.request_rate:g} a second"
        return text if self.max_concurrency is None else f"{text}, {self.max_concurrency} at a time"


def make_cells(
    mode: Mode,
    *,
    input_lens: Sequence[int],
    output_len: int,
    batches: Sequence[int],
    num_prompts: int,
    request_rates: Sequence[float],
    max_concurrency: int | None,
    decode_steps: int,
) -> list[Cell]:
    """The cells in the order in which they run. Raises `UsageError` for an output too short to
    time."""
    if mode == "prefill":
        return [Cell(length, 1, batch) for length, batch in itertools.product(input_lens, batches)]
    if mode == "decode":
        if output_len < 2 * decode_steps:
            raise UsageError(
                f"`output_len`={output_len} must be at least {2 * decode_steps}: two calls of "
                f"`decode_steps`={decode_steps}"
            )
        whole = -(-output_len // decode_steps) * decode_steps
        return [
            Cell(length, whole, batch) for length, batch in itertools.product(input_lens, batches)
        ]
    if mode == "offline":
        return [Cell(length, output_len, num_prompts) for length in input_lens]
    rates = itertools.product(input_lens, request_rates)
    return [Cell(length, output_len, num_prompts, rate, max_concurrency) for length, rate in rates]


def check_lengths(cells: Sequence[Cell], positions: int) -> None:
    """Raise `UsageError` for a row of more than `positions` tokens."""
    longest = max(cells, key=lambda cell: cell.length)
    if longest.length > positions:
        raise UsageError(
            f"`input_len`={longest.input_len} and {longest.output_len} new tokens are "
            f"{longest.length} positions, "
            f"above the limit of {positions}"
        )


def num_pages(cells: Sequence[Cell], rows: int, page_size: int) -> int:
    """Pages that the largest cell fills with `rows` rows at a time."""
    return max(min(rows, cell.prompts) * math.ceil(cell.length / page_size) for cell in cells)


def arrival_times(count: int, rate: float, seed: int, *, burstiness: float = 1.0) -> list[float]:
    """Times of `count` requests in seconds, ascending; `rate` a second on average, infinite is all
    at once. Their distances have a gamma distribution of shape `burstiness`; 1 is a Poisson
    process."""
    import numpy as np  # the arguments of the command are parsed without it

    rng = np.random.default_rng([seed, 1])
    return np.cumsum(rng.gamma(burstiness, 1 / (rate * burstiness), count)).tolist()
