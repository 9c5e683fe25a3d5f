"""Reasoning before a grammar, as the masks allow it."""

import numpy as np

from swiftkv_jax.infer.engine.grammar import fill_rows, mask_words
from swiftkv_jax.infer.structured.reasoning_grammar import ReasoningGrammar

VOCAB, EOS, BEGIN, END, X, Y = 70, 0, 68, 69, 5, 6
SPELLED = {BEGIN: b"<think>", END: b"</think>", X: b"x", Y: b"</", 7: b"think", 8: b">", 9: b">x"}


class OnlyX:
    """A grammar of one X."""

    def __init__(self):
        self.given, self.error = [], ""

    @staticmethod
    def fill_masks(matchers, masks):
        masks[:] = 0
        for mask in masks:
            mask[0] = 1 << X

    def accept(self, token_id):
        self.given.append(token_id)

    def copy(self):
        made = OnlyX()
        made.given = [*self.given]
        return made

    def forced(self):
        return [X]

    @property
    def is_ended(self):
        return bool(self.given)


def matcher(begin_token=None) -> ReasoningGrammar:
    return ReasoningGrammar(
        OnlyX(),
        VOCAB,
        end_tag=b"</think>",
        spelling_of=lambda token: SPELLED.get(token, b"?"),
        begin_token=begin_token,
        end_token_ids=[EOS],
    )


def allowed(*matchers) -> list[set[int]]:
    masks = np.zeros((len(matchers), mask_words(VOCAB)), np.uint32)
    fill_rows(dict(enumerate(matchers)), masks)
    return [{t for t in range(96) if mask[t // 32] >> (t % 32) & 1} for mask in masks]


FREE = set(range(VOCAB)) - {EOS}


def test_reasoning_is_free_but_has_to_end():
    inside, before = matcher(), matcher(BEGIN)
    after = matcher()
    after.accept(END)
    assert allowed(inside, before, after) == [FREE, {X, BEGIN}, {X}]
    before.accept(BEGIN)
    assert allowed(before) == [FREE] and not before.is_ended
    for token in (X, BEGIN, END, X):
        before.accept(token)
    assert before.is_ended and not before.error
    assert isinstance(before.grammar, OnlyX) and before.grammar.given == [X]


def test_the_grammar_may_begin_at_once():
    found = matcher(BEGIN)
    copy = found.copy()
    found.accept(X)
    assert found.is_ended and not copy.is_ended and allowed(copy) == [{X, BEGIN}]


def test_the_tag_may_be_spelled_in_other_tokens():
    found = matcher()
    for token in (Y, 7, X, Y, 7):
        found.accept(token)
    copy = found.copy()
    found.accept(8)
    assert allowed(found) == [{X}] and not found.error
    copy.accept(9)
    assert "within a token" in copy.error
