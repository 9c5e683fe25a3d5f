"""The section 'Under stress' of docs/server.md is that of the newest result."""

from pathlib import Path

import pytest

from benchmarks import server_soak
from tests.soak.server import long_run

PAGE = Path(__file__).parents[1] / "docs" / "server.md"
DOCUMENT = {
    "date": "2026-11-24T00:00:00+00:00",
    "host": {"load": [0.2, 0.3, 0.4], "cores": 2},
    "times_factor": 1,
    "figures": {"keys": {"r": 0.01}, "drain_idle": {"end_ms": 220.4}},
}


def test_the_page_has_the_newest_figures():
    document = server_soak.newest()
    assert document is not None
    text = PAGE.read_text(encoding="utf-8")
    assert server_soak.under_stress(document) in text, "run python -m benchmarks.server_soak"
    assert server_soak.conditions(document) in text
    assert {row.key for row in server_soak.ROWS} <= document["figures"].keys()


def test_what_was_not_measured_says_so():
    lines = server_soak.under_stress(DOCUMENT).splitlines()
    assert len(lines) == 2 + len(server_soak.ROWS)
    assert sum(line.endswith("| not measured |") for line in lines) == len(server_soak.ROWS) - 2
    assert any(line.endswith("| r = +0.0100 |") for line in lines)
    assert any(line.endswith("| 220 ms |") for line in lines)
    late = DOCUMENT | {"figures": {"drain_idle": {"end_ms": 600.0}}}
    assert "| 600 ms: **missed** |" in server_soak.under_stress(late)


def test_a_busy_machine_is_named():
    assert server_soak.conditions(DOCUMENT).endswith("which the clients shared with the server.")
    busy = DOCUMENT | {"times_factor": 10}
    assert "10 times as long" in server_soak.conditions(busy)


def test_bounds_that_are_asserted_are_no_tighter_than_required():
    assert server_soak.REFUSED_WITHIN <= server_soak.REFUSED_WITHIN_ASSERTED
    assert server_soak.GOOD_FACTOR_SLOW <= server_soak.GOOD_FACTOR_SLOW_ASSERTED
    assert server_soak.READ_BEFORE_REFUSAL <= server_soak.READ_BEFORE_REFUSAL_ASSERTED
    assert len({row.key for row in server_soak.ROWS}) == len(server_soak.ROWS)


def long_document(**changed):
    found = {"minutes": 30.0, "settle_minutes": 5.0, "itl_drift": 0.01, "mb_per_hour": 0.5}
    found |= {"requests": {"answered": 1000, "left": 50}, "mb_first": 90.0, "mb_last": 90.2}
    return found | {"host": {"load": [0.2, 0, 0]}} | changed


def test_a_long_run_is_judged_only_if_it_was_long():
    assert server_soak.long_run(long_document()).endswith("met.")
    assert server_soak.long_run(long_document(mb_per_hour=1.5)).endswith("missed.")
    assert server_soak.long_run(long_document(itl_drift=0.04)).endswith("missed.")
    assert "too short to show" in server_soak.long_run(long_document(minutes=5.0))


def test_the_page_has_the_newest_long_run():
    document = server_soak.newest(server_soak.LONG_RUN)
    assert document is not None
    assert server_soak.long_run(document) in PAGE.read_text(encoding="utf-8")


def test_slope_and_drift():
    assert long_run.slope([(0.0, 5.0), (1.0, 7.0), (2.0, 9.0)]) == pytest.approx(2.0)
    medians = long_run.windows([(1.0, 9.0), (11.0, 0.1), (12.0, 0.3), (75.0, 0.5)], 10.0)
    assert medians == pytest.approx([0.2, 0.5])
    assert long_run.drift([0.1, 0.1, 0.3, 0.11]) == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["server-soak", "no-such-result"])
def test_the_newest_result_may_be_missing(name):
    assert (server_soak.newest(name) is None) == (name == "no-such-result")
