"""Replicas of the server under Ray Serve, each a process of its own behind Ray's proxy.

    pip install '.[serve]' 'ray[serve]'
    serve run examples.deploy.ray_serve:application model=runs/8b/model replicas=4 gpus=1
    curl http://127.0.0.1:8000/v1/models

Ray starts and watches the replicas, and takes their GPUs into account; `flags` are further ones of
`swiftkv infer serve`. A replica is healthy while `/ready` says so. Answers are passed on as they
come, and a client that leaves ends its request. Ray sends requests to the replica that has the
fewest in flight, not to the one that has cached their prefix.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import asyncio
import contextlib
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator

import aiohttp
from ray import serve
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

SHUTDOWN_SECONDS = 60
"""Time that unfinished requests have when a replica is stopped."""
NOT_PASSED_ON = {"host", "connection", "keep-alive", "transfer-encoding", "content-length", "date"}


class Replica:
    """A server on a port of this machine, and its address for the requests that Ray sends here."""

    def __init__(self, flags: list[str]):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "swiftkv_jax.infer", "serve", "--port", str(port)]
        self._process = subprocess.Popen([*command, *flags])
        self._address = f"http://127.0.0.1:{port}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )

    async def wait_until_ready(self) -> None:
        while not await self.is_ready():
            if (code := self._process.poll()) is not None:
                raise RuntimeError(f"the server has ended with exit code {code}")
            await asyncio.sleep(0.5)

    async def is_ready(self) -> bool:
        with contextlib.suppress(aiohttp.ClientError):
            async with self._session.get(f"{self._address}/ready") as answer:
                return answer.ok
        return False

    async def answer(self, request: Request) -> StreamingResponse:
        """What the server answers, part by part. A client that leaves closes the connection."""
        found = await self._session.request(
            request.method,
            f"{self._address}{request.url.path}?{request.url.query}",
            headers=[(k, v) for k, v in request.headers.items() if k not in NOT_PASSED_ON],
            data=await request.body(),
        )

        async def parts() -> AsyncIterator[bytes]:
            try:
                async for part in found.content.iter_any():
                    yield part
            finally:
                found.close()

        kept = {k: v for k, v in found.headers.items() if k.lower() not in NOT_PASSED_ON}
        return StreamingResponse(parts(), found.status, kept)

    def stop(self) -> None:
        """SIGTERM: what was admitted ends."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()


async def _answer(request: Request) -> StreamingResponse:
    return await serve.get_replica_context().servable_object.replica.answer(request)


_METHODS = ["GET", "POST"]
_routes = Starlette(routes=[Route("/{path:path}", _answer, methods=_METHODS)])


@serve.deployment(
    max_ongoing_requests=1024,  # the server has limits of its own, and says 429
    health_check_period_s=5,
    graceful_shutdown_timeout_s=SHUTDOWN_SECONDS,
)
@serve.ingress(_routes)
class Server:
    async def __init__(self, flags: list[str]):
        self.replica = Replica(flags)
        await self.replica.wait_until_ready()

    async def check_health(self) -> None:
        if not await self.replica.is_ready():
            raise RuntimeError("the server is not ready")

    def __del__(self):
        if replica := getattr(self, "replica", None):
            replica.stop()


def application(args: dict[str, str]):
    """Arguments of `serve run`: `model`, `replicas` (1), `gpus` of each (0), `flags`."""
    flags = ["--model", args["model"]] if "model" in args else []
    flags += shlex.split(args.get("flags", ""))
    return Server.options(
        num_replicas=int(args.get("replicas", 1)),
        ray_actor_options={"num_gpus": float(args.get("gpus", 0))},
    ).bind(flags)
