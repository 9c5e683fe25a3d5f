"""Errors a user can cause. Each message is one line that names the file, tensor, row or option, and
what to do. Options are in backticks, which the commands replace by their flags."""

from __future__ import annotations

import re


class UsageError(ValueError):
    """An option or argument that cannot be honoured. Exit code 2."""

    def __init__(self, message: str, *, option: str | None = None):
        """`option` is the name of the option or argument that is wrong, if it is a single one."""
        super().__init__(message)
        self.option = option


class ContextLengthError(UsageError):
    """A prompt that does not fit the model's context, by itself or with its new tokens."""

    def __init__(self, message: str, *, prompt_tokens: int, new_tokens: int, limit: int):
        """All three are numbers of tokens; `limit` is the largest sum of the others."""
        super().__init__(message)
        self.prompt_tokens, self.new_tokens, self.limit = prompt_tokens, new_tokens, limit


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
    """What was asked for does not fit the memory of the device, by the compiler's figures, or of
    the host. Exit code 5."""


def reason_of(error: Exception) -> str:
    """What went wrong, of an `OSError` in the system's words, without its number and file."""
    return getattr(error, "strerror", None) or str(error)


def name_attention(refusal: NotImplementedError) -> str:
    """Message of an error raised by the attention ops, with their argument `implementation` renamed
    to the option `attention`."""
    return re.sub("^implementation=", "`attention`=", str(refusal))
