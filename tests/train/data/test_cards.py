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
DIR = "{config_name: y, data_dir: other}]"


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
        (" [{data_dir: other}]", FILES[3:], FILES[3:]),
        (" [{config_name: x, data_dir: ./other/, data_files: 'a*'}]", FILES[3:4], FILES[3:4]),
        (" [{config_name: x, data_dir: main}, {data_dir: other}]", FILES[3:], FILES[3:]),
        (" [{config_name: x, data_dir: main, default: true}, " + DIR, FILES[:3], FILES[:3]),
        (" [{data_dir: main, data_files: {train: a-*, test: b*}}]", FILES[:2], FILES[2:3]),
        (" [{data_dir: .}]", FILES, FILES),
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
        (
            " [{config_name: x, data_dir: main}, " + DIR,
            "its configurations are x, y, none .*: name the files of one, .*/main or .*/other$",
        ),
        (
            MAIN + "- " + DIR.rstrip("]"),
            r"its configurations are main, y, none .*/main/a-\* or .*/other$",
        ),
        (" [{data_dir: nowhere}]", "nothing to read in it"),
        (" [{data_files: [{split: test, path: main/*}]}]", "its splits are test, none of which"),
        (" [{data_files: nowhere/*}]", "nothing to read in it"),
        (" [", "README.md: its metadata are not valid YAML; name the files"),
    ],
)
def test_cards_that_are_not_clear(tmp_path, configs, message):
    write_card(tmp_path, configs)
    with pytest.raises(DataError, match=message):
        found(tmp_path)


def test_splits_of_a_declared_folder(tmp_path):
    make(tmp_path, ["en/train.jsonl", "en/test.jsonl", "fr/train.jsonl", "en/notes.txt"])
    (tmp_path / "README.md").write_text("---\nconfigs:\n- data_dir: en\n---\n")
    assert found(tmp_path) == ["en/train.jsonl"]
    assert found(tmp_path, held_out=True) == ["en/test.jsonl"]


def test_a_refusal_names_folders_that_are_read(tmp_path):
    write_card(tmp_path, " [{config_name: x, data_dir: main}, " + DIR)
    assert found(tmp_path, path=tmp_path / "other") == FILES[3:]
