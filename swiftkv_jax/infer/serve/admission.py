"""Who gets in, and in which order: what is counted at the door, and the queue before the engine's.

A request reserves what it may cost before anything expensive happens to it: its sequences, its
bytes, and its prompt tokens, which are estimated from the bytes until they are counted. One that
finds no room is refused at once, with the time after which it is worth to come again.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable
from typing import Protocol

from .errors import APIError
from .options import ServerOptions

QUANTUM = 2048
"""Prompt tokens that a key may submit before it is another's turn."""


@dataclasses.dataclass(eq=False)
class Reservation:
    """What one request holds until `release`."""

    key: str
    num_sequences: int
    num_bytes: int
    num_tokens: int
    """Prompt tokens that are not cached yet."""
    _admission: Admission
    _released: bool = False

    def count_tokens(self, num_tokens: int, num_sequences: int) -> None:
        """Replace the estimates by what was counted. Raises `APIError` if that is too much."""
        admission = self._admission
        admission.add(-self.num_tokens, -self.num_sequences, 0, self.key)
        self.num_tokens = self.num_sequences = 0
        admission.check(num_tokens, num_sequences, 0, self.key)
        admission.add(num_tokens, num_sequences, 0, self.key)
        self.num_tokens, self.num_sequences = num_tokens, num_sequences

    def release_tokens(self, num_tokens: int) -> None:
        """These are cached now."""
        if not self._released:
            num_tokens = min(num_tokens, self.num_tokens)
            self.num_tokens -= num_tokens
            self._admission.add(-num_tokens, 0, 0, self.key)

    def release(self) -> None:
        """Give everything back; once."""
        if not self._released:
            self._released = True
            self._admission.add(-self.num_tokens, -self.num_sequences, -self.num_bytes, self.key)


class Admission:
    """Sums of what all requests hold, and their limits."""

    def __init__(
        self,
        options: ServerOptions,
        *,
        max_num_seqs: int,
        max_model_len: int,
        prefill_rate: Callable[[], float],
    ):
        """`prefill_rate` gives the tokens/s of prefill in the last while, 0 if it is not known."""
        self._options, self._max_model_len = options, max_model_len
        self._prefill_rate = prefill_rate
        self.max_sequences = options.sequence_limit(max_num_seqs)
        self.sequences = self.tokens = self.bytes = 0
        self.sequences_of: collections.Counter[str] = collections.Counter()
        self.rejected: collections.Counter[str] = collections.Counter()
        """Reason -> refusals."""

    @property
    def max_tokens(self) -> int:
        """Limit of the prompt tokens that are not cached yet."""
        if (limit := self._options.max_num_queued_tokens) is not None:
            return limit
        return max(4 * self._max_model_len, int(30 * self._prefill_rate()))

    def reserve(self, key: str, *, num_bytes: int, num_tokens: int) -> Reservation:
        """Room for a request of one sequence whose body is in. Raises `APIError`."""
        num_tokens = min(num_tokens, self._max_model_len)
        self.check(num_tokens, 1, num_bytes, key)
        self.add(num_tokens, 1, num_bytes, key)
        return Reservation(key, 1, num_bytes, num_tokens, self)

    def check(self, tokens: int, sequences: int, num_bytes: int, key: str) -> None:
        """Raise `APIError` if there is no room for so much more. One request alone is never
        refused for its tokens."""
        options = self._options
        if self.sequences + sequences > self.max_sequences:
            raise self._refusal(
                "max_num_queued_reqs",
                "queue_full",
                f"{self.sequences} sequences wait or run, and at most {self.max_sequences} may",
            )
        limit = options.max_reqs_per_key
        if limit is not None and self.sequences_of[key] + sequences > limit:
            raise self._refusal(
                "max_reqs_per_key",
                "per_key_limit",
                f"{self.sequences_of[key]} sequences of this key wait or run, and at most {limit} "
                f"may",
            )
        if tokens > 0 and self.tokens and self.tokens + tokens > self.max_tokens:
            raise self._refusal(
                "max_num_queued_tokens",
                "too_many_queued_tokens",
                f"{self.tokens} prompt tokens wait, and at most {self.max_tokens} may",
            )
        if self.bytes + num_bytes > options.max_queued_bytes:
            raise self._refusal(
                "max_queued_bytes",
                "queue_full",
                f"requests of {self.bytes} bytes wait, and at most {options.max_queued_bytes} may",
            )

    def add(self, tokens: int, sequences: int, num_bytes: int, key: str) -> None:
        """Count so much more, or less."""
        self.tokens += tokens
        self.sequences += sequences
        self.bytes += num_bytes
        self.sequences_of[key] += sequences
        if not self.sequences_of[key]:
            del self.sequences_of[key]

    def retry_after(self) -> int:
        """Seconds in which the tokens ahead will be cached, from 1 to 60: clients give up above
        120."""
        rate = self._prefill_rate()
        return min(max(math.ceil(self.tokens / rate), 1), 60) if rate else 1

    def _refusal(self, reason: str, code: str, message: str) -> APIError:
        self.rejected[reason] += 1
        headers = {"retry-after": str(self.retry_after())}
        status = self._options.overload_status
        return APIError(status, code, f"{message}; try again later", headers=headers)


class Waiting(Protocol):
    """What waits in a `FairQueue`."""

    @property
    def num_prompt_tokens(self) -> int: ...


class FairQueue[W: Waiting]:
    """Requests that the engine has not got yet. Keys take turns by prompt tokens, as deficit round
    robin does with bytes (Shreedhar and Varghese, SIGCOMM 1995); within a key the first come is the
    first served."""

    def __init__(self):
        self._queues: dict[str, collections.deque[W]] = {}
        """Of the keys that wait; the first one's turn it is."""
        self._credit: dict[str, int] = {}
        self._removed: set[int] = set()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, key: str, waiting: W) -> None:
        if key not in self._queues:
            self._queues[key], self._credit[key] = collections.deque(), 0
        self._queues[key].append(waiting)
        self._length += 1

    def remove(self, waiting: W) -> None:
        """Take out what has not been popped."""
        self._removed.add(id(waiting))
        self._length -= 1

    def pop(self) -> W | None:
        """The next; None if nothing waits."""
        while self._queues:
            key, queue = next(iter(self._queues.items()))
            while queue and id(queue[0]) in self._removed:
                self._removed.discard(id(queue.popleft()))
            if not queue:
                del self._queues[key], self._credit[key]
                continue
            if self._credit[key] >= queue[0].num_prompt_tokens or len(self._queues) == 1:
                waiting = queue.popleft()
                self._credit[key] = max(self._credit[key] - waiting.num_prompt_tokens, 0)
                self._length -= 1
                return waiting
            self._credit[key] += QUANTUM
            self._queues[key] = self._queues.pop(key)  # to the end
        return None
