"""Calls of sequences that follow a grammar: what may come at each place, and drafts of the host.

Where a grammar lets one text follow only, its tokens are drafts, and then those that the sequence's
own text suggests. They are drafts as any: another spelling that the model prefers is emitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .grammar import Matcher, fill_rows, mask_words
from .request_state import SequenceState


class HostDraft(NamedTuple):
    """Tokens that may follow in a sequence with a grammar."""

    tokens: Sequence[int] = ()
    source: Sequence[int] = ()
    """Their places in the text that they are taken from; the place behind it for those that the
    grammar forces."""
    expected: float = 1.0
    """Tokens that a step with this draft may be expected to emit."""


class HostDrafts(NamedTuple):
    """Drafts of a constrained call, aligned to the right as in a `drafts.Block`."""

    tokens: Any  # i32[B, T]
    source: Any  # i32[B, T]; see `drafts.Block`, -1 in columns without a draft


class ConstrainedCall(NamedTuple):
    """A call of sequences that follow a grammar, with a step of T tokens at most."""

    sequences: list[SequenceState]
    masks: np.ndarray
    """u32[B, T, ceil(V/32)], see `Matcher.fill_masks`: those of the last token of a sequence and of
    its drafts are the last ones of its row."""
    drafts: HostDrafts
    failed: list[tuple[SequenceState, str]]
    """Sequences that cannot go on, and why."""

    @property
    def width(self) -> int:
        return self.masks.shape[1]

    def operands(self, rows: int, index: Sequence[int] | np.ndarray) -> dict[str, Any]:
        """Masks and drafts for a program of so many rows, which has the sequences at `index`."""

        def padded(some: np.ndarray, fill: int = 0) -> np.ndarray:
            every = np.full((rows, *some.shape[1:]), fill, some.dtype)
            every[index] = some
            return every

        if self.width == 1:
            return {"masks": padded(self.masks[:, 0])}
        drafts = HostDrafts(padded(self.drafts.tokens), padded(self.drafts.source, -1))
        return {"masks": padded(self.masks), "drafts": drafts}


def constrained_call(
    sequences: Sequence[SequenceState], drafts: Sequence[HostDraft], width: int, vocab_size: int
) -> ConstrainedCall:
    """The call of those of `sequences` that can go on. The drafts have at most `width`-1 tokens."""
    matchers = [one.matcher for one in sequences if one.matcher is not None]
    masks = np.zeros((len(matchers), width, mask_words(vocab_size)), np.uint32)
    counts = fill_masks_along(matchers, [one.tokens for one in drafts], masks)
    tokens = np.zeros((len(matchers), width), np.int32)
    source = np.full_like(tokens, -1)
    for row, (draft, count) in enumerate(zip(drafts, counts, strict=True)):
        masks[row] = np.roll(masks[row], width - 1 - count, axis=0)
        tokens[row, width - count :] = draft.tokens[:count]
        source[row, width - count :] = draft.source[:count]
    errors = [matcher.error for matcher in matchers]
    good = [row for row, error in enumerate(errors) if not error]
    both = zip(sequences, errors, strict=True)
    return ConstrainedCall(
        [sequences[row] for row in good],
        masks[good],
        HostDrafts(tokens[good], source[good]),
        [(sequence, error) for sequence, error in both if error],
    )


def fill_masks_along(
    matchers: Sequence[Matcher], drafts: Sequence[Sequence[int]], masks: np.ndarray
) -> list[int]:
    """Fill u32[B, T, W] from the left with the masks before and after each draft token, and return
    how many of each draft may come. A token that ends its text is not among these: the sampler
    chooses it without."""
    counts = [0] * len(matchers)
    states = dict(enumerate(matchers))
    for place in range(masks.shape[1]):
        fill_rows(states, masks[:, place])
        following = {}
        for row, matcher in states.items():
            if matcher.error:
                counts[row] = max(place - 1, 0)
                masks[row, place] = 0
            elif place < len(drafts[row]):
                token = drafts[row][place]
                if masks[row, place, token // 32] >> (token % 32) & 1:
                    state = matcher if place else matcher.copy()
                    state.accept(token)
                    if not (state.is_ended or state.error):
                        following[row] = state
                        counts[row] = place + 1
        states = following
    return counts
