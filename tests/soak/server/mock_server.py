"""A server without a model as a process of its own: `python -m tests.soak.server.mock_server JSON`.

The JSON object has `engine`, options of `mock_engine`; `step_seconds`, what a decode call takes;
`send_buffer`, bytes of the system's buffer; `options`, those of `ServerOptions`. The port is the
first line of standard output. SIGUSR1 adds a line of JSON: what is held now, and what was counted.
"""

import asyncio
import collections
import json
import signal
import socket
import sys
from typing import Any

from swiftkv_jax import cli
from swiftkv_jax.infer.engine.requests import RequestOutput
from swiftkv_jax.infer.serve import server
from swiftkv_jax.infer.serve.app import App
from swiftkv_jax.infer.serve.options import ServerOptions
from tests.infer.serve.conftest import mock_loaded


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
        assert engine is not None and admission is not None
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


def main(given: dict[str, Any]) -> int:
    loaded, _ = mock_loaded(given.get("engine"), given.get("step_seconds", 0.0))
    listener = server.listen("127.0.0.1", 0)
    if (size := given.get("send_buffer")) is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
    options = ServerOptions(**given.get("options", {}))

    def on_start(app: App, stop: Any) -> None:
        counts = Counts(app)
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGUSR1, lambda: print(json.dumps(counts.report()), flush=True)
        )

    print(listener.getsockname()[1], flush=True)
    with asyncio.Runner(loop_factory=server.loop_factory()) as runner:
        return runner.run(
            server.serve(options, "tiny", listener, lambda say: loaded, on_start=on_start)
        )


if __name__ == "__main__":
    cli.end(main(json.loads(sys.argv[1])))
