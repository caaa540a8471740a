"""An engine that says what a test tells it to, and a real server before it in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvstore.errors import KVStoreError
from kvstore.worker.http.app import App, Settings
from kvstore.worker.http.server import Ending, Server
from kvstore.worker.requests import Choice, Ended, Finish, Listener, Made, Request, Serving, Started
from kvstore.worker.texts import Texts

WAIT_S = 60.0  # for what must come; a busy machine takes its time


@dataclass
class Taken:
    """A request that was submitted; its ticket too. `cancels` has the branch of each cancellation, None for all."""

    texts: Texts
    request: Request
    listener: Listener
    cancels: queue.SimpleQueue[int | None] = field(default_factory=queue.SimpleQueue)

    def cancel(self, branch: int | None = None) -> None:
        self.cancels.put(branch)

    def start(self, hit_tokens: int = 0) -> None:
        self.listener(Started(hit_tokens, 0.0))

    def say(self, text: str, branch: int = 0) -> None:
        """The tokens of a text, each with a made-up log-probability."""
        for token in self.texts.encode(text):
            self.listener(Made(branch, Choice(token, -0.5, ((token, -0.5), (65, -1.5))[: max(self.request.sampling.logprobs, 0)])))

    def end(self, finish: Finish = Finish.EOS, branch: int = 0, error: KVStoreError | None = None) -> None:
        self.listener(Ended(branch, finish, error))

    def fail(self, error: KVStoreError) -> None:
        for branch in range(self.request.n):
            self.end(Finish.FAILED, branch, error)


class Scripted:
    """An engine whose answers a test writes. `refusal` is raised instead of taking a request; `illness` is what its health says."""

    def __init__(self, texts: Texts) -> None:
        self.refusal: BaseException | None = None
        self.illness = ""
        self._texts = texts
        self._taken: queue.SimpleQueue[Taken] = queue.SimpleQueue()

    def submit(self, request: Request, listener: Listener) -> Taken:
        if self.refusal:
            raise self.refusal
        taken = Taken(self._texts, request, listener)
        self._taken.put(taken)
        return taken

    def figures(self) -> dict[str, float]:
        return {"running": 2.0, "steps_total": 31.0}

    def health(self) -> str:
        return self.illness

    def next(self) -> Taken:
        """The next request that was taken."""
        return self._taken.get(timeout=WAIT_S)

    def forget(self) -> None:
        """Requests that a test did not look at."""
        while not self._taken.empty():
            self._taken.get()


@dataclass
class Running:
    """A server before a scripted engine."""

    url: str
    engine: Scripted
    server: Server
    thread: threading.Thread

    def signal(self) -> None:
        """As if the process got SIGTERM."""
        self.server.handle_exit(signal.SIGTERM, None)


@contextlib.contextmanager
def running(texts: Texts, settings: Settings, ending: Ending, serving: Serving | None = None) -> Iterator[Running]:
    """Serve until the end of the block, before `serving` rather than a scripted engine where it is given."""
    engine = Scripted(texts)
    ready: queue.SimpleQueue[Server] = queue.SimpleQueue()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)

    async def serve() -> None:
        app = App(serving or engine, texts, settings)
        server = Server(app, ending, lambda: ready.put(server))
        await server.serve(sockets=[listener])
        app.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    running = Running(f"http://127.0.0.1:{listener.getsockname()[1]}", engine, ready.get(timeout=WAIT_S), thread)
    try:
        yield running
    finally:
        if thread.is_alive():
            running.signal()
            running.signal()  # the second interrupts what a failed test left open
        thread.join(WAIT_S)
        listener.close()
