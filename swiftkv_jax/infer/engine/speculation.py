"""Speculation: several tokens of a sequence in one step, the same as without it.

Drafts come from a sequence's own text or a speculator (`runner.drafts`), and the sampler decides at
each place, so a step emits one token at least. How many is known when the call is read: what is
planned has two bounds. Slots go by the fewest tokens that calls in flight emit, pages by the most.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from .constrained import HostDraft
from .model_runner_base import ModelRunnerBase
from .options import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from .request_state import Chunk, SequenceState
from .requests import Drafts
from .sampler_output import REJECTED, SamplerOutput
from .scheduler import Scheduler
from .shadow_drafts import ShadowDrafts, lookup_text
from .shapes import DecodeCall

FIRST_RATE = 0.5
"""Share of right drafts of the first sequence of an engine, until its tokens tell."""
PREDICTED_RATE = 0.9
"""The same of a sequence with a prediction: who sends one expects most of it to be right."""
MARGIN = 1.05
"""Tokens that wide steps must emit for each one that steps of width 1 emit in the same time."""
AVERAGE_WEIGHT = 0.02
"""Weight of a step in the average of all sequences."""
FIRST_TOKENS = 2.5
"""Tokens of a wide step with a speculator, until the first ones tell."""
FORGETTING = 0.001
"""Weight of a step of width 1 towards `FIRST_TOKENS`: it tells nothing of what the speculator would
have drafted, so after some hundreds of them wide steps are tried again."""


class DecodeCalls:
    """Chooses the next decode call of an engine."""

    def __init__(
        self,
        model_runner: ModelRunnerBase,
        scheduler: Scheduler,
        speculative: SpeculativeConfig | None,
    ):
        self._shapes = model_runner.shapes
        self._wide_costs = model_runner.wide_costs
        self._scheduler = scheduler
        self._adapts = speculative is not None and speculative.enable_adaptive_verification
        self._rate = FIRST_RATE
        """A running average of `ShadowDrafts.rate`."""
        has_speculator = speculative is not None and speculative.model is not None
        self._wide_tokens = FIRST_TOKENS if has_speculator else None
        """A running average of the tokens that a wide step emits; None without a speculator."""
        self._looks_up = speculative is None or speculative.enable_suffix_decoding

    @property
    def steps(self) -> int:
        """Steps of the next call of width 1."""
        rows = self._shapes.single_step_rows
        one = rows and self._scheduler.most_running <= rows
        return 1 if one else self._shapes.decode_steps

    def goes_on(self, chunk: Chunk) -> bool:
        """Say whether `chunk` ends the prompt of a sequence while there is nothing else to run, and
        has room for its last token: then one call runs both (`Shapes.first_tokens`)."""
        scheduler = self._scheduler
        others = scheduler.num_running != 1 or scheduler.waiting or scheduler.prefilling
        tokens = [scheduled for _, scheduled in chunk.scheduled_tokens()]
        ended = chunk.finished_prefill
        if not self._shapes.first_tokens or others or len(tokens) != 1 or len(ended) != 1:
            return False
        takes = ended[0].matcher is None and not any(chunk.page_copies)
        # An exact head may end later than the target.
        ends = tokens[0].stop == ended[0].request_state.prefill_target
        # The next size takes longer than the decode step that it would spare.
        return takes and ends and tokens[0].num_tokens not in self._shapes.chunks

    def choose(self, sequences: Sequence[SequenceState], one_step: bool = False) -> DecodeCall:
        """The call for these sequences: wide if one of them has drafts, and all have pages for the
        most that they can emit; `one_step` if a chunk goes on to it."""
        if one_step:
            return DecodeCall(1)
        narrow = DecodeCall(self.steps)
        if not self._shapes.widths or not any(one.has_drafts for one in sequences):
            return narrow
        rows, width = self._rows_and_width(sequences)
        wide = self._shapes.wide_call(rows)
        if self._adapts:
            tokens = 0.0
            for sequence in sequences:
                tokens += self._tokens_of_step(sequence, width) if sequence.has_drafts else 1
            if not self._pays(tokens, sequences, rows):
                return narrow
        return wide if self._scheduler.have_pages(sequences, wide.most) else narrow

    def _rows_and_width(self, sequences: Sequence[SequenceState]) -> tuple[int, int]:
        """(most of these sequences on one shard, tokens of one in a wide step)."""
        ranks = collections.Counter(one.request_state.dp_rank for one in sequences)
        rows = max(ranks.values())
        return rows, self._shapes.wide_call(rows).width

    def _tokens_of_step(self, sequence: SequenceState, width: int) -> float:
        """Tokens that a step of `width` may be expected to emit of a sequence that drafts."""
        tokens = self._shadow(sequence).tokens_of_step(width if self._looks_up else 1)
        return tokens if self._wide_tokens is None else max(tokens, self._wide_tokens)

    def _pays(self, tokens: float, sequences: Sequence[SequenceState], rows: int) -> bool:
        """Say whether a wide step that may be expected to emit `tokens` emits more than steps of
        width 1 do in its time."""
        cost = self._wide_costs[self._shapes.decode_rows.index(self._shapes.size_of(rows))]
        return tokens > MARGIN * cost * len(sequences)

    def host_drafts(self, sequences: Sequence[SequenceState]) -> tuple[int, list[HostDraft]]:
        """(the width of a call of sequences that follow a grammar, a draft for each)."""
        none = [HostDraft()] * len(sequences)
        if not self._shapes.widths:
            return 1, none
        rows, width = self._rows_and_width(sequences)
        if not self._scheduler.have_pages(sequences, width):
            return 1, none
        drafts = [self._draft(sequence, width - 1) for sequence in sequences]
        tokens = sum(draft.expected for draft in drafts)
        pays = self._pays(tokens, sequences, rows) if self._adapts else tokens > len(drafts)
        return (width, drafts) if pays else (1, none)

    def _draft(self, sequence: SequenceState, most: int) -> HostDraft:
        """Tokens that the grammar forces, and then those that the text suggests, if it may."""
        if sequence.matcher is None or not sequence.has_drafts:
            return HostDraft()
        most = min(most, sequence.num_remaining_tokens - 1)
        forced, shadow = sequence.matcher.forced()[:most], self._shadow(sequence)
        places = shadow.draft(forced, most - len(forced) if self._looks_up else 0)
        nowhere = [self._shapes.history_size] * len(forced)
        expected = len(forced) + shadow.tokens_of_step(1 + len(places))
        return HostDraft([*forced, *shadow.tokens_at(places)], [*nowhere, *places], expected)

    def _shadow(self, sequence: SequenceState) -> ShadowDrafts:
        """The shadow drafts of a sequence, which are made when they are first asked for."""
        if sequence.shadow is None:
            request, tokens = sequence.request, sequence.request_state.prefill_token_ids
            generated = [*tokens[len(request.prompt) :], *sequence.token_ids]
            text = lookup_text(request.prompt, request.prediction, generated)
            rate = max(self._rate, PREDICTED_RATE) if len(request.prediction) else self._rate
            sequence.shadow = ShadowDrafts(text, rate)
        return sequence.shadow

    def add_tokens(self, sequence: SequenceState, token: np.ndarray, width: int) -> None:
        """Add the i32[M T] that a call has returned of a sequence."""
        if (shadow := sequence.shadow) is None:
            return
        for step in token.reshape(-1, width).tolist():
            if emitted := [one for one in step if one >= 0]:
                shadow.add(emitted, width)
                self._rate += AVERAGE_WEIGHT * (shadow.rate - self._rate)
                if self._wide_tokens is None or sequence.matcher is not None:
                    continue  # a grammar's steps tell nothing of a speculator
                if width > 1:
                    self._wide_tokens += AVERAGE_WEIGHT * (len(emitted) - self._wide_tokens)
                else:
                    self._wide_tokens += FORGETTING * (FIRST_TOKENS - self._wide_tokens)


@dataclasses.dataclass
class DraftStats:
    """Counters of drafts."""

    verify_calls: int = 0
    """Decode calls with room for drafts, also those that had none."""
    drafts: int = 0
    """Steps of a sequence with a draft or more."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = dataclasses.field(
        default_factory=lambda: [0] * MAX_SPECULATIVE_TOKENS
    )
    """Accepted drafts by their place in a step."""

    def add(self, sampled: SamplerOutput, width: int, sequences: Sequence[SequenceState]) -> None:
        """Count the drafts of a call that has returned `sampled`, those of each sequence too."""
        source = sampled.draft_source
        drafted = source >= 0
        accepted = drafted & (sampled.token != REJECTED)
        places = np.array([one.predicted_places for one in sequences])
        predicted = (places[:, :1] <= source) & (source < places[:, 1:])
        with_drafts = drafted.reshape(len(source), -1, width).any(axis=2)
        counts = with_drafts, drafted, accepted, predicted, predicted & accepted
        rows = np.stack([one.sum(axis=1) for one in counts], axis=1).tolist()
        for sequence, row in zip(sequences, rows, strict=True):
            sequence.drafts = sequence.drafts.plus(Drafts(*row))
        self.verify_calls += 1
        self.drafts += int(with_drafts.sum())
        self.draft_tokens += int(drafted.sum())
        self.accepted_tokens += int(accepted.sum())
        lengths = accepted.reshape(-1, width).sum(axis=1)
        for place in range(width - 1):
            self.accepted_per_position[place] += int((lengths > place).sum())

    def copy(self) -> DraftStats:
        return dataclasses.replace(self, accepted_per_position=[*self.accepted_per_position])
