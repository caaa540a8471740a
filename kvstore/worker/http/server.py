"""The socket before the routes: says when it is ready, and on a signal ends in order."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import uvicorn

from kvstore.config import split_address
from kvstore.errors import ConfigError
from kvstore.worker.http.app import App, Settings
from kvstore.worker.requests import Serving
from kvstore.worker.texts import Texts

INTERRUPTED_S = 5.0  # seconds for clients to be told that their answer was interrupted
KEEP_ALIVE_S = 15.0  # seconds a connection waits for its next request: longer than a client's pool thinks between two
BACKLOG = 512  # connections: so many wait to be accepted, before the system refuses more


@dataclass(frozen=True)
class Ending:
    """How it ends on a signal: answers under way have `deadline_s` to become whole; a second signal interrupts them at once."""

    deadline_s: float = 30.0


def serve(serving: Serving, texts: Texts, address: str, settings: Settings, ending: Ending, ready: Callable[[str], None]) -> None:
    """Serve on host:port until SIGTERM or SIGINT, and end in order. `ready` is told the URL. Raises ConfigError.

    Call it in the main thread: signals come to no other.
    """
    with contextlib.closing(_bound(address)) as listener:
        asyncio.run(_run(serving, texts, listener, settings, ending, ready))


async def _run(
    serving: Serving, texts: Texts, listener: socket.socket, settings: Settings, ending: Ending, ready: Callable[[str], None]
) -> None:
    app = App(serving, texts, settings)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    server = Server(app, ending, lambda: ready(f"http://{shown}:{port}"))
    try:
        await server.serve(sockets=[listener])
    finally:
        app.close()


class Server(uvicorn.Server):
    """uvicorn, which goes on listening while answers become whole: whoever comes meanwhile is told to go elsewhere."""

    def __init__(self, app: App, ending: Ending, ready: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app.asgi, log_config=None, access_log=False, lifespan="off", ws="none", http="h11", server_header=False,
            timeout_keep_alive=int(KEEP_ALIVE_S), timeout_graceful_shutdown=int(INTERRUPTED_S),
        )  # fmt: skip
        super().__init__(config)
        self._app, self._ending, self._ready = app, ending, ready
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: only the loop is told, which may be in the middle of anything."""
        self._loop.call_soon_threadsafe(self._signalled)

    def _signalled(self) -> None:
        if self._draining is None:
            self._draining = self._loop.create_task(self._drain())
        else:
            self._hurry.set()

    async def _drain(self) -> None:
        self._app.draining = True
        waiting = [asyncio.ensure_future(each.wait()) for each in (self._app.idle, self._hurry)]
        await asyncio.wait(waiting, timeout=self._ending.deadline_s, return_when=asyncio.FIRST_COMPLETED)
        for each in waiting:
            each.cancel()
        self._app.interrupt()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._app.idle.wait(), INTERRUPTED_S)
        self.should_exit = True


def _bound(address: str) -> socket.socket:
    host, port = split_address("http", address)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"http on {address}: {error.strerror or error}; set --http to another HOST:PORT") from error
    listener.setblocking(False)
    return listener
