"""Special tokens that a tokenizer puts around a text, and whether the text brings them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_around: weakref.WeakKeyDictionary[Any, tuple[list[int], list[int]]] = weakref.WeakKeyDictionary()
"""Results of `ids_around`, by tokenizer."""


def ids_around(backend: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the post-processor puts before and after a text."""
    text, whole = (
        [token for token, used in zip(found.ids, found.attention_mask, strict=True) if used]
        for found in (backend.encode("a", add_special_tokens=False), backend.encode("a"))
    )
    start = next(i for i in range(len(whole) + 1) if whole[i : i + len(text)] == text)
    return whole[:start], whole[start + len(text) :]


def ids_after(tokenizer: Any) -> list[int]:
    """The ids that a tokenizer of transformers puts after a text."""
    return _ids_around(tokenizer)[1]


def brought_first_token(tokenizer: Any, text: str) -> str | None:
    """The special token that `text` begins with and that the tokenizer would put there: its
    `bos_token`, or the first of those that it adds (`[gMASK]` of `[gMASK]<sop>`)."""
    first = _names(tokenizer, _ids_around(tokenizer)[0][:1], "bos_token")
    return next(filter(text.startswith, first), None)


def brings_first_token(tokenizer: Any, text: str) -> bool:
    """Return whether `text` begins with the special token that the tokenizer would put there."""
    return brought_first_token(tokenizer, text) is not None


def brings_last_token(tokenizer: Any, text: str) -> bool:
    """Return whether `text` ends with the token that ends texts, `eos_token` or the last that the
    tokenizer adds; white space may follow it, as it does where chat templates write it."""
    last = _names(tokenizer, ids_after(tokenizer)[-1:], "eos_token")
    return text.rstrip().endswith(tuple(last))


def _names(tokenizer: Any, ids: list[int], stated: str) -> list[str]:
    """The tokens of `ids`, and the one that the tokenizer's field `stated` names."""
    added = [tokenizer.backend_tokenizer.id_to_token(index) for index in ids]
    return [token for token in [getattr(tokenizer, stated, None), *added] if token]


def _ids_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """`ids_around`; nothing for a tokenizer without a post-processor."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.post_processor is None:
        return [], []
    found = _around.get(tokenizer)
    if found is None:
        found = _around[tokenizer] = ids_around(backend)
    return found
