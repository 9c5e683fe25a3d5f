"""Log-probabilities in answers: those of chats, of completions and of prompts."""

from __future__ import annotations

import codecs
import math
from typing import Any

from ...infer.engine.requests import Logprob
from ..service.generation import EngineRequest, TextDelta
from ..text.token_text import TokenSpellings

LOWEST = -9999.0
"""Log-probability of what is impossible: JSON has no infinity."""


def chat_logprobs(delta: TextDelta, spellings: TokenSpellings) -> dict[str, Any]:
    return {
        "content": [
            _entry(token, logprob.logprob, spellings)
            | {"top_logprobs": [_entry(*top, spellings) for top in logprob.top_logprobs]}
            for token, logprob in zip(delta.token_ids, delta.logprobs, strict=True)
        ],
        "refusal": None,
    }


def _entry(token: int, logprob: float, spellings: TokenSpellings) -> dict[str, Any]:
    spelling = spellings[token]
    return {"token": spelling.text, "logprob": _finite(logprob), "bytes": list(spelling.content)}


class CompletionLogprobs:
    """The parallel lists of a completion's log-probabilities, as they grow."""

    def __init__(self, spellings: TokenSpellings, *, with_special: bool):
        """`with_special` is whether the text has special tokens."""
        self._spellings = spellings
        self._with_special = with_special
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(
        self, token_ids: list[int], logprobs: list[Logprob | None], text: str | None = None
    ) -> dict[str, Any]:
        """Lists for the next tokens; None is an entry for a token that nothing predicts. `text` is
        that of a prompt, which has the special tokens that it spells."""
        spellings = [self._spellings[token] for token in token_ids]
        tokens = [spelling.text for spelling in spellings]
        offsets = []
        for spelling in spellings:
            offsets.append(self._offset)
            shown = not spelling.is_special or self._with_special
            if spelling.is_special and text is not None:
                shown = text.startswith(spelling.content.decode(), self._offset)
            if shown:
                self._offset += len(self._decoder.decode(spelling.content))
        return {
            "tokens": tokens,
            "token_logprobs": [one and _finite(one.logprob) for one in logprobs],
            "top_logprobs": [
                one and self._top(token, one)
                for token, one in zip(token_ids, logprobs, strict=True)
            ],
            "text_offset": offsets,
        }

    def _top(self, token: int, logprob: Logprob) -> dict[str, float]:
        """The likeliest tokens, and the chosen one. Of two with one spelling the larger value
        stays."""
        found: dict[str, float] = {}
        for other, value in (*logprob.top_logprobs, (token, logprob.logprob)):
            text = self._spellings[other].text
            found[text] = max(found.get(text, LOWEST), _finite(value))
        return found


def prompt_logprobs(
    part: EngineRequest, count: int, spellings: TokenSpellings
) -> list[dict[str, Any] | None]:
    """List each token of a prompt but the first, which nothing predicts, with the `count` likeliest
    ones, as vLLM does. The rank of a token that is not among those is null."""
    entries: list[dict[str, Any] | None] = [None]
    tokens = part.prompt.token_ids.tolist()[1:]
    for token, logprob in zip(tokens, part.logprobs, strict=True):
        found: dict[int, tuple[float, int | None]] = {token: (logprob.logprob, None)}
        for rank, (other, value) in enumerate(logprob.top_logprobs[:count], start=1):
            found[other] = value, rank
        entries.append(
            {
                str(other): {
                    "logprob": _finite(value),
                    "rank": rank,
                    "decoded_token": spellings[other].text,
                }
                for other, (value, rank) in found.items()
            }
        )
    return entries


def _finite(value: float) -> float:
    return value if math.isfinite(value) else LOWEST
