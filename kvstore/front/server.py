"""The socket before the routes, and the end: uvicorn lets answers under way become whole."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence

import uvicorn

from kvstore.config import split_address
from kvstore.errors import ConfigError
from kvstore.front.app import App
from kvstore.front.relay import Limits
from kvstore.front.workers import Worker, Workers

DRAIN_S = 30  # seconds for answers under way at the end


def serve(address: str, workers: Sequence[Worker], limits: Limits, ready: Callable[[str], None]) -> None:
    """Serve on host:port until SIGTERM or SIGINT. `ready` is told the URL. Raises ConfigError."""
    host, port = split_address("http", address)
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise ConfigError(f"http on {address}: {error.strerror or error}; set --http to another HOST:PORT") from error
    with contextlib.closing(listener):
        asyncio.run(_run(listener, Workers(workers), limits, ready))


async def _run(listener: socket.socket, workers: Workers, limits: Limits, ready: Callable[[str], None]) -> None:
    config = uvicorn.Config(
        App(workers, limits).asgi, log_config=None, access_log=False, lifespan="off", ws="none", http="h11", server_header=False,
        timeout_graceful_shutdown=DRAIN_S,
    )  # fmt: skip
    watching = asyncio.ensure_future(workers.watch())
    try:
        host, port = listener.getsockname()[:2]
        ready(f"http://{host}:{port}")  # the socket listens already: who comes now waits a moment
        await uvicorn.Server(config).serve(sockets=[listener])
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
