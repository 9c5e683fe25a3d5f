"""Files of JSON: a list of rows, or a row on each line."""

import codecs
import gzip
import json

import pytest

from tests.train.data.test_sources import CHAT, read, write_json_lines


def test_json_lines_under_the_name_of_json(tmp_path):
    write_json_lines(tmp_path / "rows.json", CHAT)
    assert [row.messages for row in read(tmp_path / "rows.json")] == [
        row["messages"] for row in CHAT
    ]
    (tmp_path / "one.json").write_text(json.dumps(CHAT[0], indent=2))
    (row,) = read(tmp_path / "one.json")
    assert row.messages == CHAT[0]["messages"]
    (tmp_path / "one.json").write_text(json.dumps({"data": CHAT}, indent=2))
    (row,) = read(tmp_path / "one.json")
    assert row.reason.startswith("unknown form, found the fields data")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.jsonl.gz", "rows.txt"])
def test_a_byte_order_mark_is_no_text(tmp_path, name):
    content = '[{"text": "a"}]' if name == "rows.json" else '{"text": "a"}'
    content = codecs.BOM_UTF8 + (b"a" if name == "rows.txt" else content.encode())
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    (row,) = read(tmp_path / name)
    assert row.text == "a"
