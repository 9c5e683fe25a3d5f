"""Loading: batch i is always the same, weights are kept, and a process reads its own rows only."""

import json
import math

import numpy as np
import pytest

from swiftkv_jax.errors import DataError
from swiftkv_jax.train.data.loader import DatasetMixture, batches, choose, first_batches
from swiftkv_jax.train.data.prepare import Preparation
from swiftkv_jax.train.data.sources import DataSource

LENGTH = 8


def make_dataset(folder, tokenizer, name, rows, length=LENGTH):
    """`rows` documents that fill a row each."""
    file = folder / name
    file.write_text("".join(json.dumps({"text": f"{i:0{length - 1}}"}) + "\n" for i in range(rows)))
    number = len(list(folder.glob("dataset*")))
    made = Preparation(DataSource(str(file)), tokenizer, length)
    return made.build(folder / f"dataset{number}")


@pytest.fixture(scope="module")
def datasets(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("datasets")
    return [
        make_dataset(folder, tokenizer, name, rows)
        for name, rows in [("a.jsonl", 20), ("b.jsonl", 7)]
    ]


@pytest.fixture(scope="module")
def mixture(datasets):
    return DatasetMixture(tuple(datasets), (0.7, 0.3))


def read(rows, batch_size, *, positions=None, seed=1, start=0, stop):
    positions = range(batch_size) if positions is None else positions
    return list(batches(rows, batch_size, positions=positions, seed=seed, start=start, stop=stop))


def ids(found):
    return [batch.row_ids for batch in found]


def test_row_ids_name_the_rows(mixture, tokenizer):
    (found,) = read(mixture, 6, stop=1)
    assert (
        found.batch.tokens.shape == (6, LENGTH)
        and found.batch.tokens.dtype == np.int32
        and found.batch.loss_mask.dtype == np.float32
    )
    for tokens, row_id in zip(found.batch.tokens, found.row_ids, strict=True):
        source, number = row_id.split("#")
        dataset = mixture.datasets[["a.jsonl", "b.jsonl"].index(source)]
        assert tokens.tolist() == dataset[int(number)].tokens.tolist()


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_read_their_part_of_the_same_batch(mixture, processes):
    whole = read(mixture, 8, stop=5)
    share = 8 // processes
    parts = [read(mixture, 8, positions=range(at, at + share), stop=5) for at in range(0, 8, share)]
    for number, batch in enumerate(whole):
        assert sum((part[number].row_ids for part in parts), []) == batch.row_ids
        for name in ("tokens", "positions", "segment_ids", "loss_mask"):
            joined = np.concatenate([getattr(part[number].batch, name) for part in parts])
            assert np.array_equal(joined, getattr(batch.batch, name))


def test_the_loss_mask_is_chosen(mixture):
    """Every token of these documents is a target: unshifted, the last one counts too."""
    options = {"positions": range(4), "seed": 1, "stop": 1}
    masks = {
        kind: next(batches(mixture, 4, loss_mask=kind, **options)).batch.loss_mask
        for kind in ("shifted", "unshifted")
    }
    assert masks["unshifted"].all()
    assert masks["shifted"][:, :-1].all() and not masks["shifted"][:, -1].any()


@pytest.mark.parametrize("tail", [None, 0, 2])
def test_rows_mark_the_tokens_that_keep_their_own_keys_and_values(mixture, tail):
    rows = {f"{data.name}#{i}": data[i] for data in mixture.datasets for i in range(len(data))}
    options = {"positions": range(4), "own_tail": tail}
    for found in (
        next(batches(mixture, 4, seed=1, stop=1, **options)),
        next(first_batches(mixture, 4, limit=1, **options)),
    ):
        expected = [rows[row_id].fields(LENGTH, own_tail=tail) for row_id in found.row_ids]
        assert (found.batch.own is None) == (tail is None)
        for name in expected[0]:
            assert np.array_equal(getattr(found.batch, name), [row[name] for row in expected])


def test_resuming_and_rebuilding_change_nothing(tmp_path, tokenizer, mixture):
    whole = ids(read(mixture, 4, stop=30))
    assert ids(read(mixture, 4, start=11, stop=30)) == whole[11:]
    rebuilt = DatasetMixture(
        tuple(
            make_dataset(tmp_path, tokenizer, name, rows)
            for name, rows in [("a.jsonl", 20), ("b.jsonl", 7)]
        ),
        (0.7, 0.3),
    )
    assert ids(read(rebuilt, 4, stop=30)) == whole and rebuilt.fingerprint == mixture.fingerprint
    assert ids(read(mixture, 4, seed=2, stop=30)) != whole


def test_one_source_is_seen_once_in_an_epoch(datasets):
    rows = DatasetMixture((datasets[0],), (None,))
    assert rows.num_rows == 20 and rows.num_tokens == 160
    seen = [row_id for batch in read(rows, 5, stop=12) for row_id in batch.row_ids]
    rounds = [seen[:20], seen[20:40], seen[40:]]
    assert all(sorted(epoch) == sorted(f"a.jsonl#{row}" for row in range(20)) for epoch in rounds)
    assert rounds[0] != rounds[1] != rounds[2], "every epoch has its own order"
    assert DatasetMixture((datasets[0],), (0.2,)).fingerprint == rows.fingerprint


def test_without_weights_every_row_counts_alike(datasets):
    rows = DatasetMixture(tuple(datasets), (None, None))
    assert rows.num_rows == 27 and rows.proportions == (20, 7)
    seen = [row_id for batch in read(rows, 27, stop=2) for row_id in batch.row_ids]
    assert len(set(seen[:27])) == len(set(seen[27:])) == 27


def test_weights_are_kept_everywhere_and_define_the_epoch(mixture, datasets):
    assert mixture.proportions == (7, 3) and mixture.num_rows == math.ceil(20 / 0.7)
    seen = [row_id[0] for batch in read(mixture, 10, stop=30) for row_id in batch.row_ids]
    for start in range(0, 300, 7):
        for stop in range(start, 301, 13):
            assert abs(seen[start:stop].count("a") - 0.7 * (stop - start)) <= 1
    fingerprints = {
        DatasetMixture(tuple(datasets), weights).fingerprint
        for weights in [(0.7, 0.3), (7.0, 3.0), (0.3, 0.7), (1.0, 1.0), (2.0, 2.0), (None, 1.0)]
    }
    assert len(fingerprints) == 3


@pytest.mark.parametrize(
    "proportions", [(1,), (1, 1, 1), (999, 1), (1, 999), (123457, 7, 40000, 3)]
)
def test_pick_shares_out_every_row(proportions):
    """Rows of a source come in order without a gap, and no source is ever two rows from its
    share."""
    taken, total = [0] * len(proportions), sum(proportions)
    for index in range(3000):
        source, before = choose(index, proportions)
        assert before == taken[source]
        taken[source] += 1
        assert all(
            abs(count - (index + 1) * part / total) < 2
            for count, part in zip(taken, proportions, strict=True)
        )
    assert choose(total * 10**12, proportions)[1] == proportions[choose(0, proportions)[0]] * 10**12


def test_first_batches_visit_each_row_once_and_pad_with_empty_rows(mixture):
    found = list(first_batches(mixture, 5, positions=range(5), limit=100))
    seen = [row_id for batch in found for row_id in batch.row_ids]
    assert (
        seen
        == [f"a.jsonl#{row}" for row in range(20)]
        + [f"b.jsonl#{row}" for row in range(7)]
        + [""] * 3
    )
    assert found[-1].batch.tokens.shape == (5, LENGTH)
    assert (
        found[-1].batch.loss_mask[2:].sum() == 0
        and found[-1].batch.segment_ids[2:].sum() == 0
        and found[-1].batch.loss_mask[1].sum()
    )
    assert len(list(first_batches(mixture, 5, positions=range(5), limit=2))) == 2
    split = [
        list(first_batches(mixture, 5, positions=part, limit=100))
        for part in (range(2), range(2, 5))
    ]
    assert [a.row_ids + b.row_ids for a, b in zip(*split, strict=True)] == ids(found)


def test_lengths_must_agree(tmp_path, tokenizer, datasets):
    other = make_dataset(tmp_path, tokenizer, "c.jsonl", 3, length=9)
    with pytest.raises(DataError, match="different `max_length` cannot be mixed .*: 8, .*: 9"):
        DatasetMixture((datasets[0], other), (1.0, 1.0))


def test_damage_found_while_training_is_a_data_error(tmp_path, tokenizer):
    dataset = make_dataset(tmp_path, tokenizer, "c.jsonl", 3)
    content = bytearray((dataset.path / "rows.arrayrecord").read_bytes())
    content[200] ^= 1
    (dataset.path / "rows.arrayrecord").write_bytes(content)
    with pytest.raises(DataError, match="rows.arrayrecord: damaged .row "):
        read(DatasetMixture((dataset,), (1.0,)), 3, stop=5)
