"""Lookups over the daemon's socket for them alone, on an event loop: see `quick`, whose twin this is.

A few connections, each with one question under way. One that was given up, because its time was over or its caller was cancelled, takes
its connection along: what comes late is never taken for the next one's answer.
"""

from __future__ import annotations

import asyncio
from typing import cast

from kvstore.clients.quick import MAX_IDLE, Way
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.lookups import REPLY

MAX_CONNECTIONS = MAX_IDLE  # at once: the daemon answers one lookup after another, so that more would only wait there


class AsyncQuickLookups:
    """The connections of one client."""

    def __init__(self, place: str) -> None:
        """`place`: as of a Way."""
        self.way = Way(place)
        self._idle: list[_Line] = []
        self._room = asyncio.Semaphore(MAX_CONNECTIONS)

    async def ask(self, request: pb.LookupRequest, timeout_s: float) -> pb.LookupReply | None:
        """The answer; None where gRPC is to be asked. Raises what the service would, DeadlineExceeded after `timeout_s`."""
        message = self.way.message(request)
        if message is None:
            return None
        try:
            async with asyncio.timeout(timeout_s), self._room:
                answer = await self._exchange(message)
        except TimeoutError:
            raise self.way.late(timeout_s) from None
        return None if answer is None else self.way.reply(request, *answer)

    def close(self) -> None:
        """Close the connections."""
        self.way.close()
        while self._idle:
            self._idle.pop().cut()

    async def _exchange(self, message: tuple[bytes, bytes]) -> tuple[int, bytes] | None:
        """Over a connection that is there, or over a new one: an old one may be a former daemon's."""
        while self._idle:
            line = self._idle.pop()
            try:
                return await self._over(line, message)
            except TimeoutError:
                raise
            except OSError:
                continue
        try:
            _, line = await asyncio.get_running_loop().create_unix_connection(_Line, self.way.path)
            return await self._over(line, message)
        except TimeoutError:
            raise
        except OSError:
            self.way.missed()
            return None

    async def _over(self, line: _Line, message: tuple[bytes, bytes]) -> tuple[int, bytes]:
        answer = await line.ask(message)
        if self.way.closed:
            line.cut()
        else:
            self._idle.append(line)
        return answer


class _Line(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None

    async def ask(self, message: tuple[bytes, bytes]) -> tuple[int, bytes]:
        """(status, body). Raises OSError where the connection ends before the answer; ends it where this call does."""
        if self._transport is None:
            raise ConnectionResetError("the daemon closed the connection")
        self._answer = asyncio.get_running_loop().create_future()
        try:
            self._transport.writelines(message)
            return await self._answer
        except BaseException:
            self.cut()
            raise
        finally:
            self._answer = None

    def cut(self) -> None:
        """End it now."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc if isinstance(exc, OSError) else ConnectionResetError("the daemon closed the connection"))

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        if len(received) < REPLY.size:
            return
        status, size_bytes = REPLY.unpack_from(received)
        end = REPLY.size + size_bytes
        if self._answer is None or self._answer.done() or len(received) > end:
            self.cut()  # nobody asked for that
            self.connection_lost(None)
        elif len(received) == end:
            self._answer.set_result((status, bytes(received[REPLY.size :])))
            received.clear()
