"""Spellings of single tokens, for lists of log-probabilities."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from ...infer.text import rust_tokenizer


class Spelling(NamedTuple):
    """A token by itself."""

    text: str
    """Bytes that are no character are replaced."""
    content: bytes
    """Its bytes: half a character stays half."""
    is_special: bool
    """Texts leave it out, unless `skip_special_tokens` is false."""


class TokenSpellings:
    """Spellings of a tokenizer's tokens, kept once they were asked for."""

    def __init__(self, tokenizer: Any, *, as_ids: bool = False):
        """Make the table. With `as_ids` the texts are `token_id:N`."""
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._kept: dict[int, Spelling] = {}
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._added = {index: str(token) for index, token in added.items()}
        self._special = {i for i, token in added.items() if getattr(token, "special", False)}
        self._byte_level = "ByteLevel" in repr(
            getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", "")
        )

    def __getitem__(self, token_id: int) -> Spelling:
        if (found := self._kept.get(token_id)) is None:
            content = self._bytes(token_id)
            text = content.decode("utf-8", "replace")
            found = Spelling(text, content, token_id in self._special)
            self._kept[token_id] = found
        if self._as_ids:
            return found._replace(text=f"token_id:{token_id}")
        return found

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:  # the vocabulary is padded
            return b""
        if self._byte_level:
            return bytes(_BYTE_OF.get(character, 63) for character in token)
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", token):
            return bytes([int(byte[1], 16)])
        return token.replace("\u2581", " ").encode()


class WithSpecialTokens:
    """A tokenizer whose texts have special tokens too; what `text.TextStream` needs of one."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def decode(self, token_ids: list[int], **_: Any) -> str:
        if (backend := rust_tokenizer(self._tokenizer)) is not None:
            return backend.decode(token_ids, skip_special_tokens=False)
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def _byte_of() -> dict[str, int]:
    """Character -> byte, as GPT-2's vocabulary spells bytes (`bytes_to_unicode` of its
    `encoder.py`): printable ones as themselves, the others as 256 and up."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return table | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTE_OF = _byte_of()
