"""Packing: no token is lost, no document mixed with another, none predicts the next."""

import numpy as np
import pytest

from swiftkv_jax.train.data.packing import EMPTY_ROW, PackedRow, pack
from swiftkv_jax.train.data.tokenize import Example


def example(*tokens, targets=None):
    mask = np.ones(len(tokens), bool) if targets is None else np.array(targets, bool)
    return Example("o", np.array(tokens, np.int32), mask)


def fields(examples, length):
    rows = [row.fields(length) for row in pack(examples, length)]
    return {name: [row[name].tolist() for row in rows] for name in rows[0]}


def test_picture():
    rows = fields([example(5, 6, 7), example(8, 9)], 6)
    assert rows["tokens"] == [[5, 6, 7, 8, 9, 0]]
    assert rows["segment_ids"] == [[1, 1, 1, 2, 2, 0]]
    assert rows["positions"] == [[0, 1, 2, 0, 1, 0]]
    assert rows["loss_mask"] == [[1, 1, 0, 1, 0, 0]]


def test_mask_is_shifted_to_the_predicting_position():
    assert fields([example(1, 2, 3, 4, targets=[0, 0, 1, 1])], 4)["loss_mask"] == [[0, 1, 1, 0]]
    assert fields([example(1, 2, targets=[0, 1]), example(3, 4, targets=[1, 0])], 4)[
        "loss_mask"
    ] == [[1, 0, 0, 0]]


def test_an_unshifted_mask_is_the_targets():
    """As in the authors' trainer: the position of a target counts, padding does not."""
    (row,) = pack([example(1, 2, 3, targets=[0, 1, 1]), example(4, 5, targets=[0, 1])], 6)
    assert row.fields(6, "unshifted")["loss_mask"].tolist() == [0, 1, 1, 0, 1, 0]
    assert row.fields(6)["loss_mask"].tolist() == [1, 1, 0, 1, 0, 0]


def test_best_fit_takes_the_fullest_row_that_has_room():
    rows = fields([example(*range(4)), example(*range(5)), example(7, 7)], 7)
    assert rows["segment_ids"] == [[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 2, 2]]


def test_an_empty_row_is_padding():
    assert {name: field.tolist() for name, field in EMPTY_ROW.fields(2).items()} == dict.fromkeys(
        ["tokens", "positions", "segment_ids", "loss_mask"], [0, 0]
    )


@pytest.mark.parametrize("window_tokens", [1, 300, 10**9])
def test_every_token_is_kept_once_with_its_document(window_tokens):
    """Tokens carry their document and place, so a segment shows whether it is a piece of one
    document."""
    random = np.random.default_rng(0)
    sizes = random.integers(1, 40, 200)
    examples = [
        Example("o", document * 100 + np.arange(size, dtype=np.int32), random.random(size) < 0.5)
        for document, size in enumerate(sizes)
    ]
    rows = list(pack(examples, 16, window_tokens))
    assert sorted(np.concatenate([row.tokens for row in rows])) == sorted(
        np.concatenate([e.tokens for e in examples])
    )
    for row in rows:
        assert row.lengths.sum() == len(row.tokens) == len(row.is_target) <= 16
        found = row.fields(16)
        assert all(field.shape == (16,) for field in found.values())
        for segment in range(1, len(row.lengths) + 1):
            inside = found["segment_ids"] == segment
            tokens, document = found["tokens"][inside], found["tokens"][inside][0] // 100
            assert (np.diff(tokens) == 1).all() and (tokens // 100 == document).all()
            assert found["positions"][inside].tolist() == list(range(len(tokens)))
            expected = np.append(examples[document].is_target[tokens[1:] % 100], False)
            assert found["loss_mask"][inside].tolist() == expected.tolist()


def test_windows_bound_memory_and_keep_the_order_of_windows():
    """A row is out before the next window is read."""
    read = []

    def examples():
        for number in range(6):
            read.append(number)
            yield example(*[number] * 3)

    rows = pack(examples(), 4, window_tokens=6)
    assert next(rows).tokens.tolist() == [0, 0, 0] and read == [0, 1]
    assert [int(row.tokens[0]) for row in rows] == [1, 2, 3, 4, 5]


# Tokens that keep upper keys and values of their own ---------------------------


def test_answers_are_own_and_the_end_of_each_prompt():
    """Two documents: a chat of two answers, and a completion."""
    target = [0, 0, 0, 1, 1, 0, 0, 0, 1, 0, 0, 1, 1]
    row = PackedRow(np.arange(13, dtype=np.int32), np.array(target, bool), np.array([9, 4]))
    own, served = row.own(0)
    np.testing.assert_array_equal(own, np.array(target, bool))
    assert served.all()
    own, _ = row.own(2)
    np.testing.assert_array_equal(own, [0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1])
    own, _ = row.own(100)
    assert own.all(), "no tail reaches into the document before"
    fields = row.fields(15, own_tail=2)
    assert fields["own"].dtype == bool and not fields["own"][13:].any()
    np.testing.assert_array_equal(fields["loss_mask"], row.fields(15)["loss_mask"])


def test_text_is_cut_where_its_tokens_say():
    """What follows the cut is own, and only predictions from the prompt's last token on count."""
    rng = np.random.default_rng(0)
    cuts = set()
    for _ in range(50):
        tokens = rng.integers(0, 99, 20).astype(np.int32)
        row = PackedRow(tokens, np.ones(20, bool), np.array([20]))
        own, _ = row.own(0)
        cut = int(np.argmax(own))
        assert 1 <= cut < 20 and own[cut:].all() and not own[:cut].any()
        fields = row.fields(20, own_tail=3)
        assert int(np.argmax(fields["own"])) == max(cut - 3, 0)
        np.testing.assert_array_equal(
            fields["loss_mask"], np.r_[np.zeros(cut - 1), np.ones(20 - cut), 0]
        )
        again, _ = PackedRow(tokens.copy(), np.ones(20, bool), np.array([20])).own(0)
        np.testing.assert_array_equal(own, again)
        cuts.add(cut)
    assert len(cuts) > 10
    one, _ = PackedRow(np.ones(1, np.int32), np.ones(1, bool), np.array([1])).own(0)
    assert one.all(), "a document of one token has no place to cut"


def test_joined_padding_continues_the_last_document():
    row = PackedRow(np.arange(1, 6, dtype=np.int32), np.ones(5, bool), np.array([3, 2]))
    fields = row.fields(8, "unshifted", "joined")
    assert fields["segment_ids"].tolist() == [1, 1, 1, 2, 2, 2, 2, 2]
    assert fields["positions"].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert fields["loss_mask"].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
