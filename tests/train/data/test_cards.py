"""Cards of the Hub declare the files of splits."""

import pytest

from swiftkv_jax.errors import DataError
from tests.train.data.test_folders import found, make

FILES = ["main/a-1.jsonl", "main/a-2.jsonl", "main/b.jsonl", "other/a-1.jsonl", "other/b.jsonl"]
MAIN = """
- config_name: main
  data_files:
  - split: train
    path: main/a-*
  - split: test
    path: main/b.jsonl
"""
OTHER = """
- config_name: other
  data_files:
  - split: train
    path: [other/a-1.jsonl, other/b.jsonl]
"""


def write_card(folder, configs):
    make(folder, [*FILES, "main/table.csv"])
    (folder / "README.md").write_text(f"---\nlicense: mit\nconfigs:{configs}\n---\n# Card\n")


@pytest.mark.parametrize(
    ("configs", "train", "measured"),
    [
        (MAIN, FILES[:2], FILES[2:3]),
        (OTHER, FILES[3:], FILES[3:]),
        (MAIN + "  default: true" + OTHER, FILES[:2], FILES[2:3]),
        (MAIN + OTHER.replace("other\n", "default\n", 1), FILES[3:], FILES[3:]),
        (" [{data_files: '*/b.jsonl'}]", [FILES[2], FILES[4]], [FILES[2], FILES[4]]),
        (" [{data_files: [main/b.jsonl, other/b.jsonl]}]", [FILES[2], FILES[4]], None),
        (" [{data_files: {train: main/b.jsonl, dev: [other/*]}}]", [FILES[2]], FILES[3:]),
        (" [{data_files: ['main/b*', 'main/*.csv']}]", FILES[2:3], FILES[2:3]),
        (" [{config_name: main}]", FILES, FILES),
        (" []", FILES, FILES),
    ],
)
def test_declared_files_are_read(tmp_path, configs, train, measured):
    write_card(tmp_path, configs)
    assert found(tmp_path) == train
    assert found(tmp_path, held_out=True) == (train if measured is None else measured)


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        (
            MAIN + OTHER,
            r"its configurations are main, other, none .*/main/a-\* or .*/other/a-1.jsonl",
        ),
        (" [{data_files: [{split: test, path: main/*}]}]", "its splits are test, none of which"),
        (" [{data_files: nowhere/*}]", "nothing to read in it"),
        (" [", "README.md: its metadata are not valid YAML; name the files"),
    ],
)
def test_cards_that_are_not_clear(tmp_path, configs, message):
    write_card(tmp_path, configs)
    with pytest.raises(DataError, match=message):
        found(tmp_path)
