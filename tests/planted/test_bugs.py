"""The table of planted bugs fits the code; that tests find them is for `make test-planted`."""

import pytest

from .bugs import ROOT, Bug, read_bugs


@pytest.mark.parametrize("bug", read_bugs(), ids=lambda bug: bug.name)
def test_a_bug_can_be_planted(bug: Bug):
    text = (ROOT / bug.file).read_text(encoding="utf-8")
    assert bug.planted_in(text) != text
    file, _, function = bug.test.partition("[")[0].partition("::")
    assert f"def {function}" in (ROOT / file).read_text(encoding="utf-8")


def test_names_are_unique_and_there_are_enough():
    names = [bug.name for bug in read_bugs()]
    assert len(names) == len(set(names)) and len(names) >= 60
