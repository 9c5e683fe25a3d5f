"""Folders: no card is read, and one split."""

import json

import pytest

from swiftkv_jax.errors import DataError, UsageError
from swiftkv_jax.train.data.sources import DataSource, find_files, parse_source

HUB = "---\nconfigs: []\n---\n# A card\n"


def make(folder, names):
    """Files of one row each; those that are no rows hold a text."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"text": name}))


def found(folder, *, held_out=False, path=None):
    files = find_files(DataSource(str(path or folder)), held_out=held_out)
    return [file.relative_to(folder).as_posix() for file in files]


SHARDS = ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"]
TEST = "data/test-00000-of-00001.jsonl"


@pytest.mark.parametrize(
    ("names", "train", "measured"),
    [
        ([*SHARDS, TEST], SHARDS, [TEST]),
        (SHARDS, SHARDS, SHARDS),
        (["train.jsonl", "validation.jsonl", "test.jsonl"], ["train.jsonl"], ["validation.jsonl"]),
        (["my_train_file_00.jsonl", "dev.jsonl"], ["my_train_file_00.jsonl"], ["dev.jsonl"]),
        (
            ["train/a.jsonl", "train/b.jsonl", "test/a.jsonl"],
            ["train/a.jsonl", "train/b.jsonl"],
            ["test/a.jsonl"],
        ),
        (
            ["data/train/a.jsonl", "data/eval/a.jsonl"],
            ["data/train/a.jsonl"],
            ["data/eval/a.jsonl"],
        ),
        (["training/a.jsonl", "val/train.jsonl"], ["training/a.jsonl"], ["val/train.jsonl"]),
        (["x.train.jsonl", "x.valid.jsonl", "other.jsonl"], ["x.train.jsonl"], ["x.valid.jsonl"]),
        # One split of several names.
        (
            ["data/train_sft-00000-of-00001.jsonl", "data/test_sft-00000-of-00001.jsonl"],
            ["data/train_sft-00000-of-00001.jsonl"],
            ["data/test_sft-00000-of-00001.jsonl"],
        ),
        (["Train.jsonl", "Test.jsonl"], ["Train.jsonl"], ["Test.jsonl"]),
        (["TRAIN-1.JSONL", "my_VAL.jsonl"], ["TRAIN-1.JSONL"], ["my_VAL.jsonl"]),
        (["Training/a.jsonl", "Dev/a.jsonl"], ["Training/a.jsonl"], ["Dev/a.jsonl"]),
        # No word of a split.
        (["a.jsonl", "b/c.jsonl"], ["a.jsonl", "b/c.jsonl"], ["a.jsonl", "b/c.jsonl"]),
        (
            ["latest.jsonl", "constrained.jsonl", "contest/a.jsonl"],
            ["constrained.jsonl", "latest.jsonl", "contest/a.jsonl"],
            ["constrained.jsonl", "latest.jsonl", "contest/a.jsonl"],
        ),
        (["train.json", "test.json", "dataset_infos.json"], ["train.json"], ["test.json"]),
        (["train/a.txt", "test/a.txt", "README.md"], ["train/a.txt"], ["test/a.txt"]),
    ],
)
def test_one_split_is_read(tmp_path, names, train, measured):
    make(tmp_path, names)
    assert found(tmp_path) == train
    assert found(tmp_path, held_out=True) == measured


def test_the_split_is_said(tmp_path, log):
    make(tmp_path, [*SHARDS, TEST])
    for _ in range(2):
        found(tmp_path)
    lines = [line for line in log.messages if "split" in line]
    assert lines == [
        f"{tmp_path}: reading its split train, 2 of 3 files; the splits are test, train"
    ]


@pytest.mark.parametrize(
    ("names", "held_out", "message"),
    [
        (
            ["data/train_gen-00000-of-00001.jsonl", "data/train_sft-00000-of-00001.jsonl"],
            False,
            "its splits are train_gen, train_sft, 2 of which are named train: name .*"
            "data/train_gen-00000-of-00001.jsonl or .*data/train_sft-00000-of-00001.jsonl",
        ),
        (["test.jsonl"], False, "its splits are test, none of which is for training"),
        (
            ["dev/a.jsonl", "dev/b.jsonl", "test/a.jsonl"],
            False,
            r"name .*/dev/\* or .*/test/a.jsonl",
        ),
        (["data/a-00000-of-00001.jsonl", "data/b-00000-of-00001.jsonl"], True, "to measure on"),
    ],
)
def test_splits_that_are_not_clear(tmp_path, names, held_out, message):
    make(tmp_path, names)
    with pytest.raises(DataError, match=message):
        found(tmp_path, held_out=held_out)


def test_what_the_refusal_names_is_read(tmp_path):
    make(tmp_path, ["dev/a.jsonl", "dev/b.jsonl", "test/a.jsonl", "README.md"])
    assert found(tmp_path, path=tmp_path / "dev*") == ["dev/a.jsonl", "dev/b.jsonl"]
    assert found(tmp_path, path=tmp_path / "dev" / "*") == ["dev/a.jsonl", "dev/b.jsonl"]
    assert found(tmp_path, path=tmp_path / "**" / "a.jsonl") == ["dev/a.jsonl", "test/a.jsonl"]
    assert found(tmp_path, path=tmp_path / "test" / "a.jsonl") == ["test/a.jsonl"]
    assert found(tmp_path, path=tmp_path / "README.md") == ["README.md"]
    assert parse_source(f"{tmp_path}/dev/*:0.5") == DataSource(f"{tmp_path}/dev/*", 0.5)
    with pytest.raises(UsageError, match=r"none\*: nothing matches"):
        found(tmp_path, path=tmp_path / "none*")
    make(tmp_path, ["x/a.csv"])
    with pytest.raises(DataError, match=r"a.csv: not a format that can be read"):
        found(tmp_path, path=tmp_path / "x" / "*")


@pytest.mark.parametrize(
    ("names", "card", "expected"),
    [
        (["a.jsonl", "README.md", "LICENSE.txt", "CITATION.rst"], "# A", ["a.jsonl"]),
        (["a.jsonl", "sub/readme.txt", "dataset_infos.json"], "# A", ["a.jsonl"]),
        (["a.jsonl", "notes.txt", "README.md"], "# A", ["a.jsonl", "notes.txt"]),
        (["a.jsonl", "script.py", "README.md"], HUB, ["a.jsonl"]),
        (["a.jsonl", "statistics.json"], "# A", ["a.jsonl"]),
        (["a.json", "README.md", "dataset_infos.json"], "# A", ["a.json"]),
        (["a.py", "b.md", "package.json"], "# A", ["README.md", "a.py", "b.md"]),
        (
            ["test/test_a.py", "train/b.py", "c.py"],
            "# A",
            ["README.md", "c.py", "test/test_a.py", "train/b.py"],
        ),
        (["test/a.py"], "# A", ["README.md", "test/a.py"]),
    ],
)
def test_cards_are_not_read_beside_rows(tmp_path, names, card, expected):
    make(tmp_path, names)
    (tmp_path / "README.md").write_text(card)
    (tmp_path / ".gitattributes").write_text("*.jsonl")
    assert found(tmp_path) == expected


@pytest.mark.parametrize(
    "name",
    "README_zh.md README-cn.md Readme.MD LICENSE-DATA.txt COPYING.txt dataset_card.md datasheet.md "
    "DATASET_CARD_en.md requirements.txt".split(),
)
@pytest.mark.parametrize("rows", ["a.jsonl", "A.JSONL", "a.Json"])
def test_cards_of_any_name(tmp_path, name, rows):
    make(tmp_path, [rows, name])
    assert found(tmp_path) == [rows]


@pytest.mark.parametrize("card", ["# A", HUB])
@pytest.mark.parametrize(
    ("names", "unread"),
    [
        (["train.csv"], "train.csv is"),
        (["data/train.csv", "LICENSE-DATA.txt"], "data/train.csv is"),
        (["train.jsonl.zst", "LICENSE"], "train.jsonl.zst is"),
        (["TRAIN.TSV", "test.tsv", "x.tsv", "README_zh.md"], "TRAIN.TSV and 2 others are"),
        (["license_plates.csv"], "license_plates.csv is"),
        (["table.unknown", "dataset_infos.json"], "table.unknown is"),
    ],
)
def test_cards_are_not_read_beside_data_of_other_formats(tmp_path, names, card, unread):
    make(tmp_path, names)
    (tmp_path / "README.md").write_text(card)
    with pytest.raises(DataError, match=rf": {unread} not read: .* of \.jsonl \.jsonl\.gz \.json"):
        found(tmp_path)


@pytest.mark.parametrize(
    ("names", "card", "expected"),
    [
        (["corpus.txt"], HUB, ["corpus.txt"]),
        (["corpus.txt", "LICENSE.txt", "README_zh.md"], HUB, ["corpus.txt"]),
        (["guide.md", "usage.md", "logo.png"], "# A", ["README.md", "guide.md", "usage.md"]),
        (["guide.md", "table.csv"], "# A", ["guide.md"]),
        ([], "# A", ["README.md"]),
    ],
)
def test_cards_beside_text(tmp_path, names, card, expected):
    make(tmp_path, names)
    (tmp_path / "README.md").write_text(card)
    assert found(tmp_path) == expected


def test_a_hub_dataset_of_a_script_and_an_archive(tmp_path):
    make(tmp_path, ["load.py", "data.zip"])
    (tmp_path / "README.md").write_text(HUB)
    with pytest.raises(DataError, match=r"data.zip is not read"):
        found(tmp_path)


def test_files_left_out_are_said(tmp_path, log):
    make(tmp_path, ["a.jsonl", "b.csv"])
    assert found(tmp_path) == ["a.jsonl"]
    assert f"{tmp_path}: b.csv is not read: the format is unknown" in log.messages


def test_source_code_in_folders_of_splits_alone(tmp_path):
    make(tmp_path, ["test/a.py", "test/b.py"])
    assert found(tmp_path) == ["test/a.py", "test/b.py"]


def make_saved(folder):
    """A split that `datasets.save_to_disk` wrote, as far as its names go."""
    make(folder, ["data-00000-of-00001.arrow"])
    (folder / "dataset_info.json").write_text("{}")
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
    (folder / "state.json").write_text(json.dumps(state))


@pytest.mark.parametrize(
    ("splits", "held_out", "expected"),
    [
        (["test", "train"], False, "train"),
        (["test", "train"], True, "test"),
        (["train", "train_extra", "validation"], False, "train"),
        (["test_sft", "train_sft"], False, "train_sft"),
        (["dev", "training"], True, "dev"),
    ],
)
def test_a_saved_dataset_of_several_splits(tmp_path, splits, held_out, expected):
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": splits}))
    for split in splits:
        make_saved(tmp_path / split)
    assert found(tmp_path, held_out=held_out) == [f"{expected}/data-00000-of-00001.arrow"]
    (tmp_path / expected).rename(tmp_path / "other")
    if expected == "train" and len(splits) == 2:
        with pytest.raises(
            DataError, match=r"its splits are other, test, none of .*/other or .*/te"
        ):
            found(tmp_path, held_out=held_out)


def test_splits_that_were_saved_one_by_one(tmp_path):
    for split in ("train", "test"):
        make_saved(tmp_path / split)
    assert found(tmp_path) == ["train/data-00000-of-00001.arrow"]
