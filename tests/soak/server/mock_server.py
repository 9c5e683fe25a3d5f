"""A server without a model as a process of its own: `python -m tests.soak.server.mock_server JSON`.

The JSON object has `engine`, options of `mock_engine`; `step_seconds`, what a decode call takes;
`send_buffer` and `receive_buffer`, bytes of the system's buffers; `options`, those of
`ServerOptions`. The port is the first line of standard output. SIGUSR1 adds a line of JSON: what is
held now, and what was counted; SIGUSR2 another: the lines of the log that are of admitted requests.
"""

import asyncio
import collections
import json
import logging
import signal
import socket
import sys
from typing import Any

from swiftkv_jax import cli
from swiftkv_jax.infer.engine.requests import RequestOutput
from swiftkv_jax.serve import server
from swiftkv_jax.serve.app import App
from swiftkv_jax.serve.options import ServerOptions
from tests.serve.conftest import mock_loaded


class Counts:
    """What the service is given and gives, counted beside its own metrics."""

    def __init__(self, app: App):
        self.service = service = app.service
        self.admitted = 0
        self.late: collections.Counter[tuple[int, int]] = collections.Counter()
        """(request, sample) -> tokens that came after its abort."""
        submit, observe = service.submit, service.metrics.observe_event

        def counted_submit(generation):
            self.admitted += sum(1 for _ in generation.choices)
            submit(generation)

        def counted_observe(generation, part, event):
            if isinstance(event, RequestOutput) and generation.abort_reason is not None:
                self.late[part.engine_id, event.sample] += len(event.token_ids)
            observe(generation, part, event)

        service.submit, service.metrics.observe_event = counted_submit, counted_observe

    def report(self) -> dict[str, Any]:
        service = self.service
        engine, admission = service.engine, service.admission
        held = {
            "generations": service.num_admitted,
            "parts": len(service._parts),
            "queued": len(service._queue),
            "ids": len(engine._ids),
            "sequences": admission.sequences,
            "tokens": admission.tokens,
            "bytes": admission.bytes,
            "keys": len(admission.sequences_of),
            "pages": engine.snapshot.load.pages_in_use,
            "rows": engine.snapshot.load.num_running,
        }
        most_late = max(self.late.values(), default=0)
        return {"held": held, "admitted": self.admitted, "most_late_tokens": most_late}


class RequestLog(logging.Handler):
    """Keeps the fields of the lines with `log_json`: writing them would take the loop's time."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        fields = getattr(record, "fields", {})
        if "completion_tokens" in fields:
            self.lines.append(fields)


def main(given: dict[str, Any]) -> int:
    loaded, _ = mock_loaded(given.get("engine"), given.get("step_seconds", 0.0))
    listener = server.listen("127.0.0.1", 0)
    for name, option in (("send", socket.SO_SNDBUF), ("receive", socket.SO_RCVBUF)):
        if (size := given.get(f"{name}_buffer")) is not None:
            listener.setsockopt(socket.SOL_SOCKET, option, size)
    options = ServerOptions(**given.get("options", {}))

    log = RequestLog()
    logger = logging.getLogger("swiftkv_jax.serve.api.routes")
    logger.addHandler(log)
    if options.log_json:
        logger.setLevel(logging.INFO)

    def on_start(app: App, stop: Any) -> None:
        counts = Counts(app)
        loop = asyncio.get_running_loop()
        for number, tell in (
            (signal.SIGUSR1, counts.report),
            (signal.SIGUSR2, lambda: log.lines),
        ):
            loop.add_signal_handler(number, lambda tell=tell: print(json.dumps(tell()), flush=True))

    print(listener.getsockname()[1], flush=True)
    with asyncio.Runner(loop_factory=server.loop_factory()) as runner:
        return runner.run(
            server.serve(options, "tiny", listener, lambda report: loaded, on_start=on_start)
        )


if __name__ == "__main__":
    cli.end(main(json.loads(sys.argv[1])))
