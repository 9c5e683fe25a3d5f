"""The table of clients is the recorded one."""

import json

from tests.agents import table

RECORD = json.loads(table.RECORD.read_text(encoding="utf-8"))


def test_the_page_has_the_recorded_table():
    """`make test-agents` writes both."""
    assert table.page(RECORD) == table.PAGE.read_text(encoding="utf-8")


def test_every_client_works():
    """Or there is a reason."""
    outcomes = {
        (row["client"], feature): cell for row in RECORD for feature, cell in row["cells"].items()
    }
    assert outcomes == table.REASONS | dict.fromkeys(table.cells(), "works")
