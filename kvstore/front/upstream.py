"""One HTTP/1.1 request to a worker, on a connection of its own, with a deadline for each wait."""

from __future__ import annotations

import asyncio
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import h11

CONNECT_S = 2.0  # seconds: a worker is on this machine or near
READ_BYTES = 1 << 16  # bytes taken from a connection at once


class Lost(Exception):
    """A worker could not be reached, was too slow, or went away before its answer was whole."""


class Late(Lost):
    """The worker is there and has not answered in time: asking another one would only double the work."""


@dataclass(frozen=True)
class Asked:
    """What is sent. `headers` are those that a worker should see; those of the connection are made here."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""


class Exchange:
    """A request that was sent: `status` and `headers` of its answer, then its `pieces`. `close` ends it at any point."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._protocol = h11.Connection(h11.CLIENT)
        self.status = 0
        self.headers: dict[str, str] = {}

    async def send(self, url: str, asked: Asked, timeout_s: float) -> None:
        """Send all, and wait for the answer's beginning."""
        own = {"Host": urllib.parse.urlsplit(url).netloc, "Content-Length": str(len(asked.body)), "Connection": "close"}
        headers = [(name.encode("ascii"), value.encode("latin-1")) for name, value in {**asked.headers, **own}.items()]  # as they came
        sent = self._protocol.send(h11.Request(method=asked.method, target=asked.path, headers=headers)) or b""
        sent += self._protocol.send(h11.Data(asked.body)) or b""
        self._writer.write(sent + (self._protocol.send(h11.EndOfMessage()) or b""))
        event = await self._next(timeout_s)
        if not isinstance(event, h11.Response):
            raise Lost(f"{url} sent no answer")
        self.status = event.status_code
        self.headers = {name.decode().lower(): value.decode("latin-1") for name, value in event.headers}

    async def pieces(self, timeout_s: float) -> AsyncIterator[bytes]:
        """The answer's body as it comes; at most so long between two pieces. Raises Lost where it ends too soon."""
        while not isinstance(event := await self._next(timeout_s), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                yield bytes(event.data)

    async def whole(self, timeout_s: float) -> bytes:
        """All of the answer's body."""
        return b"".join([piece async for piece in self.pieces(timeout_s)])

    def close(self) -> None:
        """End the connection: a worker ends what it does for it."""
        self._writer.close()

    async def _next(self, timeout_s: float) -> object:
        try:
            async with asyncio.timeout(timeout_s):
                while (event := self._protocol.next_event()) is h11.NEED_DATA or isinstance(event, h11.InformationalResponse):
                    if event is h11.NEED_DATA:
                        self._protocol.receive_data(await self._reader.read(READ_BYTES))
        except TimeoutError as error:
            raise Late(f"no answer for {timeout_s:.0f} s") from error
        except (OSError, h11.RemoteProtocolError) as error:
            raise Lost(str(error) or type(error).__name__) from error
        if isinstance(event, h11.ConnectionClosed):
            raise Lost("the connection ended")
        return event


async def ask(url: str, asked: Asked, timeout_s: float) -> Exchange:
    """Send a request to the worker at `url` (http://host:port) and wait for its answer's beginning. Raises Lost."""
    place = urllib.parse.urlsplit(url)
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(place.hostname, place.port or 80)
    except (OSError, TimeoutError, UnicodeError) as error:  # the last: a host's name that no network knows
        raise Lost(f"{url} cannot be reached: {str(error) or 'no answer'}") from error
    exchange = Exchange(reader, writer)
    try:
        await exchange.send(url, asked, timeout_s)
    except BaseException:
        exchange.close()
        raise
    return exchange
