"""Errors a user can cause. Each message is one line that names the file, tensor, row or option, and
what to do. A name of an option in backticks is a placeholder: `spelled` puts the flag of a command
or the field of a file or a request in its place. Everything else that a program needs of an error
is in its fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class UsageError(ValueError):
    """An option or argument that cannot be honoured. Exit code 2."""

    code = "invalid_value"
    """The kind of error, as the server's clients get it."""

    def __init__(
        self, message: str, *, option: str | None = None, value: Any = None, limit: Any = None
    ):
        """`option` is the name of the option, argument or field of a request that is wrong, with
        its `value` and the `limit` of it, if they are known."""
        super().__init__(message)
        self.option = option
        self.value = value
        self.limit = limit


class ContextLengthError(UsageError):
    """A prompt that does not fit the model's context, by itself or with its new tokens."""

    code = "context_length_exceeded"
    limit: int

    def __init__(self, message: str, *, prompt_tokens: int, new_tokens: int, limit: int):
        """All three are numbers of tokens; `limit` is the largest sum of the others."""
        super().__init__(message, limit=limit)
        self.prompt_tokens = prompt_tokens
        self.new_tokens = new_tokens


class DataError(ValueError):
    """Training data or prompts that cannot be read. Exit code 1."""


class DivergenceError(ArithmeticError):
    """Training whose loss or gradient is no longer finite, or calibration on hidden states that are
    not. Exit code 1."""


class CheckpointError(ValueError):
    """A checkpoint that is damaged, incomplete, or not the one asked for. Exit code 4."""


class ConfigError(CheckpointError):
    """A `config.json` that this package cannot honour exactly. Exit code 4."""


class OutOfMemoryError(RuntimeError):
    """Failure of work that does not fit the memory of the device, by the compiler's figures, or of
    the host. Exit code 5."""


def reason_of(error: Exception) -> str:
    """Return what went wrong: for an `OSError` in the system's words, without its number and
    file."""
    return getattr(error, "strerror", None) or str(error)


def spelled(message: str, spell: Callable[[str], str | None], *, equals: str = "=") -> str:
    """`message` with what `spell` returns for each name of an option in the place of the name and
    its backticks, and with `equals` between it and its value. Where `spell` returns None, all of it
    stays."""
    parts = message.split("`")
    result = parts[0]
    number = 1
    while number < len(parts):
        name = parts[number]
        new = spell(name) if name.isidentifier() and number + 1 < len(parts) else None
        if new is None:
            result += "`" + name
            number += 1
        else:
            after = parts[number + 1]
            result += new + (equals + after[1:] if after.startswith("=") else after)
            number += 2
    return result
