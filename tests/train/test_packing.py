"""Packing and batching: nothing lost, nothing leaking, and batch i always the same."""

import numpy as np
import pytest

from swiftkv_jax.errors import DataError
from swiftkv_jax.train.loader import batches, first_batches
from swiftkv_jax.train.packing import pack
from swiftkv_jax.train.sources import Example


def example(*tokens, targets=None):
    mask = np.ones(len(tokens), bool) if targets is None else np.array(targets, bool)
    return Example(np.array(tokens, np.int32), mask)


def test_picture():
    rows = pack([example(5, 6, 7), example(8, 9)], 6)
    assert rows.tokens.tolist() == [[5, 6, 7, 8, 9, 0]]
    assert rows.segment_ids.tolist() == [[1, 1, 1, 2, 2, 0]]
    assert rows.positions.tolist() == [[0, 1, 2, 0, 1, 0]]
    assert rows.loss_mask.tolist() == [[1, 1, 0, 1, 0, 0]]


def test_mask_is_shifted_to_the_predicting_position():
    rows = pack([example(1, 2, 3, 4, targets=[0, 0, 1, 1])], 4)
    assert rows.loss_mask.tolist() == [[0, 1, 1, 0]]


def test_best_fit_takes_the_fullest_row_that_has_room():
    rows = pack([example(*range(4)), example(*range(5)), example(7, 7)], 7)
    assert rows.segment_ids.tolist() == [[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 2, 2]]


def test_every_token_is_kept_once():
    random = np.random.default_rng(0)
    examples = [example(*random.integers(1, 1000, size)) for size in random.integers(1, 40, 200)]
    rows = pack(examples, 16)
    packed = sorted(rows.tokens[rows.segment_ids > 0].tolist())
    assert packed == sorted(np.concatenate([e.tokens for e in examples]).tolist())
    assert rows.num_tokens == sum(len(e.tokens) for e in examples)
    for tokens, segments, positions in zip(rows.tokens, rows.segment_ids, rows.positions, strict=True):
        for segment in range(1, segments.max() + 1):
            assert positions[segments == segment].tolist() == list(range((segments == segment).sum()))
        assert (tokens[segments == 0] == 0).all()


@pytest.mark.parametrize("examples", [[], [example(1)], [example(1, 2, targets=[1, 0])]])
def test_nothing_to_predict(examples):
    with pytest.raises(DataError, match="no token to predict"):
        pack(examples, 4)


def test_batches_depend_on_their_index_only():
    rows = pack([example(*range(i, i + 6)) for i in range(20)], 6)
    whole = [batch.tokens.tolist() for batch in batches(rows, 3, seed=1, stop=15)]
    resumed = [batch.tokens.tolist() for batch in batches(rows, 3, seed=1, start=9, stop=15)]
    assert whole[9:] == resumed
    assert whole != [batch.tokens.tolist() for batch in batches(rows, 3, seed=2, stop=15)]
    first_epoch = sorted(row[0] for batch in whole[:6] for row in batch)
    assert len(set(first_epoch)) == len(first_epoch), "a row came twice before every row came once"


def test_first_batches_visit_each_row_once_and_pad_with_empty_rows():
    rows = pack([example(*range(i, i + 6)) for i in range(5)], 6)
    whole = list(first_batches(rows, 2, limit=10))
    assert [batch.tokens[:, 0].tolist() for batch in whole] == [[0, 1], [2, 3], [4, 0]]
    assert whole[2].loss_mask[1].sum() == 0 and whole[2].segment_ids[1].sum() == 0
    assert len(list(first_batches(rows, 2, limit=2))) == 2
