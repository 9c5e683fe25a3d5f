"""Drafts: what may follow in a sequence, from its own text, and which of them a step emits.

A step of width T runs the last token of each sequence and d drafts, at most T-1, through all
layers at once. At each of the d+1 places the sampler chooses the token as it would with width 1, by
the same logits, counts and noise. Tokens are emitted up to the first that is not the draft after
it: whatever the drafts are, the tokens are those of width 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ...model.speculator import Speculator, draft_tokens
from ..engine.constrained import HostDrafts
from ..engine.sampler_output import NON_FINITE, REJECTED
from ..engine.shadow_drafts import lookup_text
from .decode_state import DecodeBatch


@dataclasses.dataclass(frozen=True)
class Drafting:
    """How a decode program drafts."""

    width: int
    """Tokens (T) of a sequence in a step: its last one, and at most T-1 drafts."""
    shortest: int
    """Fewest tokens at the end of a text that must have occurred before."""
    longest: int
    """Most tokens that are compared, at most `MAX_LOOKUP`."""


class Block(NamedTuple):
    """The tokens of a step, aligned to the right: the last token of a sequence and its drafts are
    the last columns of its row."""

    tokens: Int[Array, "B T"]
    position: Int[Array, "B T"]
    """Positions of the tokens, at least 0."""
    real: Bool[Array, "B T"]
    """True where a column has a token; none of a sequence that has ended has."""
    source: Int[Array, "B T"]
    """Places of the drafts in the text that they are taken from; -1 in columns without one."""

    @property
    def drafted(self) -> Bool[Array, "B T"]:
        """True where a column has a draft."""
        return self.source >= 0


def history_of(
    prompt: Sequence[int], prediction: Sequence[int], generated: Sequence[int], size: int
) -> tuple[np.ndarray, int]:
    """(i32[N], `lookup_text` with -1 behind it; the offset of the place of a position)."""
    row = np.full(size, -1, np.int32)
    end = 0
    for part in lookup_text(prompt, prediction, generated):
        row[end : end + len(part)] = part
        end += len(part)
    return row, end - len(prompt) - len(generated)


def draft(
    history: Int[Array, "B N"],
    batch: DecodeBatch,
    drafting: Drafting,
    speculator: Speculator | None = None,
) -> Block:
    """The block of each sequence, with the tokens after the longest match of the text's end, of
    equal ones the last. Where these reach the end they begin again: a loop is drafted as one.

    The last token may differ from that of the match where none ends with it: so drafts go on behind
    a token that a prediction has wrong. A speculator drafts where no match is as long as its
    drafts. The source of those is the first place behind the text.
    """
    width, size = drafting.width, history.shape[1]
    end = (batch.length + batch.history_offset)[:, None]
    place = jnp.arange(size)
    padded = jnp.pad(history, ((0, 0), (drafting.longest, 0)), constant_values=-1)

    def equal(back: int) -> Bool[Array, "B N"]:
        """Compare the token `back` places before each with the one as many before the end."""
        # -2 before the first token: it is equal to no token, and not to the padding.
        last = jnp.take_along_axis(history, jnp.maximum(end - back, 0), axis=1)
        last = jnp.where(end - back >= 0, last, -2)
        start = drafting.longest - back
        return padded[:, start : start + size] == last

    compared = [equal(back) for back in range(drafting.longest + 1)]

    def longest_match(first: int) -> tuple[Int[Array, "B 1"], Int[Array, "B 1"]]:
        """(tokens of the longest match without the last `first` ones, its place)."""
        matches, length = place < end, jnp.zeros(history.shape, jnp.int32)
        for same in compared[first : first + drafting.longest]:
            matches &= same
            length += matches
        best = jnp.max(length * size + place, axis=1, keepdims=True)
        return best // size, best % size

    match, found = longest_match(0)
    before, found_before = longest_match(1)
    differs = (match < drafting.shortest) & (before > drafting.shortest)
    match, found = jnp.where(differs, before, match), jnp.where(differs, found_before, found)
    wanted = jnp.minimum(width - 1, 2 * match)[:, 0]
    can_draft = (match[:, 0] >= drafting.shortest) & (batch.history_offset >= 0)
    own = None
    if speculator is not None:
        most = min(speculator.config.n_predict, width - 1)
        enough = max(most, drafting.shortest)
        has_state = jnp.any(batch.hidden != 0, axis=1) & (match[:, 0] < enough)
        has_state &= batch.history_offset >= 0
        wanted, can_draft = jnp.where(has_state, most, wanted), can_draft | has_state
        own = has_state[:, None], draft_tokens(speculator, batch.hidden, batch.token, most)
    count = jnp.where(can_draft, jnp.minimum(wanted, batch.remaining - 1), 0)
    count = jnp.maximum(count, 0)
    column = jnp.arange(width) - (width - 1) + count[:, None]  # 0 for the last token, then drafts
    period = jnp.maximum(end - found, 1)
    source = found + 1 + jnp.maximum(column - 1, 0) % period
    drafts = jnp.take_along_axis(history, jnp.minimum(source, size - 1), axis=1)
    if own is not None:
        is_own, tokens = own
        number = jnp.clip(column - 1, 0, tokens.shape[1] - 1)
        drafts = jnp.where(is_own, jnp.take_along_axis(tokens, number, axis=1), drafts)
        source = jnp.where(is_own, size, source)
    return _block(batch, column, drafts, source)


def given(drafts: HostDrafts, batch: DecodeBatch) -> Block:
    """The block of each sequence, with drafts of the host."""
    width = drafts.tokens.shape[1]
    count = (drafts.source >= 0).sum(axis=1)
    column = jnp.arange(width) - (width - 1) + count[:, None]
    return _block(batch, column, drafts.tokens, drafts.source)


def _block(
    batch: DecodeBatch,
    column: Int[Array, "B T"],
    drafts: Int[Array, "B T"],
    source: Int[Array, "B T"],
) -> Block:
    """A block, given which columns have the last token (0) and drafts (from 1 on)."""
    real = (column >= 0) & (batch.remaining > 0)[:, None]
    tokens = jnp.where(column > 0, drafts, batch.token[:, None])
    position = jnp.maximum(batch.length[:, None] + column, 0)
    source = jnp.where(real & (column > 0), source, -1)
    return Block(jnp.where(real, tokens, 0), position, real, source)


def accepted(
    block: Block,
    token: Int[Array, "B T"],
    batch: DecodeBatch,
    hidden: Float[Array, "B T D"] | None = None,
) -> tuple[DecodeBatch, Bool[Array, "B T"]]:
    """(the batch after the step, which of the sampled tokens are emitted): those up to the first
    that differs from its draft or ends the sequence. The batch has the `hidden` state that the last
    of them was chosen from."""
    stops = batch.sampling.stop_token_ids[:, None, :]
    ends = jnp.any(token[:, :, None] == stops, axis=-1) | (token == NON_FINITE)
    follows = (token[:, :-1] == block.tokens[:, 1:]) & ~ends[:, :-1]
    goes_on = jnp.where(block.real[:, :-1], follows, True)
    before = jnp.concatenate([jnp.ones_like(goes_on[:, :1]), goes_on], axis=1)
    emitted = block.real & jnp.cumprod(before, axis=1).astype(bool)
    count = emitted.sum(axis=1).astype(jnp.int32)
    last = jnp.max(jnp.where(emitted, jnp.arange(token.shape[1]), 0), axis=1, keepdims=True)
    ended = jnp.any(emitted & ends, axis=1)
    new = jnp.take_along_axis(token, last, axis=1)[:, 0]
    active = batch.remaining > 0
    if hidden is not None:
        hidden = jnp.take_along_axis(hidden, last[:, :, None], axis=1)[:, 0]
        hidden = jnp.where(active[:, None], hidden, batch.hidden)
    batch = dataclasses.replace(
        batch,
        token=jnp.where(active, new, batch.token),
        length=batch.length + count,
        remaining=jnp.where(active & ~ended, batch.remaining - count, 0),
        hidden=hidden,
    )
    return batch, emitted


def mark_rejected(
    block: Block, token: Int[Array, "B T"], emitted: Bool[Array, "B T"]
) -> Int[Array, "B T"]:
    """The tokens that are emitted, `REJECTED` at places of drafts from which none is, -1 where
    there was none."""
    return jnp.where(emitted, token, jnp.where(block.real, REJECTED, -1))


def extend_history(
    history: Int[Array, "_ N"],
    slots: Int[Array, " B"],
    batch: DecodeBatch,
    position: Int[Array, "B T"],
    token: Int[Array, "B T"],
    emitted: Bool[Array, "B T"],
) -> Int[Array, "_ N"]:
    """`history` with the tokens that were emitted after those at `position`. A row past the last is
    left out."""
    place = position + batch.history_offset[:, None] + 1
    place = jnp.where(emitted & (token >= 0), place, history.shape[1])
    return history.at[slots[:, None], place].set(token, mode="drop")


def repeated[Tree](tree: Tree, width: int) -> Tree:
    """The entries of each row once for each column of a block."""
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, width, axis=0), tree)


def one_token_rows(new: Float[Array, "B K T H"]) -> Float[Array, "BT K 1 H"]:
    """Keys or values of blocks with a row for each token."""
    batch, heads, width, head_dim = new.shape
    if width == 1:
        return new
    return new.swapaxes(1, 2).reshape(batch * width, heads, 1, head_dim)


class SeparateQueries:
    """Queries that each see other positions, as they are."""

    def fold(self, q):
        return q

    def unfold(self, x):
        return x


class FoldedQueries(NamedTuple):
    """Queries of a block as heads of one query, for positions that all of them see."""

    kv_heads: int
    width: int

    def fold(self, q: Float[Array, "B T N H"]) -> Float[Array, "B 1 TN H"]:
        batch, width, _, head_dim = q.shape
        heads = q.reshape(batch, width, self.kv_heads, -1, head_dim).swapaxes(1, 2)
        return heads.reshape(batch, 1, -1, head_dim)

    def unfold(self, x: Float[Array, "B 1 TN *_"]) -> Float[Array, "B T N *_"]:
        rest = x.shape[3:]
        heads = x.reshape(x.shape[0], self.kv_heads, self.width, -1, *rest).swapaxes(1, 2)
        return heads.reshape(x.shape[0], self.width, -1, *rest)
