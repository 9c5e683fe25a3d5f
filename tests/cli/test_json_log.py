"""Standard error as JSON: whatever writes to it."""

import datetime
import json
import logging
import sys
import threading
import warnings

from swiftkv_jax import cli
from swiftkv_jax.cli import json_log
from swiftkv_jax.errors import UsageError


def lines_of(work, capsys) -> list[dict]:
    """What a command writes to standard error that does `work`."""

    def main() -> int:
        json_log.begin()
        return work() or 0

    cli.run(main)
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_the_package_libraries_and_warnings(capsys):
    def work() -> None:
        cli.log('one "line"\u2028')
        logging.getLogger("swiftkv_jax.x").warning("careful")
        logging.getLogger("uvicorn.error").error("of a library\nin two lines")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            json_log.end()  # again, within `catch_warnings`
            json_log.begin()
            warnings.warn("a warning", stacklevel=1)
        print("printed", 3, file=sys.stderr)

    found = lines_of(work, capsys)
    levels = [(one["level"], one["message"]) for one in found]
    assert levels[:3] == [
        ("info", 'one "line"\u2028'),
        ("warning", "careful"),
        ("error", "of a library\nin two lines"),
    ]
    assert levels[3][0] == "warning" and "a warning" in levels[3][1]
    assert levels[4:] == [("info", "printed 3")]
    assert [one.get("logger") for one in found[1:4]] == [
        "swiftkv_jax.x",
        "uvicorn.error",
        "py.warnings",
    ]
    written = datetime.datetime.fromisoformat(found[0]["time"])
    assert abs((datetime.datetime.now(datetime.UTC) - written).total_seconds()) < 60


def test_errors_and_tracebacks(capsys):
    def work() -> None:
        try:
            raise ValueError("inside")
        except ValueError:
            logging.getLogger("swiftkv_jax").exception("failed")
        raise UsageError("`x` is wrong")

    first, last = lines_of(work, capsys)
    assert first["message"] == "failed" and "ValueError: inside" in first["exception"]
    assert (last["level"], last["message"]) == ("error", "`x` is wrong")


def test_fields_of_a_record(capsys):
    def work() -> None:
        fields = {"route": "/x", "status": 200}
        logging.getLogger("swiftkv_jax").info("request", extra={"fields": fields})

    (found,) = lines_of(work, capsys)
    assert (found["message"], found["route"], found["status"]) == ("request", "/x", 200)


def test_it_ends_with_the_command(capsys):
    lines_of(lambda: None, capsys)
    cli.log("text again")
    assert capsys.readouterr().err == "text again\n"
    assert not any(isinstance(one, json_log._Handler) for one in logging.getLogger().handlers)


def test_threads_that_fail(capsys):
    def work() -> None:
        thread = threading.Thread(target=lambda: 1 / 0)
        before, threading.excepthook = threading.excepthook, threading.__excepthook__
        thread.start()
        thread.join()
        threading.excepthook = before

    found = lines_of(work, capsys)
    assert any("ZeroDivisionError" in one["message"] for one in found)
