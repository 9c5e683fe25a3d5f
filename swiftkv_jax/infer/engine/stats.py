"""Counts of what an engine has done, and of what it has to do."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import NamedTuple

from .host_tier import TierCounts
from .request_state import Chunk
from .scheduler import Scheduler
from .speculation import DraftStats


@dataclasses.dataclass
class Stats:
    """Counters and seconds since the engine was made."""

    prompt_tokens: int = 0
    """Prompt tokens that are cached now, those found in the prefix cache included."""
    prefilled_tokens: int = 0
    """Tokens that ran through prefill."""
    lower_layer_tokens: int = 0
    """Prefilled tokens that ran through the lower layers only: what SwiftKV saves."""
    padding_tokens: int = 0
    """Tokens of prefill calls beyond those asked for, up to the next compiled size."""
    new_tokens: int = 0
    """Tokens emitted, end tokens included."""
    chunks: int = 0
    decode_calls: int = 0
    host_seconds: float = 0.0
    """Seconds that `step` spent on the host; the device may work meanwhile."""
    wait_seconds: float = 0.0
    """Seconds that `step` waited for the device."""
    idle_seconds: float = 0.0
    """Seconds in which the device had nothing to do although requests were running, as `IdleTimer`
    saw it."""
    speculation: DraftStats = dataclasses.field(default_factory=DraftStats)
    preemptions: int = 0
    """Requests that were preempted to make room for earlier ones."""
    num_times_skipped: int = 0
    """Times that a waiting request was skipped for a later one that fitted."""
    compilations: int = 0
    """Programs compiled during steps; 0, since all are compiled before the first."""

    def copy(self) -> Stats:
        """The counters as they are now."""
        return dataclasses.replace(self, speculation=self.speculation.copy())

    def add_chunk(self, chunk: Chunk, num_padding: int) -> None:
        """Count the tokens of a chunk and the prompts that it completes."""
        scheduled_tokens = [scheduled for _, scheduled in chunk.scheduled_tokens()]
        tokens = chunk.num_tokens
        self.chunks += tokens > 0
        self.prefilled_tokens += tokens
        self.lower_layer_tokens += tokens - sum(len(some.upper) for some in scheduled_tokens)
        self.padding_tokens += num_padding
        ended = {
            scheduled.request_state
            for scheduled in scheduled_tokens
            if scheduled.stop == scheduled.request_state.prefill_stop
        } | {sequence.request_state for sequence in chunk.finished_prefill}
        self.prompt_tokens += sum(
            len(state.prefill_token_ids) for state in ended if not state.num_preemptions
        )


class IdleTimer:
    """Time for which the device has run dry although there was work. It is counted from when the
    host last knew the device at work, so it is an upper bound."""

    def __init__(self, is_idle: Callable[[], bool]):
        self._is_idle = is_idle
        self._from = 0.0

    def restart(self) -> float:
        """Count from now: the device has been at work until now, or had no work to do. Returns the
        seconds since the last call."""
        before, self._from = self._from, time.perf_counter()
        return self._from - before

    def look(self) -> float:
        """Seconds since the last call if the device is idle now, else 0."""
        passed = self.restart()
        return passed if self._is_idle() else 0.0


class Load(NamedTuple):
    """Requests and sequences that are queued and running between two steps of an engine, and the
    memory that they hold."""

    num_waiting: int
    """Requests that wait to start, or to continue after a preemption."""
    num_prefilling: int
    """Requests whose prompts are being cached, or whose tokens are being scored."""
    num_running: int
    """Sequences that decode. Those whose last tokens are in flight hold no slot any more."""
    num_queued_tokens: int
    """Prompt tokens that are not cached yet, of all requests. Those that the prefix cache will
    supply are counted until a request is admitted."""
    pages_in_use: int
    """Pages that requests hold, for what they have cached and the next `reserve_tokens`."""
    num_pages: int
    tiers: tuple[TierCounts, ...] = ()
    """Tiers of the prefix cache beyond the devices."""

    @classmethod
    def of(cls, scheduler: Scheduler) -> Load:
        unfinished = (*scheduler.waiting, *scheduler.prefilling)
        return cls(
            len(scheduler.waiting),
            len(scheduler.prefilling),
            scheduler.num_running,
            sum(state.prefill_stop - state.num_computed_tokens for state in unfinished),
            sum(pool.used for pool in scheduler.pools),
            sum(pool.num_pages for pool in scheduler.pools),
            tuple(counts for pool in scheduler.pools for counts in pool.tier_counts),
        )
