"""What the commands share: exit codes and one-line errors.

Exit codes: 0 ok, 1 error, 2 usage, 3 some rows failed, 4 bad or mismatched checkpoint, 5 out of
device memory, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

import jax

from ..errors import CheckpointError, DataError, DivergenceError, OutOfMemoryError, UsageError

OK, ERROR, USAGE, SOME_ROWS_FAILED, BAD_CHECKPOINT, OUT_OF_MEMORY, INTERRUPTED = (
    0,
    1,
    2,
    3,
    4,
    5,
    130,
)

TRACEBACK = "SWIFTKV_TRACEBACK"
"""Environment variable that prints the traceback of an unforeseen error."""


def log(message: str) -> None:
    """Progress and remarks go to stderr: stdout carries results only."""
    print(message, file=sys.stderr, flush=True)


def run(main: Callable[[], int]) -> int:
    """Run a command's `main`; turn every foreseeable failure into one line on stderr and the right
    exit code."""
    try:
        return main()
    except (
        UsageError,
        NotImplementedError,
    ) as error:  # the latter: a named implementation that cannot do it here
        return _fail(error, USAGE)
    except CheckpointError as error:
        return _fail(error, BAD_CHECKPOINT)
    except (DataError, DivergenceError, OSError) as error:
        if isinstance(
            error, BrokenPipeError
        ):  # the reader of our output has gone: nothing to tell anyone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return ERROR
        return _fail(error, ERROR)
    except OutOfMemoryError as error:
        return _fail(error, OUT_OF_MEMORY)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error):
            return _fail(f"out of device memory: {str(error).splitlines()[0]}", OUT_OF_MEMORY)
        return _fail_unforeseen(error)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except Exception as error:
        return _fail_unforeseen(error)


def _fail_unforeseen(error: Exception) -> int:
    """A defect of ours, most likely: one line for the user, the traceback for whoever asks for
    it."""
    if os.environ.get(TRACEBACK):
        traceback.print_exc()
    reason = str(error).strip().splitlines() or [""]
    return _fail(
        f"unexpected {type(error).__name__}: {reason[0]} (set {TRACEBACK}=1 for the traceback)",
        ERROR,
    )


def _fail(error: object, code: int) -> int:
    log(f"error: {error}")
    return code
