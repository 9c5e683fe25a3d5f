"""Output of the commands to standard error: log records and errors, in the command's own words."""

from __future__ import annotations

import argparse
import contextlib
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import spelled
from . import json_log

LOGGER = "swiftkv_jax"
SCRIPT = "swiftkv"
"""The console script."""
OVERALL = "swiftkv_jax.__main__"
"""The module behind it."""


class MessageHandler(logging.Handler):
    """Writes the message of each record to standard error, in process 0 only; warnings begin with
    `warning: `, errors with `error: `.

    Progress bars by tqdm stay below the messages. `parser`, if there is one, turns names of
    arguments into flags, as `with_flags` does.
    """

    parser: argparse.ArgumentParser | None = None

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.addFilter(_is_from_process_0)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            level = record.levelname.lower()
            fields = json_log.fields_of(record)
            write(with_flags(record.getMessage(), self.parser), level, fields)
        except Exception:
            self.handleError(record)


def configure_logging(parser: argparse.ArgumentParser | None = None) -> None:
    """Send the package's log to standard error; called again, only exchange the parser."""
    logger = logging.getLogger(LOGGER)
    handler = next((one for one in logger.handlers if isinstance(one, MessageHandler)), None)
    if handler is None:
        handler = MessageHandler()
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    handler.parser = parser


def log_parser() -> argparse.ArgumentParser | None:
    """The parser whose flags the log names."""
    handlers = logging.getLogger(LOGGER).handlers
    return next((one.parser for one in handlers if isinstance(one, MessageHandler)), None)


@contextlib.contextmanager
def own_log(parser: argparse.ArgumentParser | None) -> Iterator[None]:
    """Write the package's log only to standard error while a command runs. Orbax uses absl, whose
    handler of the root logger would repeat it."""
    configure_logging(parser)
    logger = logging.getLogger(LOGGER)
    before = logger.propagate
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = before


def log(message: str) -> None:
    """Progress and remarks, on standard error of process 0: standard output carries results
    only."""
    logger = logging.getLogger(LOGGER)
    if not any(isinstance(handler, MessageHandler) for handler in logger.handlers):
        configure_logging()
    logger.info("%s", message)


def write(message: str, level: str = "info", fields: Mapping[str, Any] | None = None) -> None:
    """A line on standard error, above any progress bar; nothing where standard error is closed.
    Warnings and errors begin with their level; a traceback, `exception` of `fields`, follows. The
    other fields are for a log in JSON alone."""
    if sys.stderr is None:
        return
    with contextlib.suppress(OSError):  # what would read it has ended; the exit code still tells
        if isinstance(sys.stderr, json_log.JSONStderr):
            sys.stderr.write_object(level, {**(fields or {}), "message": message})
            return
        if level not in ("debug", "info"):
            message = f"{level}: {message}"
        if traceback := (fields or {}).get("exception"):
            message = f"{message}\n{traceback}"
        if "tqdm" in sys.modules:
            sys.modules["tqdm"].tqdm.write(message, file=sys.stderr)
            sys.stderr.flush()
        else:
            print(message, file=sys.stderr, flush=True)


def prog(command: str | None = None) -> str:
    """How this program was called, for help and examples: `swiftkv infer` or
    `python -m swiftkv_jax.infer`; without `command`, what comes before it."""
    name = Path(sys.argv[0]).stem if sys.argv else ""
    main = getattr(sys.modules["__main__"], "__spec__", None)
    if name != SCRIPT and command is not None and getattr(main, "name", "") != OVERALL:
        return f"python -m swiftkv_jax.{command.replace('-', '_')}"
    called = SCRIPT if name == SCRIPT else "python -m swiftkv_jax"
    if command is None:
        return called
    return f"{called} {command}"


def as_called(text: str) -> str:
    """`text` with every `python -m swiftkv_jax.COMMAND`, and `python -m swiftkv_jax` before a
    command, spelled as this program was called."""
    return re.sub(r"python -m swiftkv_jax(?:\.(\w+))?", lambda found: prog(found[1]), text)


def with_flags(message: str, parser: argparse.ArgumentParser | None) -> str:
    """`message` with the flags of `parser` in the place of its arguments' names.

    Names stand in backticks: `` `page_size` `` becomes `--page-size`, and `` `page_size`=7 ``
    `--page-size 7`. Names that the parser lacks stay as they are.
    """
    if parser is None or "`" not in message:
        return message
    names = {}
    for action in _actions(parser):
        names.setdefault(action.dest, _name(action))

    return spelled(message, names.get, equals=" ")


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action.choices, dict):
            for choice in action.choices.values():
                if isinstance(choice, argparse.ArgumentParser):
                    yield from _actions(choice)


def _name(action: argparse.Action) -> str:
    """The flag that is spelled like the name, else the longest; of a positional argument what help
    calls it."""
    own = f"--{action.dest.replace('_', '-')}"
    if not action.option_strings:
        return action.metavar if isinstance(action.metavar, str) else action.dest
    return own if own in action.option_strings else max(action.option_strings, key=len)


def _is_from_process_0(record: logging.LogRecord) -> bool:
    """True if this is process 0. Before the processes have joined, each is on its own; JAX is not
    asked then, because that would start a backend."""
    jax = sys.modules.get("jax")
    return jax is None or not jax.distributed.is_initialized() or jax.process_index() == 0
