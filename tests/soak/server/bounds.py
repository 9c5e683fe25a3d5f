"""What the tests assert of a server under stress. Where that is less than is required, the table of
docs/server-stress.md says why."""

from __future__ import annotations

NAME = "server-soak"
"""How the names of result files begin."""
BUSY_LOAD = 1.0
"""Load average of a minute above which a machine is busy when the tests start."""
BUSY_FACTOR = 10
"""How much longer a time may be on a busy machine."""

# Seconds, MB, bytes.
MAX_ERROR_BYTES = 2048
EXCHANGE_P99 = 0.050
GOOD_FACTOR_FUZZ = 2.0
FUZZ_GROWTH_MB = 20
REFUSED_WITHIN_ASSERTED = 1.0
HEALTH_P99 = 0.020
END_AFTER_LAST_STREAM, END_AFTER_TIMEOUT, END_AFTER_SECOND_SIGNAL = 0.5, 0.5, 1.0
END_WHEN_IDLE = 0.5
GOOD_FACTOR_SLOW_ASSERTED = 1.5
READER_MB = 1.0
READ_BEFORE_REFUSAL_ASSERTED = 96 * 1024
HOSTILE_SECONDS_PER_TOKEN = 20e-6
MAX_CORRELATION = 0.02
