"""The rows that are measured and those for calibration: no token in both."""

import numpy as np
import pytest

from swiftkv_jax.errors import DataError, UsageError
from swiftkv_jax.train.data.excerpts import read_excerpts
from swiftkv_jax.train.data.prepare import Preparation
from swiftkv_jax.train.data.sources import DataSource


def words(start: int, count: int) -> str:
    return " ".join(f"w{number}" for number in range(start, start + count))


@pytest.fixture
def documents(tmp_path) -> list[list[int]]:
    """Six files of different words, the third shorter than a row."""
    for number in range(6):
        count = 3 if number == 2 else 40
        (tmp_path / f"{number}.txt").write_text(words(100 * number, count))
    return sorted(tmp_path.iterdir())


def tokens_of(tokenizer, file) -> list[int]:
    return [*tokenizer(file.read_text())["input_ids"], tokenizer.eos_token_id]


def segments(rows) -> list[list[int]]:
    found = []
    for row in rows:
        found += [part.tolist() for part in np.split(row.tokens, np.cumsum(row.lengths)[:-1])]
    return found


def read(documents, tokenizer, rows, calibration_tokens, length=16):
    text = str(documents[0].parent)
    return read_excerpts((text,), tokenizer, length, rows, calibration_tokens)


def test_beginnings_of_the_first_documents_and_of_the_following_ones(documents, tokenizer):
    found = read(documents, tokenizer, 2, 40)
    whole = [tokens_of(tokenizer, file) for file in documents]
    assert sorted(segments(found.measured)) == sorted([whole[0][:16], whole[1][:16]])
    expected = [whole[2][:16], whole[3][:16], whole[4][: 40 - 16 - len(whole[2][:16])]]
    assert sorted(segments(found.calibration)) == sorted(expected)
    assert sum(len(row.tokens) for row in found.calibration) == 40


def test_then_what_follows_in_them_and_last_in_those_that_are_measured(documents, tokenizer):
    whole = [tokens_of(tokenizer, file) for file in documents]
    others = sum(map(len, whole[2:]))
    found = read(documents, tokenizer, 2, others + 20)
    of_measured = sorted(segments(found.calibration))
    for document in whole[2:]:
        for at in range(0, len(document), 16):
            of_measured.remove(document[at : at + 16])
    assert of_measured == sorted([whole[0][16:32], whole[0][32:36]])


@pytest.mark.parametrize("rows", [3, 10**6])
def test_no_token_is_in_both_and_none_is_left_out(rows, documents, tokenizer):
    found = read(documents, tokenizer, rows, 10**6)
    used = [token for part in found for row in part for token in row.tokens.tolist()]
    whole = [token for file in documents for token in tokens_of(tokenizer, file)]
    assert sorted(used) == sorted(whole)


def test_documents_of_a_prepared_dataset(documents, tokenizer, tmp_path):
    """As they were cut: nothing else in its folder is read."""
    whole = [tokens_of(tokenizer, file) for file in documents]
    source = DataSource(str(documents[0].parent))
    Preparation(source, tokenizer, 512).build(store := tmp_path / "store")
    found = read_excerpts((str(store),), tokenizer, 16, 2, 10**6)
    used = [token for part in found for row in part for token in row.tokens.tolist()]
    assert sorted(used) == sorted(token for document in whole for token in document)
    starts = [document[:16] for document in whole]
    assert all(segment in starts for segment in segments(found.measured))


def test_none_for_calibration(documents, tokenizer):
    assert read(documents, tokenizer, 2, 0).calibration == []


def test_errors(documents, tokenizer, tmp_path):
    with pytest.raises(UsageError, match="no tokenizer"):
        read(documents, None, 2, 0)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").write_text("")
    with pytest.raises(DataError, match="no token to predict"):
        read_excerpts((str(tmp_path / "empty"),), tokenizer, 16, 2, 10)
