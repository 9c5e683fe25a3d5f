"""Rendering of documents as text, with the places of its targets.

A chat template that marks what is generated (`{% generation %}`) decides the targets itself. With
any other they are the assistant's turns. Their place is the difference between two renderings of
the conversation: that works for repeated answers and for trimmed ones. Where a template renders an
answer otherwise once others follow (Qwen3 leaves out its reasoning), it is an example of its own,
the conversation up to it: what the model sees when it writes that answer.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Callable, Sequence
from typing import Any

from ...errors import DataError
from ...text.chat_template import (
    THINKING_SWITCHES,
    marks_generation,
    render_chat,
    render_chat_marked,
)
from .documents import Document, Unreadable

TEMPLATE_DATE = datetime.datetime(2024, 7, 26)
"""The date in conversations whose template writes today's (Llama 3.1, Granite, SmolLM3), so that
the same data are the same tokens on any day: what Llama 3.1's template writes without a clock."""


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A document as text, with the places of its targets."""

    origin: str
    text: str
    spans: tuple[tuple[int, int], ...]
    """(start, stop) characters of each target, in order."""
    is_chat: bool
    is_marked: bool = False
    """True if the template has marked the targets."""


class _Refused(ValueError):
    pass


class Renderer:
    """Makes text of documents, with a tokenizer's chat template where they are conversations."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        self._ends = tuple(str(token) for token in added if token.special)

    def render(self, document: Document) -> Sequence[Rendered | Unreadable]:
        """The texts of a document: several where the template rewrites earlier answers. Raises
        `DataError` if there are messages and the tokenizer has no chat template."""
        try:
            if document.messages is None:
                text = document.text or ""
                target = ((document.given, len(text)),)
                rendered = [Rendered(document.origin, text, target, is_chat=False)]
            else:
                rendered = self._chat(document)
            for item in rendered:
                item.text.encode("utf-8")
        except _Refused as error:
            return [Unreadable(document.origin, str(error))]
        except UnicodeEncodeError as error:
            reason = f"not Unicode text (a lone surrogate at character {error.start})"
            return [Unreadable(document.origin, reason)]
        return rendered

    def _chat(self, document: Document) -> list[Rendered]:
        if self._tokenizer.chat_template is None:
            raise DataError(
                f"{document.origin}: the model's tokenizer has no chat template, so messages "
                f"cannot be rendered: put a chat_template.jinja into the model's folder (a GGUF "
                f"file becomes one by `convert orbax2hf`), or give rows of text"
            )
        messages = document.messages or []
        answers = [at for at, one in enumerate(messages) if one["role"] == "assistant"]
        trained = [
            at for at in answers if at >= document.given and at not in document.without_weight
        ]
        if not trained:
            weights = " of a weight above 0" if document.without_weight else ""
            raise _Refused(f"no message with role 'assistant'{weights} to train on")
        try:
            template = self._tokenizer.get_chat_template(tools=document.tools)
        except ValueError as error:  # several templates, none of them by default
            raise _Refused(f"the chat template refuses the messages: {error}") from None
        if marks_generation(template):
            return self._marked(document, [at for at in answers if at not in trained])
        switches = [name for name in THINKING_SWITCHES if re.search(rf"\b{name}\b", template)]
        return self._by_difference(document, trained, switches)

    def _marked(self, document: Document, left_out: list[int]) -> list[Rendered]:
        """Targets are what the template marks, but for what it marks in the answers `left_out`."""

        def up_to(turns: int) -> tuple[str, list[tuple[int, int]]]:
            return self._apply(document, turns, render_chat_marked)

        text, spans = up_to(len(document.messages or []))
        for turn in reversed(left_out):
            before = len(up_to(turn)[1]) if turn else 0
            del spans[before : len(up_to(turn + 1)[1])]
        return [Rendered(document.origin, text, tuple(spans), is_chat=True, is_marked=True)]

    def _by_difference(
        self, document: Document, trained: list[int], switches: list[str]
    ) -> list[Rendered]:
        """Targets are what an answer adds to the rendering that ends with the generation prompt,
        up to its last special token. Each is in one of the texts."""
        text = self.text(document, len(document.messages or []))
        spans = []
        alone = []
        for turn in trained:
            after = self.text(document, turn + 1)
            prompt = self._prompt_of(document, turn, after, switches)
            span = len(prompt), self._end(after, len(prompt))
            if text.startswith(after):
                spans.append(span)
            else:
                alone.append(Rendered(document.origin, after, (span,), is_chat=True))
        whole = Rendered(document.origin, text, tuple(spans), is_chat=True)
        return [*alone, whole] if spans else alone

    def _prompt_of(self, document: Document, turn: int, after: str, switches: list[str]) -> str:
        """The prompt that answer `turn` was generated from: of those that the template writes, with
        reasoning and without, the longest with which the text `after` the answer begins."""
        variants = [{}, *({name: False} for name in switches)]
        prompts = [
            self.text(document, turn, add_generation_prompt=True, variables=variables)
            for variables in variants
        ]
        found = max(filter(after.startswith, prompts), key=len, default=None)
        if found is None:
            raise _Refused(
                f"the chat template rewrites earlier turns, so answer {turn} cannot be located"
            )
        return found

    def _end(self, text: str, start: int) -> int:
        """Find where the answer that begins at `start` ends: white space behind the special token
        that ends it is never generated."""
        kept = text[start:].rstrip()
        return start + len(kept) if kept.endswith(self._ends) else len(text)

    def text(
        self,
        document: Document,
        turns: int,
        *,
        add_generation_prompt: bool = False,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """The first `turns` messages as text. Raises `_Refused`."""
        return self._apply(
            document,
            turns,
            render_chat,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
        )

    def _apply[T](
        self, document: Document, turns: int, render: Callable[..., T], **options: Any
    ) -> T:
        try:
            return render(
                self._tokenizer,
                (document.messages or [])[:turns],
                tools=document.tools,
                now=TEMPLATE_DATE,
                **options,
            )
        except DataError as error:
            raise _Refused(f"{error} (the first {turns} of them)") from None
