"""Sources: which files are read, what their rows become, and which are refused by name."""

import gzip
import json
import sys
from typing import Any

import pyarrow
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from pyarrow import parquet

from swiftkv_jax.errors import DataError, UsageError
from swiftkv_jax.train.data.documents import Unreadable
from swiftkv_jax.train.data.sources import (
    STDLIB,
    DataSource,
    find_files,
    parse_source,
    read_file,
    unweighted,
)


def calling(**arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


CHAT = [
    {"messages": [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "2"}]},
    # A struct of Arrow has all three arguments in both calls.
    {"messages": [{"role": "user", "content": "é"}, calling(city="Paris", days=[1, 2])]},
    {"messages": [{"role": "user", "content": "é"}, calling(ticker="X")]},
]


def read(path) -> list[Any]:
    return [row for file in find_files(DataSource(str(path))) for row in read_file(file)]


def write_arrow_stream(path, rows):
    table = pyarrow.Table.from_pylist(rows)
    with (
        pyarrow.OSFile(str(path), "wb") as sink,
        pyarrow.ipc.new_stream(sink, table.schema) as writer,
    ):
        writer.write_table(table, max_chunksize=1)


def write_dataset_folder(folder, rows):
    folder.mkdir()
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]})
    )
    write_arrow_stream(folder / "data-00000-of-00001.arrow", rows)


def write_array_record(path, rows):
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for row in rows:
        writer.write(json.dumps(row).encode())
    writer.close()


def write_json_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


WRITERS = {
    "rows.json": lambda path, rows: path.write_text(json.dumps(rows, indent=2)),
    "rows.json.gz": lambda path, rows: path.write_bytes(gzip.compress(json.dumps(rows).encode())),
    "rows.jsonl": write_json_lines,
    "rows.jsonl.gz": lambda path, rows: path.write_bytes(
        gzip.compress("\n".join(json.dumps(row) for row in rows).encode())
    ),
    "rows.parquet": lambda path, rows: parquet.write_table(
        pyarrow.Table.from_pylist(rows), path, row_group_size=1
    ),
    "rows.arrayrecord": write_array_record,
    "rows.array_record": write_array_record,
    "dataset": write_dataset_folder,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_messages(tmp_path, name):
    WRITERS[name](tmp_path / name, CHAT)
    assert [row.messages for row in read(tmp_path / name)] == [row["messages"] for row in CHAT]


def test_nulls_that_a_row_brings_stay(tmp_path):
    """Where the format can tell them from fields that are not there, and in JSON text anywhere."""
    for name, write in WRITERS.items():
        text = calling()
        text["tool_calls"][0]["function"]["arguments"] = '{"city": null}'
        write(tmp_path / name, [{"messages": [text]}])
        (row,) = read(tmp_path / name)
        assert row.messages == [calling(city=None)], name
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [calling(city=None)]}))
    (row,) = read(tmp_path / "rows.jsonl")
    assert row.messages == [calling(city=None)]


@pytest.mark.parametrize("name", WRITERS)
def test_a_bad_row_is_named_by_its_place(tmp_path, name):
    rows = [{"text": "fine", "tag": "x"}, {"text": None, "tag": "y"}]
    WRITERS[name](tmp_path / name, rows)
    good, bad = read(tmp_path / name)
    assert good.text == "fine"
    assert (
        isinstance(bad, Unreadable) and "unknown form" in bad.reason and '"messages"' in bad.reason
    )
    assert bad.origin.endswith(":2" if ".jsonl" in name else ":row 1")


@pytest.mark.parametrize("name", WRITERS)
def test_earlier_turns_in_every_format(tmp_path, name):
    row = {"instruction": "q", "output": "a", "history": [["b", "c"]]}
    WRITERS[name](tmp_path / name, [row, row | {"history": []}])
    contents = [[one["content"] for one in row.messages] for row in read(tmp_path / name)]
    assert contents == [["b", "c", "q", "a"], ["q", "a"]]


def test_text_and_folders(tmp_path):
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a.py").write_text("one")
    (tmp_path / "c.bin").write_bytes(b"\0")
    (tmp_path / ".hidden.py").write_text("no")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "d.jsonl").write_text('{"text": "three"}\n\n')
    write_dataset_folder(tmp_path / "zet", [{"text": "four"}])
    assert [row.text for row in read(tmp_path)] == ["one", "two", "three", "four"]
    assert [row.text for row in read(tmp_path / "b.txt")] == ["two"]


def test_stdlib_is_split_by_package():
    training, held_out = (
        find_files(DataSource(STDLIB), held_out=held_out) for held_out in (False, True)
    )
    assert any(file.name == "argparse.py" for file in training)
    assert (
        held_out
        and not {file.name for file in held_out} & {"argparse.py"}
        and not set(training) & set(held_out)
    )
    packages = [
        {str(file).split("/python3.")[-1].split("/")[1] for file in split}
        for split in (training, held_out)
    ]
    assert not packages[0] & packages[1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.jsonl", DataSource("a.jsonl")),
        ("a.jsonl:0.7", DataSource("a.jsonl", 0.7)),
        ("code/:3", DataSource("code/", 3)),
        ("/data/x:y", DataSource("/data/x:y")),
        ("stdlib:2", DataSource("stdlib", 2)),
    ],
)
def test_parse_source(text, expected):
    assert parse_source(text) == expected
    if expected.weight is not None:
        with pytest.raises(UsageError, match=f"`eval_data`={text}: only sources to train on"):
            unweighted("eval_data", text)


def test_a_path_with_a_colon_is_taken_whole(tmp_path):
    (tmp_path / "part:1").mkdir()
    assert parse_source(f"{tmp_path}/part:1") == DataSource(f"{tmp_path}/part:1")


@pytest.mark.parametrize(
    "text", ["", ":0.5", "a.jsonl:0", "a.jsonl:-1", "a.jsonl:nan", "a.jsonl:inf"]
)
def test_bad_weights(text):
    with pytest.raises(UsageError, match="`data`="):
        parse_source(text)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("rows.jsonl", b'{"text": "fine"}\n{"text": ', "rows.jsonl:2: not valid JSON"),
        ("rows.jsonl", b'{"text": "fine"}\n\n' + b"[" * 100_000, "rows.jsonl:3: not valid JSON"),
        ("rows.jsonl", b'{"text": "fine"}\n{"text": "caf\xe9"}', "rows.jsonl:2: not UTF-8"),
        ("latin.txt", b"caf\xe9", "latin.txt: not UTF-8"),
    ],
)
def test_unreadable_rows_name_file_and_line(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    *good, bad = read(tmp_path / name)
    assert (
        isinstance(bad, Unreadable)
        and reason in f"{bad.origin}: {bad.reason}"
        and len(good) == ("fine" in str(content))
    )


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "nothing to read in it; expected files ending in .jsonl"),
        ({"dataset_dict.json": "{}"}, "nothing to read in it"),  # `train` is empty
        ({"state.json": "{}", "dataset_info.json": "{}"}, "state.json: not the list of data files"),
        (
            {
                "state.json": '{"_data_files": [{"filename": "gone.arrow"}]}',
                "dataset_info.json": "{}",
            },
            "gone.arrow: no such file",
        ),
        ({"a.parquet": "junk"}, "a.parquet: not a readable Parquet file"),
        (
            {
                "a.arrow": "x",
                "state.json": '{"_data_files": [{"filename": "a.arrow"}]}',
                "dataset_info.json": "{}",
            },
            "not a readable Arrow",
        ),
        ({"a.arrayrecord": "junk"}, "a.arrayrecord: damaged ArrayRecord file"),
        ({"a.jsonl.gz": "junk"}, "a.jsonl.gz: damaged gzip file"),
        ({"a.json.gz": "junk"}, "a.json.gz: damaged gzip file"),
        ({"a.json": '[{"text": "a"},'}, "a.json: not valid JSON .*line 1 column 16"),
    ],
)
def test_folders_and_files_that_cannot_be_read(tmp_path, files, message):
    (tmp_path / "train").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path)


def test_other_refusals(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="nowhere: no such file or folder"):
        read(tmp_path / "nowhere")
    (tmp_path / "table.csv").write_text("a,b")
    with pytest.raises(
        DataError,
        match="table.csv: not a format that can be read; expected a name ending in .jsonl",
    ):
        read(tmp_path / "table.csv")
    parquet.write_table(pyarrow.Table.from_pylist([{"body": "x"}]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="a.parquet: its columns are body; accepted"):
        read(tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"pip install 'swiftkv-jax\[arrow\]'"):
        read(tmp_path / "a.parquet")
