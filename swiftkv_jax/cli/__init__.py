"""Parts that the commands share: exit codes, one-line errors, the log, devices and model options.

Importing this is quick: nothing here imports JAX but `devices` and `model_loading`, which are not
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
from .parser import ArgumentParser, closest, did_you_mean, parse_size, run_command, token_count

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
    "closest",
    "configure_logging",
    "did_you_mean",
    "end",
    "fail",
    "log",
    "log_parser",
    "parse_size",
    "prog",
    "report",
    "run",
    "run_command",
    "token_count",
]
