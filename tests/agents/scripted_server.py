"""A server with the defaults of `swiftkv serve` before the scripted model, as a process:
`python -m tests.agents.scripted_server --port 8000 --requests requests.jsonl`."""

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from swiftkv_jax.serve import server
from swiftkv_jax.serve.options import ServerOptions
from tests.agents import scripted_model

MODEL = "scripted"


class Recorder:
    """An ASGI application that writes each request to a file, a line of JSON with its path, body
    and status, once it is answered."""

    def __init__(self, app: Any, file: Path):
        self._app, self._file = app, file

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, status = b"", 0

        async def received() -> Any:
            nonlocal body
            event = await receive()
            body += event.get("body", b"")
            return event

        async def sent(event: Any) -> None:
            nonlocal status
            status = event.get("status", status)
            await send(event)

        try:
            await self._app(scope, received, sent)
        finally:
            try:
                content = json.loads(body or b"null")
            except ValueError:
                content = body.decode(errors="replace")
            line = {"path": scope["path"], "status": status, "body": content}
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--requests", type=Path, required=True)
    args = parser.parse_args()
    listener = server.listen("127.0.0.1", args.port)
    application = server.asgi
    server.asgi = lambda app: Recorder(application(app), args.requests)  # type: ignore[assignment]
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    with asyncio.Runner(loop_factory=server.loop_factory()) as runner:
        runner.run(
            server.serve(ServerOptions(), MODEL, listener, lambda report: scripted_model.load())
        )


if __name__ == "__main__":
    main()
