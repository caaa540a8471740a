"""Lookups over the daemon's socket for them alone (`kvstore.proto.lookups`). Where there is none, gRPC has the answers too.

Any thread may call; each uses a connection of its own while it waits.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque

from kvstore import errors
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.lookups import EPOCH_BYTES, MAGIC, REPLY, REQUEST, SUFFIX

MAX_IDLE = 8  # connections kept: threads that look up at the same time are few
AGAIN_S = 1.0  # seconds until a socket that was not there is tried again


class QuickLookups:
    """The connections of one client."""

    def __init__(self, place: str) -> None:
        """`place`: what grpc connects to; only a Unix socket has another one for lookups."""
        self._place = place
        self._path = place.removeprefix("unix:") + SUFFIX if place.startswith("unix:") else ""
        self._idle: deque[socket.socket] = deque()
        self._again_at = 0.0
        self._pid = os.getpid()

    def ask(self, request: pb.LookupRequest, timeout_s: float) -> pb.LookupReply | None:
        """The answer; None where gRPC is to be asked. Raises what the service would, DeadlineExceeded after `timeout_s`."""
        epoch = request.epoch.encode()
        alone = self._path and not request.group and len(epoch) <= EPOCH_BYTES
        if not alone or time.monotonic() < self._again_at or self._pid != os.getpid():  # a connection must not be two processes'
            return None
        hashes = request.hashes
        message = REQUEST.pack(MAGIC, request.namespace_id, len(hashes) // 32, epoch) + hashes
        answer = self._exchange(message, timeout_s)
        if answer is None:
            return None
        status, body = answer
        if status:
            code, _, text = body.decode("utf-8", "replace").partition(" ")
            raise errors.from_code(code, text)
        return pb.LookupReply(epoch=request.epoch, blocks=len(body), tiers=[body])

    def close(self) -> None:
        """Close the connections."""
        self._again_at = float("inf")
        while self._idle:
            self._idle.pop().close()

    def _exchange(self, message: bytes, timeout_s: float) -> tuple[int, bytes] | None:
        """Over a connection that is there, or over a new one: an old one may be a former daemon's."""
        while True:
            try:
                connection, fresh = self._idle.pop(), False
            except IndexError:
                connection, fresh = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), True
            try:
                connection.settimeout(timeout_s)
                if fresh:
                    connection.connect(self._path)
                connection.sendall(message)
                status, size_bytes = REPLY.unpack(_received(connection, REPLY.size))
                answer = status, _received(connection, size_bytes)
            except TimeoutError:
                connection.close()
                raise errors.DeadlineExceeded(f"daemon at {self._place}: no answer within {timeout_s:g} s; see its log") from None
            except OSError:
                connection.close()
                if fresh:
                    self._again_at = max(self._again_at, time.monotonic() + AGAIN_S)
                    return None
            else:
                self._give_back(connection)
                return answer

    def _give_back(self, connection: socket.socket) -> None:
        if len(self._idle) < MAX_IDLE and self._again_at < float("inf"):
            self._idle.append(connection)
        else:
            connection.close()


def _received(connection: socket.socket, size_bytes: int) -> bytes:
    """Exactly so many bytes. Raises OSError where there are fewer."""
    data = connection.recv(size_bytes) if size_bytes else b""
    while len(data) < size_bytes:
        more = connection.recv(size_bytes - len(data))
        if not more:
            raise ConnectionResetError("the daemon closed the connection")
        data += more
    return data
