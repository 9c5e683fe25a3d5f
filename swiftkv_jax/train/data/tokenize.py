"""From documents to tokens and targets.

The targets of a conversation are the assistant's turns. Their place is the difference between two
renderings of the conversation: that works for repeated answers and for trimmed ones. Where a
template renders an answer otherwise once others follow (Qwen3 leaves out its reasoning), it is an
example of its own, the conversation up to it: what the model sees when it writes that answer.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ...chat_template import render_chat
from ...errors import DataError
from .documents import Document, Unreadable

# A tokenizer call runs on all cores when it gets many texts; the second limit bounds its memory.
_BATCH_DOCUMENTS, _BATCH_CHARACTERS = 256, 2**22

TEMPLATE_DATE = datetime.datetime(2024, 7, 26)
"""The date in conversations whose template writes today's (Llama 3.1, Granite, SmolLM3), so that
the same data are the same tokens on any day: what Llama 3.1's template writes without a clock."""


@dataclasses.dataclass(frozen=True)
class Example:
    """One tokenised document."""

    origin: str
    tokens: np.ndarray
    """i32[n]"""
    is_target: np.ndarray
    """bool[n]; True where the token is to be predicted."""


@dataclasses.dataclass(frozen=True)
class _Rendered:
    """A document as text, with the places of its targets."""

    origin: str
    text: str
    spans: tuple[tuple[int, int], ...]
    """(start, stop) characters of each target, in order."""
    is_chat: bool


def tokenize(
    documents: Iterable[Document | Unreadable], tokenizer: Any
) -> Iterator[Example | Unreadable]:
    """Examples in the order of the documents; `Unreadable` for those that cannot be trained on. A
    conversation is one example, or several where the template rewrites earlier answers.

    Text gets the tokenizer's own special tokens and an end token; a chat template writes its own.
    The targets of `prompt` and `completion` texts are the completion and the end token. A token
    that straddles the edge of a target is none. Raises `DataError` if there are messages and the
    tokenizer has no chat template.
    """
    for batch in _batches(
        item
        for document in documents
        for item in (_render(document, tokenizer) if isinstance(document, Document) else [document])
    ):
        rendered = [item for item in batch if isinstance(item, _Rendered)]
        texts, chats = (
            _encode([item for item in rendered if item.is_chat == is_chat], tokenizer)
            for is_chat in (False, True)
        )
        for item in batch:
            if isinstance(item, Unreadable):
                yield item
                continue
            example = next(chats if item.is_chat else texts)
            if example.is_target[1:].any():
                yield example
            else:
                yield Unreadable(item.origin, "it yields no token to predict")


def _batches(items: Iterable[_Rendered | Unreadable]) -> Iterator[list[_Rendered | Unreadable]]:
    """Documents for one tokenizer call. An unreadable one ends its batch, so that it is reported
    before the next, which may take as long as a chat template is allowed to."""
    batch, characters = [], 0
    for item in items:
        batch.append(item)
        is_full = isinstance(item, Unreadable) or len(batch) == _BATCH_DOCUMENTS
        characters += 0 if isinstance(item, Unreadable) else len(item.text)
        if is_full or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    yield batch


def _render(document: Document, tokenizer: Any) -> Sequence[_Rendered | Unreadable]:
    try:
        if document.messages is None:
            text = document.text or ""
            target = ((document.given, len(text)),)
            rendered = [_Rendered(document.origin, text, target, is_chat=False)]
        else:
            rendered = _render_chat(document, tokenizer)
        for item in rendered:
            item.text.encode("utf-8")
    except _Refused as error:
        return [Unreadable(document.origin, str(error))]
    except UnicodeEncodeError as error:
        reason = f"not Unicode text (a lone surrogate at character {error.start})"
        return [Unreadable(document.origin, reason)]
    return rendered


class _Refused(ValueError):
    pass


def _render_chat(document: Document, tokenizer: Any) -> list[_Rendered]:
    """Targets are what an assistant turn adds to the rendering that ends with the generation
    prompt. Each is in one of the texts."""
    if tokenizer.chat_template is None:
        raise DataError(
            f"{document.origin}: the model's tokenizer has no chat template, so messages cannot "
            f"be rendered"
        )
    messages = document.messages or []
    answers = [
        turn
        for turn in range(document.given, len(messages))
        if messages[turn]["role"] == "assistant"
    ]
    if not answers:
        raise _Refused("no message with role 'assistant' to train on")
    text = _apply_template(tokenizer, document, len(messages), generation_prompt=False)
    spans, alone = [], []
    for turn in answers:
        before = _apply_template(tokenizer, document, turn, generation_prompt=True)
        after = _apply_template(tokenizer, document, turn + 1, generation_prompt=False)
        if not after.startswith(before):
            raise _Refused(
                f"the chat template rewrites earlier turns, so answer {turn} cannot be located"
            )
        span = len(before), len(after)
        if text.startswith(after):
            spans.append(span)
        else:
            alone.append(_Rendered(document.origin, after, (span,), is_chat=True))
    whole = _Rendered(document.origin, text, tuple(spans), is_chat=True)
    return [*alone, whole] if spans else alone


def _apply_template(
    tokenizer: Any, document: Document, turns: int, *, generation_prompt: bool
) -> str:
    """The first `turns` messages as text."""
    try:
        return render_chat(
            tokenizer,
            (document.messages or [])[:turns],
            tools=document.tools,
            add_generation_prompt=generation_prompt,
            now=TEMPLATE_DATE,
        )
    except DataError as error:
        raise _Refused(f"{error} (the first {turns} of them)") from None


def _encode(batch: list[_Rendered], tokenizer: Any) -> Iterator[Example]:
    """One tokenizer call for documents that are all text or all chat."""
    if not batch:
        return
    is_chat = batch[0].is_chat
    encoded = tokenizer(
        [item.text for item in batch],
        add_special_tokens=not is_chat,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    end = [] if is_chat or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for item, tokens, offsets in zip(
        batch, encoded["input_ids"], encoded["offset_mapping"], strict=True
    ):
        is_target = _inside(np.array(offsets, np.int64).reshape(-1, 2), item.spans)
        yield Example(
            item.origin,
            np.array([*tokens, *end], np.int32),
            np.append(is_target, [True] * len(end)).astype(bool),
        )


def _inside(offsets: np.ndarray, spans: tuple[tuple[int, int], ...]) -> np.ndarray:
    """True for each token that lies in a span: i64[n, 2], (start, stop) characters of each token ->
    bool[n].

    Tokenizers that trim white space from offsets give a token of nothing but spaces the empty range
    at its end.
    """
    edges = np.array(list(itertools.chain.from_iterable(spans)))
    starts, stops = offsets[:, 0], offsets[:, 1]
    # odd: past the start of a span and not past its stop
    span = np.searchsorted(edges, stops, side="left")
    return (span % 2 == 1) & (starts >= edges[np.maximum(span, 1) - 1])
