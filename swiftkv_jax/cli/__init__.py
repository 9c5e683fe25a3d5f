"""What the commands share: exit codes, one-line errors, devices and model flags."""

from .exit import (
    BAD_CHECKPOINT,
    ERROR,
    INTERRUPTED,
    OK,
    OUT_OF_MEMORY,
    SOME_ROWS_FAILED,
    USAGE,
    log,
    run,
)

__all__ = [
    "BAD_CHECKPOINT",
    "ERROR",
    "INTERRUPTED",
    "OK",
    "OUT_OF_MEMORY",
    "SOME_ROWS_FAILED",
    "USAGE",
    "log",
    "run",
]
