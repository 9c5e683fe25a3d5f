"""Variables that a body gives its chat template besides messages and tools: `chat_template_kwargs`
and `reasoning_effort`."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from ...text.chat_template import THINKING_SWITCHES
from ..errors import invalid, unsupported
from ..protocol import ChatBody, TokenizeBody

MAX_LENGTH = 1024
"""Characters of a value."""


def variables_of(template: str) -> frozenset[str]:
    """Names that a chat template may read: those in its expressions and statements."""
    blocks = " ".join(re.findall(r"\{[{%](.*?)[%}]\}", template, re.DOTALL))
    code = re.sub(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\"""", "''", blocks, flags=re.DOTALL)
    return frozenset(re.findall(r"(?<![\w.])[A-Za-z_]\w*", code))


def template_options(
    body: ChatBody | TokenizeBody,
    variables: Collection[str],
    allowed: Collection[str],
    *,
    reasons: bool,
) -> dict[str, Any]:
    """Values of the template's variables that a body sets. `variables` are those that it reads, of
    which a body may set the `THINKING_SWITCHES` and those that are `allowed`; `reasons` tells
    whether the model does. Raises `APIError`."""
    found: dict[str, Any] = {}
    for name, value in (body.chat_template_kwargs or {}).items():
        if value is None:
            continue
        if name not in allowed and not (name in THINKING_SWITCHES and name in variables):
            raise unsupported(
                "chat_template_kwargs",
                f"`chat_template_kwargs`: {name!r} cannot be set on this server",
            )
        _check(name, value)
        found[name] = value
    effort = body.reasoning_effort if isinstance(body, ChatBody) else None
    if effort is None or (effort == "none" and not reasons):
        return found
    if "reasoning_effort" in variables:
        return found | {"reasoning_effort": effort}
    switch = next((name for name in THINKING_SWITCHES if name in variables), None)
    if effort != "none" or switch is None:
        reason = "switch reasoning off" if effort == "none" else "set an effort"
        raise unsupported("reasoning_effort", f"this model's chat template cannot {reason}")
    if found.get(switch):
        raise invalid("reasoning_effort", f"`reasoning_effort`='none' contradicts `{switch}`")
    return found | {switch: False}


def _check(name: str, value: Any) -> None:
    where = f"`chat_template_kwargs`: {name!r}"
    if name in THINKING_SWITCHES and not isinstance(value, bool):
        raise invalid("chat_template_kwargs", f"{where} must be true or false")
    if not isinstance(value, bool | int | float | str) or len(str(value)) > MAX_LENGTH:
        raise invalid(
            "chat_template_kwargs",
            f"{where} must be a number, a truth value or a text of at most {MAX_LENGTH} characters",
        )
