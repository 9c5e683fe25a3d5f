"""Shadow drafts: how often drafts of a sequence are right, known without drafting.

The host keeps the text of a sequence, and where in it each two tokens stood last. While calls have
width 1, a token that follows two as it did there is a hit: a draft would have been right. In wide
calls accepted drafts are hits.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_LOOKUP = 16
"""Most tokens that are compared: a longer match would not choose other drafts."""
_WEIGHT = 0.1
"""Weight of a token in the rate of its sequence."""


def lookup_text(
    prompt: Sequence[int], prediction: Sequence[int], generated: Sequence[int]
) -> tuple[Sequence[int], ...]:
    """The parts of the text in which the drafts of a sequence are looked up.

    A predicted answer follows the prompt, and then, so that the answer begins like its prediction,
    the end of the prompt once more.
    """
    again = prompt[-MAX_LOOKUP:] if len(prediction) else ()
    return prompt, prediction, again, generated


def lookup_places(max_tokens: int) -> int:
    """Most tokens of `lookup_text`, for sequences and predictions of `max_tokens`."""
    return 2 * max_tokens + MAX_LOOKUP


class ShadowDrafts:
    """Drafts of a sequence on the host, and the share of drafts that are right."""

    def __init__(self, text: Sequence[Sequence[int]], rate: float):
        """`text` is that of `lookup_text`; `rate` is the share until its tokens tell."""
        import numpy as np  # the options of commands are parsed without it

        self.rate = rate
        tokens = np.concatenate([np.asarray(part, np.int32) for part in text]).tolist()
        self._text = tokens
        pairs = zip(tokens, tokens[1:], strict=False)
        self._after = dict(zip(pairs, range(2, len(tokens)), strict=False))
        """Place of the token after the last occurrence of each two."""

    def tokens_of_step(self, width: int) -> float:
        """Tokens that a step of `width` may be expected to emit."""
        return sum(self.rate**place for place in range(width))

    def draft(self, forced: Sequence[int], count: int) -> range:
        """Places in the text of at most `count` tokens that may follow it and the tokens
        `forced`."""
        start = self._after.get(tuple([*self._text[-2:], *forced][-2:]), len(self._text))
        return range(start, min(start + count, len(self._text)))

    def tokens_at(self, places: range) -> list[int]:
        return self._text[places.start : places.stop]

    def add(self, tokens: Sequence[int], width: int) -> None:
        """Add the tokens that a step of `width` has emitted."""
        hits = [True] * (len(tokens) - 1) + [False] * (len(tokens) < width)
        for token in tokens:
            if width == 1:
                hits = [self.tokens_at(self.draft((), 1)) == [token]]
            self._after[tuple(self._text[-2:])] = len(self._text)
            self._text.append(token)
        for hit in hits:
            self.rate += _WEIGHT * (hit - self.rate)
