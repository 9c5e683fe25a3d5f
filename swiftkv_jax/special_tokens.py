"""Whether a text brings the special tokens that would be put around it."""

from __future__ import annotations

from typing import Any


def brings_first_token(tokenizer: Any, text: str) -> bool:
    """Whether `text` begins with the special token that the tokenizer would put there."""
    bos = getattr(tokenizer, "bos_token", None)
    return bool(bos) and text.startswith(bos)


def brings_last_token(tokenizer: Any, text: str) -> bool:
    """Whether `text` ends with the token that ends texts; white space may follow it, as it does
    where chat templates write it."""
    eos = getattr(tokenizer, "eos_token", None)
    return bool(eos) and text.rstrip().endswith(eos)
