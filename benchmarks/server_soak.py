"""What `tests/soak/server` requires of a server under stress, and the table of what it measured.

    SOAK_RESULT=new make test-soak SOAK=tests/soak/server    write a result
    python -m benchmarks.server_soak                         print the table of the newest one

Each bound stands here once: the tests assert it and the table prints it. Where the test asserts
less than is required, the table says why.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .markdown import table

RESULTS = Path(__file__).parent / "results"
NAME, LONG_RUN = "server-soak", "server-long-run"

BUSY_LOAD = 1.0
"""Load average of a minute above which a machine is busy when the tests start."""
BUSY_FACTOR = 10
"""How much longer a time may be on a busy machine."""

# Required, and asserted where nothing else is said. Seconds, MB, bytes.
MAX_ERROR_BYTES = 2048
EXCHANGE_P99 = 0.050
GOOD_FACTOR_FUZZ = 2.0
FUZZ_GROWTH_MB = 20
REFUSED_WITHIN, REFUSED_WITHIN_ASSERTED = 0.020, 1.0
HEALTH_P99 = 0.020
END_AFTER_LAST_STREAM, END_AFTER_TIMEOUT, END_AFTER_SECOND_SIGNAL = 0.5, 0.5, 1.0
END_WHEN_IDLE = 0.5
GOOD_FACTOR_SLOW, GOOD_FACTOR_SLOW_ASSERTED = 1.1, 1.5
READER_MB = 1.0
READ_BEFORE_REFUSAL, READ_BEFORE_REFUSAL_ASSERTED = 64 * 1024, 96 * 1024
HOSTILE_SECONDS_PER_TOKEN = 20e-6
MAX_CORRELATION = 0.02
MAX_MB_PER_HOUR, MAX_ITL_DRIFT, LONG_MINUTES = 1.0, 0.03, 30.0


class Row(NamedTuple):
    key: str
    """Of the figures in the result."""
    what: str
    required: str
    asserted: str
    measured: str
    """A format of the figures."""
    meets: Callable[[Mapping[str, float]], bool] = lambda figures: True
    """Whether figures keep to what is required; needed where a run may end well without."""

    def result(self, figures: Mapping[str, float] | None) -> str:
        if figures is None:
            return "not measured"
        text = self.measured.format(**figures)
        return text if self.meets(figures) else f"{text}: **missed**"


SAME = "the same"
ROWS = (
    Row(
        "fuzz",
        "12,000 requests: 10,000 with one mistake each (values, nesting, bytes, heads, framing), "
        "2,000 drawn from `/openapi.json`",
        "no status of 500 or above; errors in one shape, at most 2 KiB; 99 % answered within "
        "50 ms; at most 20 MB more memory; a good request every second at most twice as slow",
        SAME,
        "p99 {exchange_p99_ms:.0f} ms; {growth_mb:+.1f} MB; a good request {busy_p50_ms:.1f} ms, "
        "idle {idle_p50_ms:.1f}",
        lambda found: (
            found["exchange_p99_ms"] <= 1e3 * EXCHANGE_P99
            and found["busy_p50_ms"] <= GOOD_FACTOR_FUZZ * found["idle_p50_ms"]
        ),
    ),
    Row(
        "chaos",
        "256 clients at a time for 60 s, which leave before the head is read, in the queue, in "
        "prefill, in the middle or at the end; a tenth never read",
        "nothing held afterwards; sequences begun = sequences ended; at most two decode calls of "
        "tokens after an abort; answers of the others as alone; metrics equal the clients' counts",
        "the same; metrics equal the sums of the log, but for tokens after an abort, and each "
        "client that stays finds its own count there",
        "{clients:,} clients, {sequences:,} sequences, {aborted:,} aborted, {stayed:,} counts "
        "compared",
    ),
    Row(
        "chaos_model",
        "the same beside a model of two layers, 64 at a time for 30 s",
        "no program is compiled",
        SAME,
        "{clients:,} clients, {same:,} answers of others",
    ),
    Row(
        "overload",
        "1,000 requests at once, `--max-num-queued-reqs 64`",
        "64 are answered, 936 get 429 with `Retry-After` within 20 ms, none of them tokenized; "
        "p99 of `/health` at most 20 ms",
        "the same, but within 1 s: one loop reads and refuses 936 requests one after another, so "
        "the last one waits for all others",
        "all refused after {refused_max_ms:.0f} ms, {refused_each_ms:.2f} ms each; `/health` p50 "
        "{health_p50_ms:.1f} ms, p99 {health_p99_ms:.0f}",
        lambda found: (
            found["refused_max_ms"] <= 1e3 * REFUSED_WITHIN
            and found["health_p99_ms"] <= 1e3 * HEALTH_P99
        ),
    ),
    Row(
        "drain",
        "SIGTERM with 32 streams half done",
        "all end whole; exit code 0 within 0.5 s of the last",
        SAME,
        "{end_after_last_stream_ms:.0f} ms",
        lambda found: found["end_after_last_stream_ms"] <= 1e3 * END_AFTER_LAST_STREAM,
    ),
    Row(
        "drain_timeout",
        "the same with `--shutdown-timeout 1`",
        "each stream has an error and `[DONE]`; the end 0.5 s after the timeout at most",
        SAME,
        "{end_ms:.0f} ms after the signal",
        lambda found: found["end_ms"] <= 1e3 * (1 + END_AFTER_TIMEOUT),
    ),
    Row(
        "drain_second_signal",
        "a second signal",
        "the same, within 1 s",
        SAME,
        "{end_ms:.0f} ms after the first",
        lambda found: found["end_ms"] <= 1e3 * END_AFTER_SECOND_SIGNAL,
    ),
    Row(
        "drain_idle",
        "SIGTERM with 50 idle connections",
        "exit code 0 within 0.5 s",
        SAME,
        "{end_ms:.0f} ms",
        lambda found: found["end_ms"] <= 1e3 * END_WHEN_IDLE,
    ),
    Row(
        "slow",
        "2,000 connections that send nothing, half a head, half a body, a byte a second",
        "all closed on time; a good request at most 10 % slower",
        "the median at most 50 % slower: the same loop takes 500 single bytes a second, and the "
        "test's clients are one process, which keeps the 2,000 connections too",
        "{first_end_s:.1f} to {last_end_s:.1f} s of {timeout_s:g}; a good request p50 "
        "{busy_p50_ms:.1f} ms, p99 {busy_p99_ms:.0f}, idle {idle_p50_ms:.1f} and "
        "{idle_p99_ms:.0f}",
        lambda found: found["busy_p50_ms"] <= GOOD_FACTOR_SLOW * found["idle_p50_ms"],
    ),
    Row(
        "readers",
        "50 readers that never read",
        "ended by `--write-timeout`; at most 1 MB each",
        SAME,
        "{mb_each:.2f} MB",
    ),
    Row(
        "too_large",
        "a body of 100 MB, a head of 64 MB",
        "refused after at most 64 KiB were read",
        "at most 96 KiB were sent: what the kernels of both ends hold counts too. Of a body "
        "that does not say its length, `--max-body-size` (here 2 MiB) is read first",
        "{sent_kib:.0f} KiB were sent, {unknown_length_kib:,.0f} of a body of unknown length; "
        "{growth_mb:+.1f} MB of memory",
        lambda found: found["sent_kib"] <= READ_BEFORE_REFUSAL / 1024,
    ),
    Row(
        "text",
        "a lone byte for ever, 4,096 tokens",
        "at most 20 us a token",
        SAME,
        "{hostile_us:.1f} us, usual text {usual_us:.1f}",
        lambda found: found["hostile_us"] <= 1e6 * HOSTILE_SECONDS_PER_TOKEN,
    ),
    Row(
        "keys",
        "100,000 wrong keys that begin as the right one",
        "\\|r\\| of time and common beginning below 0.02",
        SAME,
        "r = {r:+.4f}",
    ),
)


def newest(name: str = NAME) -> dict[str, Any] | None:
    """The newest result; None if there is none."""
    paths = sorted(RESULTS.glob(f"{name}-cpu-2*.json"))
    return json.loads(paths[-1].read_text(encoding="utf-8")) if paths else None


def under_stress(document: dict[str, Any]) -> str:
    """The table of a result."""
    figures = document["figures"]
    rows = [
        (
            row.what,
            row.required,
            row.asserted,
            row.result(figures.get(row.key)),
        )
        for row in ROWS
    ]
    return table(("what", "required", "asserted", "measured"), rows)


def conditions(document: dict[str, Any]) -> str:
    """When and how the result was made."""
    load, cores = document["host"]["load"][0], document["host"]["cores"]
    text = f"Measured on {document['date'][:10]} with a load of {load:.1f} on {cores} cores"
    if document["times_factor"] == 1:
        return f"{text}, which the clients shared with the server."
    return (
        f"{text}: a busy machine, on which the tests let times be {document['times_factor']} "
        "times as long."
    )


def long_run(document: dict[str, Any]) -> str:
    """The result of `tests.soak.server.long_run`, in a sentence or two."""
    requests, drift = document["requests"], document["itl_drift"]
    counted = document["minutes"] - document["settle_minutes"]
    within = document["mb_per_hour"] <= MAX_MB_PER_HOUR and drift <= MAX_ITL_DRIFT
    text = (
        f"Mixed requests for {document['minutes']:g} minutes with a load of "
        f"{document['host']['load'][0]:.1f} before: {requests.get('answered', 0):,} answers, "
        f"{requests.get('left', 0):,} clients that left, {requests.get('failed', 0):,} failures. "
        f"Over the last {counted:.1f} minutes the memory went from {document['mb_first']:.1f} to "
        f"{document['mb_last']:.1f} MB ({document['mb_per_hour']:+.1f} MB an hour), and the median "
        f"wait between two events changed by {drift:+.1%}."
    )
    if document["minutes"] < LONG_MINUTES:
        return (
            f"{text} At most {MAX_MB_PER_HOUR:g} MB an hour and {MAX_ITL_DRIFT:.0%} more are "
            f"required over {LONG_MINUTES:g} minutes, which this run is too short to show."
        )
    return (
        f"{text} Required are at most {MAX_MB_PER_HOUR:g} MB an hour and {MAX_ITL_DRIFT:.0%} more: "
        f"{'met' if within else 'missed'}."
    )


def main() -> int:
    if (document := newest()) is None:
        print(f"error: {RESULTS} has no result of {NAME}", file=sys.stderr)
        return 1
    print(f"{conditions(document)}\n\n{under_stress(document)}")
    if (document := newest(LONG_RUN)) is not None:
        print(f"\n{long_run(document)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
