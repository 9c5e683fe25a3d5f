"""Admission control: limits on what requests hold, and the queue before the engine's.

A request reserves what it may cost before anything expensive happens to it: its sequences, its
bytes, and its prompt tokens, which are estimated from the bytes until they are counted. One that
finds no room is refused at once, with a `Retry-After` time.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import math
from collections.abc import Callable
from typing import Protocol

from ..errors import APIError, invalid
from ..options import ServerOptions

QUANTUM = 2048
"""Prompt tokens that a key may submit before it is another's turn. Each sequence counts as so many
at least: it takes a slot whose time its answer decides."""


@dataclasses.dataclass(eq=False)
class Reservation:
    """Resources that one request holds until `release`."""

    key: str
    _admission: Admission
    num_sequences: int = 0
    num_bytes: int = 0
    num_tokens: int = 0
    """Prompt tokens that are not cached yet."""
    _released: bool = False

    def add_bytes(self, num_bytes: int) -> None:
        """Count bytes of the body that have arrived. Raises `APIError`."""
        self._admission.check(0, 0, num_bytes, self.key)
        self._admission.add(0, 0, num_bytes, self.key)
        self.num_bytes += num_bytes

    def count(self, num_tokens: int, num_sequences: int, param: str = "prompt") -> None:
        """Replace what is held by these numbers. Raises `APIError` if that is too much now, or,
        naming the field `param`, ever."""
        admission = self._admission
        admission.check_alone(num_sequences, param)
        admission.add(-self.num_tokens, -self.num_sequences, 0, self.key)
        self.num_tokens = self.num_sequences = 0
        admission.check(num_tokens, num_sequences, 0, self.key)
        admission.add(num_tokens, num_sequences, 0, self.key)
        self.num_tokens = num_tokens
        self.num_sequences = num_sequences

    def release_tokens(self, num_tokens: int) -> None:
        """Release prompt tokens that are cached now."""
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
        self._options = options
        self._max_model_len = max_model_len
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

    def reserve(self, key: str) -> Reservation:
        """Begin a reservation before the body is in. It holds nothing, but a request that would be
        refused is refused now. Raises `APIError`."""
        self.check(0, 1, 0, key)
        return Reservation(key, self)

    def check_alone(self, sequences: int, param: str) -> None:
        """Raise `APIError` for more sequences than one request may ever have."""
        limit = min(self.max_sequences, self._options.max_reqs_per_key or self.max_sequences)
        if sequences > limit:
            message = f"{sequences} sequences in one request are above the limit of {limit}"
            raise invalid(param, message)

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
                f"requests of {self.bytes} bytes are unanswered, and at most "
                f"{options.max_queued_bytes} may be",
            )

    def add(self, tokens: int, sequences: int, num_bytes: int, key: str) -> None:
        """Add to the sums; negative numbers release."""
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
        return APIError(429, code, f"{message}; try again later", headers=headers)


class Waiting(Protocol):
    """An entry of a `FairQueue`."""

    @property
    def cost(self) -> int:
        """Prompt tokens that its turn takes."""
        ...

    @property
    def rank(self) -> float:
        """The lowest is served first."""
        ...


class FairQueue[W: Waiting]:
    """Prompts that the engine has not got yet. Keys take turns by prompt tokens, as deficit round
    robin does with bytes (Shreedhar and Varghese, SIGCOMM 1995); within a key the lowest rank
    comes first, and of equal ones the first that came."""

    def __init__(self):
        self._queues: dict[str, list[W]] = {}
        """Queues of the keys that wait; it is the first key's turn."""
        self._credit: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def push(self, key: str, waiting: W) -> None:
        bisect.insort(self._queues.setdefault(key, []), waiting, key=lambda one: one.rank)
        self._credit.setdefault(key, 0)

    def remove(self, key: str, waiting: W) -> None:
        """Take out what has not been popped."""
        self._queues[key].remove(waiting)
        self._drop_if_empty(key)

    def pop(self) -> W | None:
        """The next; None if nothing waits."""
        while self._queues:
            key, queue = next(iter(self._queues.items()))
            first = queue[0]
            if self._credit[key] >= first.cost or len(self._queues) == 1:
                del queue[0]
                self._credit[key] = max(self._credit[key] - first.cost, 0)
                self._drop_if_empty(key)
                return first
            self._credit[key] += QUANTUM
            self._queues[key] = self._queues.pop(key)  # to the end
        return None

    def _drop_if_empty(self, key: str) -> None:
        if not self._queues[key]:
            del self._queues[key], self._credit[key]
