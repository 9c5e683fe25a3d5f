"""`allowed_token_ids` and `bad_words` of a body, as vLLM has them."""

from __future__ import annotations

from typing import Any

from ...infer.engine.grammar import Matcher
from ...infer.structured.token_filter import TokenFilter
from ..errors import invalid, unsupported
from ..protocol import Sampling

MAX_ALLOWED = 1024
"""Ids of `allowed_token_ids`."""
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 4096
"""Characters of all bad words."""


def filtered(
    body: Sampling, grammar: Matcher | None, tokenizer: Any, vocab_size: int, *, possible: bool
) -> TokenFilter:
    """`grammar`, or with None nothing, within what the body allows, which asks for something.
    Tokenizes `bad_words`: for a thread. Raises `APIError`; also where that is not `possible` on
    this server."""
    allowed = body.allowed_token_ids
    words = body.bad_words or []
    if not possible:
        name = "bad_words" if allowed is None else "allowed_token_ids"
        raise unsupported(name, f"`{name}`: this server filters no tokens")
    if allowed is not None and not (
        1 <= len(allowed) <= MAX_ALLOWED and 0 <= min(allowed) <= max(allowed) < vocab_size
    ):
        raise invalid(
            "allowed_token_ids",
            f"`allowed_token_ids` must be 1 to {MAX_ALLOWED} ids from 0 to {vocab_size - 1}",
        )
    if len(words) > MAX_BAD_WORDS or sum(map(len, words)) > MAX_BAD_WORD_CHARACTERS:
        raise invalid(
            "bad_words",
            f"`bad_words` must be at most {MAX_BAD_WORDS} words, of {MAX_BAD_WORD_CHARACTERS} "
            f"characters together",
        )
    if not all(word.strip() for word in words):
        raise invalid("bad_words", "`bad_words` must not be empty or of white space alone")
    spelled = [ids for word in words for ids in _spellings(word, tokenizer)]
    if any(max(ids) >= vocab_size for ids in spelled):
        raise invalid("bad_words", "`bad_words` has a token that the model does not have")
    return TokenFilter(vocab_size, allowed_token_ids=allowed, bad_words=spelled, grammar=grammar)


def _spellings(word: str, tokenizer: Any) -> list[list[int]]:
    """A word as it stands, and within a text, where it follows a space and its first token is
    another (vLLM, `SamplingParams.update_from_tokenizer`)."""
    texts = word, f" {word.lstrip()}"
    plain, after_space = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
    other = after_space and len(after_space) == len(plain) and after_space[0] != plain[0]
    return [ids for ids in ([plain, after_space] if other else [plain]) if ids]
