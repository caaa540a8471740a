"""Answers that are sent as they are made (server-sent events), and work that ends when its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvstore.errors import KVStoreError
from kvstore.worker.http import faults
from kvstore.worker.http.asking import Asked
from kvstore.worker.http.calls import Call
from kvstore.worker.http.shapes import DONE, Shapes, event

T = TypeVar("T")

CLIENT_LEFT = 499  # status in metrics where the client did not wait to the end
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # nothing on the way may collect the pieces


class Stream(StreamingResponse):
    """A call's pieces as they come. `begin` first; however it ends, `over` is called with the call, and `ended` with the status."""

    ended: Callable[[int], None]

    def __init__(self, asked: Asked, call: Call, shapes: Shapes, over: Callable[[Call], None]) -> None:
        super().__init__(self._all(), media_type="text/event-stream", headers=_HEADERS)
        self._call, self._over = call, over
        self._outcome = CLIENT_LEFT
        self._pieces = self._made(asked, shapes)
        self._first = b""

    async def begin(self) -> None:
        """Wait for the first piece: a fault before it is raised, and has a status of its own."""
        self._first = await anext(self._pieces)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except OSError:  # the client left in the middle of a write
            self._outcome = CLIENT_LEFT
        finally:
            self._over(self._call)
            self.ended(self._outcome)

    async def _all(self) -> AsyncIterator[bytes]:
        yield self._first
        try:
            async for piece in self._pieces:
                yield piece
        except KVStoreError as error:
            yield event(faults.body_of(error))
            self._outcome = faults.status_of(error)
        else:
            self._outcome = self.status_code

    async def _made(self, asked: Asked, shapes: Shapes) -> AsyncIterator[bytes]:
        begun: set[int] = set()
        async for index, delta in self._call.deltas():
            head = None if index in begun else shapes.first(index, self._call.prepared[index // asked.n].before)
            begun.add(index)
            yield (head or b"") + shapes.piece(index, delta.text, delta.tokens, delta.reason)
        yield (shapes.usage(self._call.counted()) if asked.include_usage else b"") + DONE


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of the work, which is given up where the client leaves first. Raises ClientDisconnect then."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
