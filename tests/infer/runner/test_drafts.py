"""Drafts that a program looks up are those of the rule, place by place: other ones would not change
a token."""

import dataclasses
import itertools
import random

import jax
import numpy as np

from swiftkv_jax.infer.engine.shadow_drafts import lookup_text
from swiftkv_jax.infer.runner import drafts
from swiftkv_jax.infer.runner.decode_state import empty_batch
from swiftkv_jax.model.speculator import Speculator, draft_tokens, speculator_shapes
from swiftkv_jax.model.speculator_config import SpeculatorConfig
from tests.infer.mock_model_runner import mock_engine

DRAFTING = drafts.Drafting(width=6, shortest=2, longest=4)
ROWS, SIZE = 256, 80


def expected(text: list[int], remaining: int, own: int = 0) -> list[int]:
    """Places of the drafts: those after the longest match of the end, of equal ones the last; where
    there is none, of what is before the last token. With a speculator of `own` drafts, `SIZE` for
    each of them where the match has fewer tokens."""

    def longest_match(first: int) -> tuple[int, int]:
        def length(place: int) -> int:
            ends = text[: place + 1][::-1][first:], text[::-1][first:]
            pairs = itertools.islice(zip(*ends, strict=False), DRAFTING.longest)
            return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

        return max(((length(place), place) for place in range(end)), default=(0, 0))

    end = len(text) - 1
    match, place = longest_match(0)
    if match < DRAFTING.shortest:
        match, place = longest_match(1)
        if match <= DRAFTING.shortest:
            match = 0
    if match < own:
        return [SIZE] * min(own, remaining - 1)
    count = min(DRAFTING.width - 1, 2 * match, remaining - 1)
    return [place + 1 + number % (end - place) for number in range(count)]


def random_speculator(seed: int) -> Speculator:
    """A speculator of 9 tokens."""
    config = SpeculatorConfig("sum_lstm", n_predict=3, vocab_size=9, hidden_dim=8, inner_dim=8)
    rng = np.random.default_rng(seed)
    shapes = speculator_shapes(config, np.float32)
    return jax.tree.map(lambda leaf: np.float32(rng.normal(size=leaf.shape)), shapes)


def test_drafts_follow_the_last_of_the_longest_matches():
    rng = random.Random(5)
    _, runner = mock_engine(width=DRAFTING.width)
    names = "token", "length", "remaining", "history_offset"
    numbers = {name: np.zeros(ROWS, np.int32) for name in names}
    batch = dataclasses.replace(empty_batch(ROWS, runner.shapes), **numbers)
    history = np.zeros((ROWS, SIZE), np.int32)
    places, own_places, texts = [], [], []
    speculator = random_speculator(rng.randrange(100))
    hidden = np.random.default_rng(5).normal(size=(ROWS, speculator.config.hidden_dim))
    hidden = hidden.astype(np.float32)
    hidden[::3] = 0  # before the first decode step
    for row in range(ROWS):
        few = range(rng.choice([1, 2, 3, 9]))
        prompt, prediction, generated = (
            rng.choices(few, k=length)
            for length in (rng.randint(1, 20), rng.choice([0, rng.randint(1, 20)]), row % 20)
        )
        text = [*itertools.chain(*lookup_text(prompt, prediction, generated))]
        history[row], offset = drafts.history_of(prompt, prediction, generated, SIZE)
        history[row, len(text) :] = rng.choices(few, k=SIZE - len(text))  # is not looked at
        batch.length[row] = len(prompt) + len(generated) - 1
        batch.token[row] = text[-1]
        batch.history_offset[row] = offset if (drafting := rng.random() < 0.9) else -1
        batch.remaining[row] = rng.choice([1, 3, 40])
        left, own = int(batch.remaining[row]), 3 if row % 3 else 0
        places.append(expected(text, left) if drafting else [])
        own_places.append(expected(text, left, own) if drafting else [])
        texts.append(text)
    assert {len(one) for one in places} == {0, 2, 4, 5}
    assert sum(SIZE in one for one in own_places) > 40
    program = jax.jit(drafts.draft, static_argnums=2)
    check(program(history, batch, DRAFTING), places, texts)
    batch = dataclasses.replace(batch, hidden=hidden)
    own_drafts = jax.jit(draft_tokens, static_argnums=3)(speculator, hidden, batch.token, 3)
    block = program(history, batch, DRAFTING, speculator)
    check(block, own_places, texts, own_drafts.tolist())


def check(block, places, texts, own_drafts=None) -> None:
    for row, (source, text) in enumerate(zip(places, texts, strict=True)):
        columns = slice(DRAFTING.width - len(source), None)
        assert block.source[row].tolist() == [-1] * (DRAFTING.width - len(source)) + source, text
        wanted = [text[place] for place in source if place < SIZE]
        if own_drafts is not None:
            wanted = wanted or own_drafts[row][: len(source)]
        assert block.tokens[row, columns].tolist() == wanted
        assert not source or block.tokens[row, -1 - len(source)] == text[-1]
