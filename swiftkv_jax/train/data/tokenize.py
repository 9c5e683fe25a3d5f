"""Tokenising of documents: their tokens and targets."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ...text.special_tokens import brings_first_token, brings_last_token, ids_after
from .documents import Document, Unreadable
from .rendering import Rendered, Renderer

VERSION = 2
"""Version of the rules by which a document becomes tokens and targets. In the first version, text
that brought its special tokens got them twice, and targets were also what templates write behind an
answer's end token and as empty reasoning."""
# A tokenizer call runs on all cores when it gets many texts; the second limit bounds its memory.
_BATCH_DOCUMENTS = 256
_BATCH_CHARACTERS = 2**22


@dataclasses.dataclass(frozen=True)
class Example:
    """One tokenised document."""

    origin: str
    tokens: np.ndarray
    """i32[n]"""
    is_target: np.ndarray
    """bool[n]; True where the token is to be predicted."""


def tokenize(
    documents: Iterable[Document | Unreadable], tokenizer: Any
) -> Iterator[Example | Unreadable]:
    """Examples in the order of the documents; `Unreadable` for those that cannot be trained on. A
    conversation is one example, or several where the template rewrites earlier answers.

    Text gets the tokenizer's own special tokens and an end token, unless it brings them; a chat
    template writes its own. The targets of `prompt` and `completion` texts are the completion and
    the end token. A token that straddles the edge of a target is none, except where the template
    marks the targets: there it is one, as in transformers' `return_assistant_tokens_mask`. Raises
    `DataError` if there are messages and the tokenizer has no chat template.
    """
    renderer = Renderer(tokenizer)
    for batch in _batches(
        item
        for document in documents
        for item in (renderer.render(document) if isinstance(document, Document) else [document])
    ):
        special = []
        plain = []
        for item in batch:
            if isinstance(item, Rendered):
                (special if _gets_special_tokens(item, tokenizer) else plain).append(item)
        examples = {
            **_encode(special, tokenizer, add_special_tokens=True),
            **_encode(plain, tokenizer, add_special_tokens=False),
        }
        for item in batch:
            example = item if isinstance(item, Unreadable) else examples[id(item)]
            if isinstance(example, Unreadable) or example.is_target[1:].any():
                yield example
            else:
                yield Unreadable(item.origin, "it yields no token to predict")


def _batches(items: Iterable[Rendered | Unreadable]) -> Iterator[list[Rendered | Unreadable]]:
    """Documents for one tokenizer call. An unreadable one ends its batch, so that it is reported
    before the next, which may take as long as a chat template is allowed to."""
    batch = []
    characters = 0
    for item in items:
        batch.append(item)
        is_full = isinstance(item, Unreadable) or len(batch) == _BATCH_DOCUMENTS
        characters += 0 if isinstance(item, Unreadable) else len(item.text)
        if is_full or characters >= _BATCH_CHARACTERS:
            yield batch
            batch = []
            characters = 0
    yield batch


def _gets_special_tokens(item: Rendered, tokenizer: Any) -> bool:
    """Return whether the tokenizer adds its own to a text."""
    return not item.is_chat and not brings_first_token(tokenizer, item.text)


def _encode(
    batch: list[Rendered], tokenizer: Any, *, add_special_tokens: bool
) -> dict[int, Example]:
    """The example of each text, by its `id`, from one tokenizer call."""
    if not batch:
        return {}
    encoded = tokenizer(
        [item.text for item in batch],
        add_special_tokens=add_special_tokens,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    found = {}
    for item, tokens, offsets in zip(
        batch, encoded["input_ids"], encoded["offset_mapping"], strict=True
    ):
        ranges = np.array(offsets, np.int64).reshape(-1, 2)
        is_target = (_touching if item.is_marked else _inside)(ranges, item.spans)
        ids = np.array(tokens, np.int32)
        if not item.is_chat:
            ids, is_target = _ended(item.text, ids, is_target, ranges, tokenizer)
        found[id(item)] = Example(item.origin, ids, is_target)
    return found


def _ended(
    text: str, ids: np.ndarray, is_target: np.ndarray, ranges: np.ndarray, tokenizer: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets of a text with one end token, which is a target: its own, or one that is
    added. Shapes are those of `_inside`."""
    end = tokenizer.eos_token_id
    added = ids_after(tokenizer)
    is_brought = brings_last_token(tokenizer, text)
    # The tokenizer's own, which are no part of the text.
    own = added if is_brought else [end]
    count = len(own)
    if ids[-count:].tolist() == own and (ranges[-count:, 0] == ranges[-count:, 1]).all():
        ids = ids[:-count]
        is_target = is_target[:-count]
    if is_brought or end is None:
        return ids, is_target
    return np.append(ids, np.int32(end)), np.append(is_target, True)


def _inside(offsets: np.ndarray, spans: tuple[tuple[int, int], ...]) -> np.ndarray:
    """True for each token that lies in a span: i64[n, 2], (start, stop) characters of each token ->
    bool[n].

    Tokenizers that trim white space from offsets give a token of nothing but spaces the empty range
    at its end.
    """
    edges = np.array(list(itertools.chain.from_iterable(spans)))
    starts = offsets[:, 0]
    stops = offsets[:, 1]
    # odd: past the start of a span and not past its stop
    span = np.searchsorted(edges, stops, side="left")
    return (span % 2 == 1) & (starts >= edges[np.maximum(span, 1) - 1])


def _touching(offsets: np.ndarray, spans: tuple[tuple[int, int], ...]) -> np.ndarray:
    """True for each token of which a character lies in a span. Shapes are those of `_inside`."""
    starts = offsets[:, 0]
    stops = offsets[:, 1]
    found = np.zeros(len(offsets), bool)
    for start, stop in spans:
        is_empty = (starts == stops) & (stops == stop)  # spaces, trimmed
        found |= (start < stops) & ((starts < stop) | is_empty)
    return found
