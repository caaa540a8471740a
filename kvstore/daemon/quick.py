"""Lookups over a plain Unix socket beside the service's: a round trip of gRPC costs several times what a lookup does.

For whoever may open the service's own socket, on this machine alone; the service answers the same lookups, of groups too. The wire format
is in `kvstore.proto.lookups`; who sends another request before the last one's answer is cut off.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

from kvstore import errors
from kvstore.cache.messages import HASH_BYTES, MAX_BLOCKS_PER_BATCH
from kvstore.daemon import sockets
from kvstore.daemon.rpc import CallMeter
from kvstore.proto.lookups import MAGIC, REPLY, REQUEST, SUFFIX

MAX_CONNECTIONS = 256  # at once: as many sessions are attached at most by default; whoever comes after uses the service
MAX_PATH_BYTES = 107  # bytes of a Unix socket's path, by the kernel

log = logging.getLogger(__name__)
Look = Callable[[int, str, bytes], bytes]  # (namespace, epoch, hashes) -> tiers of the leading blocks; raises KVStoreError


class QuickLookups:
    """The socket. On the event loop."""

    def __init__(self, listen: str, look: Look, meter: CallMeter) -> None:
        """`listen`: the service's own socket."""
        self.path = listen + SUFFIX
        self._look, self._meter = look, meter
        self._server: asyncio.Server | None = None
        self._lines: set[_Line] = set()

    async def start(self) -> None:
        """Listen, where the path is not too long for it: clients do without."""
        if len(self.path.encode()) > MAX_PATH_BYTES:
            log.info("no socket for lookups alone: %s is too long a path", self.path)
            return
        sockets.claim(self.path)
        make = asyncio.get_running_loop().create_unix_server
        self._server = await make(lambda: _Line(self), self.path, backlog=MAX_CONNECTIONS)
        sockets.open_to_group(self.path)

    def stop(self) -> None:
        """Cut all connections. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
            Path(self.path).unlink(missing_ok=True)
        for line in list(self._lines):
            line.cut()

    def admits(self, line: _Line) -> bool:
        """Count a connection; False where there are too many."""
        if len(self._lines) >= MAX_CONNECTIONS:
            return False
        self._lines.add(line)
        return True

    def forget(self, line: _Line) -> None:
        """A connection is gone."""
        self._lines.discard(line)

    def answer(self, namespace: int, epoch: bytes, hashes: bytes) -> tuple[bytes, str]:
        """One reply, and the status that it has."""
        try:
            tiers = self._look(namespace, epoch.decode("ascii", "replace").rstrip("\0"), hashes)
            return REPLY.pack(0, len(tiers)) + tiers, "OK"
        except errors.KVStoreError as error:
            return _refusal(error), error.code
        except Exception as error:  # a call's edge: a fault of ours must fail this call, not the daemon
            log.exception("lookup: unexpected")
            return _refusal(errors.InternalFault(f"{error!r}; please report it")), errors.InternalFault.code

    def answered(self, code: str, seconds: float) -> None:
        """Count a call."""
        self._meter.call_ended("Lookup", code, seconds)


def _refusal(error: errors.KVStoreError) -> bytes:
    text = f"{error.code} {errors.to_text(error)}".encode()
    return REPLY.pack(1, len(text)) + text


class _Line(asyncio.Protocol):
    """One connection. What does not keep to the protocol is cut off."""

    def __init__(self, lookups: QuickLookups) -> None:
        self._lookups = lookups
        self._received = bytearray()  # less than one request: its bound is that of a request
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if not self._lookups.admits(self):
            self.cut()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lookups.forget(self)

    def pause_writing(self) -> None:
        """The client does not read: nothing is read from it either."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        whole: bytes | bytearray = data  # mostly one piece is one request, and is not copied
        if self._received:
            self._received += data
            whole = self._received
        if self._transport is None:
            return
        if len(whole) >= REQUEST.size:
            magic, namespace, blocks, epoch = REQUEST.unpack_from(whole)
            end = REQUEST.size + HASH_BYTES * blocks
            if magic != MAGIC or blocks > MAX_BLOCKS_PER_BATCH or len(whole) > end:  # more than one request: others would wait for it
                self.cut()
                return
            if len(whole) == end:
                began, hashes = time.monotonic(), bytes(whole[REQUEST.size :])
                self._received.clear()
                reply, code = self._lookups.answer(namespace, epoch, hashes)
                self._transport.write(reply)
                self._lookups.answered(code, time.monotonic() - began)  # after the answer: nobody waits for it
                return
        if whole is data:
            self._received += data

    def cut(self) -> None:
        """End it now."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
