"""The implementations of the ops, by name."""

from __future__ import annotations

from typing import Literal, get_args

Implementation = Literal["xla", "hopper", "tpu", "cudnn"]
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)


class ImplementationError(NotImplementedError):
    """A call of an op that the named implementation does not take."""

    def __init__(self, implementation: str, reason: str):
        super().__init__(f"implementation={implementation!r} {reason}")
        self.implementation = implementation
        self.reason = reason

    def of_option(self, option: str) -> str:
        """The message for an option that names the implementation."""
        return f"`{option}`={self.implementation!r} {self.reason}"
