"""Runs chat templates, which are programs that come with a checkpoint, within a deadline and a
memory limit. Every failure of a template becomes a `DataError` of one line."""

from __future__ import annotations

import ctypes
import dataclasses
import datetime
import json
import re
import resource
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import DataError

MAX_MEMORY = 2**32
"""Bytes by which the process may grow while a template runs."""
THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Variables of templates that switch reasoning on and off: of Qwen3, SmolLM3 and GLM; of DeepSeek
and Granite."""
_POLL_S = 0.05


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool = False,
    tools: Any = None,
    variables: Mapping[str, Any] | None = None,
    now: datetime.datetime | None = None,
    deadline_s: float = 10.0,
    max_memory: int = MAX_MEMORY,
) -> str:
    """Text of a conversation, as the tokenizer's chat template writes it;
    `continue_final_message` leaves its last message open. `variables` are further ones that the
    template may read. `now` is the date that the template gets where it asks for one
    (`strftime_now`); None for the clock's.

    Raises `DataError` if the template refuses the messages, fails in any other way, runs longer
    than `deadline_s` seconds, or makes the process grow by more than `max_memory` bytes. Both
    limits act between two operations of Python: one operation in C, for example a power of large
    numbers, runs to its end. May be called from any thread.
    """

    def render() -> Any:
        return tokenizer.apply_chat_template(
            list(messages),
            tools=tools,
            chat_template=None if now is None else _template(tokenizer, tools, now),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables or {},
        )

    return _text(_guarded(render, deadline_s, max_memory))


def render_chat_marked(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Any,
    now: datetime.datetime,
    deadline_s: float = 10.0,
    max_memory: int = MAX_MEMORY,
) -> tuple[str, list[tuple[int, int]]]:
    """Text of a conversation, and the (start, stop) characters of what its chat template marks as
    generated. Arguments, limits and errors are those of `render_chat`."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def render() -> Any:
        return render_jinja_template(
            conversations=[[dict(message) for message in messages]],
            tools=tools,
            chat_template=_template(tokenizer, tools, now),
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )

    (text,), (ranges,) = _guarded(render, deadline_s, max_memory)
    return _text(text), ranges


def marks_generation(template: str) -> bool:
    """Return whether a chat template marks what is generated, by transformers' statement
    `generation`."""
    return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None


def _guarded(render: Callable[[], Any], deadline_s: float, max_memory: int) -> Any:
    """Call `render` and return its value. Raises `DataError` for all that goes wrong in it."""
    try:
        return _limited(render, deadline_s, max_memory)
    except DataError:
        raise
    except Exception as error:  # the code is the checkpoint's: any exception may come out of it
        raise DataError(f"the chat template {_reason(error)}") from None


def _text(found: Any) -> str:
    if not isinstance(found, str):
        raise DataError(f"the chat template returns {type(found).__name__}, not text")
    return found


def _template(tokenizer: Any, tools: Any, now: datetime.datetime) -> str:
    """The tokenizer's template, with `now` in the place of the clock."""
    return _dated(tokenizer.get_chat_template(tools=tools), now)


def _dated(template: str, now: datetime.datetime) -> str:
    """`template` with a macro in the place of `strftime_now`, for which transformers takes no
    function."""
    if "strftime_now" not in template:
        return template
    # Every text of the template that may be a format, in either kind of quotes.
    formats = {text for _, text in re.findall(r"""(["'])((?:(?!\1).)*%(?:(?!\1).)*)\1""", template)}
    dates = json.dumps({format: now.strftime(format) for format in sorted(formats)})
    # The line break at the end is trimmed (`trim_blocks`).
    return (
        f"{{% macro strftime_now(format) %}}{{% set dates = {dates} %}}"
        "{{ dates[format] if format in dates else "
        "raise_exception('a date in a format that the template does not spell') }}"
        f"{{% endmacro %}}\n{template}"
    )


def _reason(error: Exception) -> str:
    import jinja2

    message = " ".join(str(error).split())
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"has a mistake in line {error.lineno}: {error.message}"
    if isinstance(error, jinja2.TemplateError | ValueError):  # also what templates raise on purpose
        return f"refuses the messages: {message}"
    return f"fails on the messages: {type(error).__name__}{': ' if message else ''}{message}"


# Limits -----------------------------------------------------------------------


class _Stopped(BaseException):
    """Raised in a thread whose template has reached a limit. Not an `Exception`, which a filter of
    the template may catch."""


@dataclasses.dataclass
class _Run:
    """A template that runs in one thread."""

    deadline_s: float
    max_memory: int
    start: float
    memory: int
    """Bytes of the process at the start."""
    reason: str = ""
    """Why it was stopped."""


_runs: dict[int, _Run] = {}  # by thread; a run is removed by its own thread or by the watcher
_started = threading.Event()
_watcher: threading.Thread | None = None


def _limited(work: Callable[[], Any], deadline_s: float, max_memory: int) -> Any:
    """Return or raise what `work` does; raise `DataError` if it was stopped."""
    global _watcher
    if _watcher is None or not _watcher.is_alive():  # a forked process has none
        _watcher = threading.Thread(target=_watch, name="chat template limits", daemon=True)
        _watcher.start()
    thread = threading.get_ident()
    run = _Run(deadline_s, max_memory, time.monotonic(), _memory())
    try:
        _runs[thread] = run
        _started.set()
        try:
            result = work()
        except Exception:
            _leave(thread)
            raise
        _leave(thread)
        return result
    except _Stopped:
        raise DataError(f"the chat template {run.reason}") from None
    finally:
        _runs.pop(thread, None)


def _leave(thread: int) -> None:
    """End the run of this thread; if the watcher has stopped it already, wait for its exception."""
    while _runs.pop(thread, None) is None:
        time.sleep(_POLL_S)


def _watch() -> None:
    """Raise `_Stopped` in every thread whose template is over a limit."""
    while True:
        _started.clear()
        if not _runs:
            _started.wait()
        time.sleep(_POLL_S)
        for thread, run in list(_runs.items()):
            if time.monotonic() - run.start > run.deadline_s:
                run.reason = f"runs longer than {run.deadline_s:g} s on the messages"
            elif _memory() - run.memory > run.max_memory:
                run.reason = f"takes over {run.max_memory / 2**30:g} GiB of memory"
            else:
                continue
            if _runs.pop(thread, None) is run:  # else it has ended meanwhile
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread), ctypes.py_object(_Stopped)
                )


def _memory() -> int:
    """Bytes of the process in memory: at present under Linux, elsewhere the most so far."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
