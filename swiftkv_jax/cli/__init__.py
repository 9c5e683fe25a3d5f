"""What the commands share: exit codes, one-line errors, the log, devices and model options.

Importing this is quick: nothing here imports JAX but `devices` and `model_options`, which are not
imported from here.
"""

from .exit import (
    BAD_CHECKPOINT,
    ERROR,
    INTERRUPTED,
    OK,
    OUT_OF_MEMORY,
    SOME_ROWS_FAILED,
    USAGE,
    fail,
    run,
)
from .messages import configure_logging, log

__all__ = [
    "BAD_CHECKPOINT",
    "ERROR",
    "INTERRUPTED",
    "OK",
    "OUT_OF_MEMORY",
    "SOME_ROWS_FAILED",
    "USAGE",
    "configure_logging",
    "fail",
    "log",
    "run",
]
