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
    end,
    fail,
    report,
    run,
)
from .messages import as_called, configure_logging, log, log_parser, prog
from .parser import ArgumentParser

__all__ = [
    "ArgumentParser",
    "BAD_CHECKPOINT",
    "ERROR",
    "INTERRUPTED",
    "OK",
    "OUT_OF_MEMORY",
    "SOME_ROWS_FAILED",
    "USAGE",
    "as_called",
    "configure_logging",
    "end",
    "fail",
    "log",
    "log_parser",
    "prog",
    "report",
    "run",
]
