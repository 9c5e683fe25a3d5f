"""The flag --chat-template: a template in the place of the checkpoint's."""

from __future__ import annotations

import functools
from importlib import resources
from pathlib import Path
from typing import Any

from ...cli.fields import option
from ...errors import DataError, UsageError, reason_of
from ...text.chat_template import render_chat

PACKAGED_TEMPLATE = "plain"
"""Name of the chat template that is packaged."""

chat_template = functools.partial(
    option,
    None,
    "Jinja template that replaces the checkpoint's; `plain` is one that is packaged, which writes "
    "a conversation as plain text",
    metavar="FILE",
)


def chat_template_text(file: Path | None) -> str | None:
    """Read the template in `file`, or the packaged one; None stands for the checkpoint's. Raises
    `UsageError`."""
    if file is None:
        return None
    try:
        if str(file) == PACKAGED_TEMPLATE and not file.exists():
            return resources.files(__package__).joinpath("plain.jinja").read_text("utf-8")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"`chat_template`={file}: {reason_of(error)}") from None


def set_chat_template(tokenizer: Any, template: str | None, name: object) -> None:
    """Let `tokenizer` use `template`, which errors call `name`, in the place of the checkpoint's;
    None leaves that. Raises `UsageError` for one that cannot render a message of a user."""
    if template is None:
        return
    if tokenizer is None:
        raise UsageError(f"`chat_template`={name}: this checkpoint has no tokenizer")
    tokenizer.chat_template = template
    try:
        render_chat(tokenizer, [{"role": "user", "content": "?"}], add_generation_prompt=True)
    except DataError as error:
        raise UsageError(f"`chat_template`={name}: {error}") from None
