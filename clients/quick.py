"""Lookups over the daemon's socket for them alone (`kvstore.proto.lookups`). Where there is none, gRPC has the answers too.

Any thread may call `QuickLookups`; each uses a connection of its own while it waits. `aio_quick` is its twin on an event loop.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections import deque

from kvstore import errors
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.lookups import EPOCH_BYTES, MAGIC, REPLY, REQUEST, SUFFIX

MAX_IDLE = 8  # connections kept: threads that look up at the same time are few
AGAIN_S = 1.0  # seconds until a socket that was not there is tried again
AGAIN = (errors.StaleEpoch, errors.Unavailable, errors.SessionEnded)  # after which a client opens its namespace anew, and asks again
RECEIVED_BYTES = 16_384  # bytes taken at once: more than any answer, which has a byte a block


class Way:
    """Where one client's lookups can go beside gRPC, and whether they can now."""

    def __init__(self, place: str) -> None:
        """`place`: what grpc connects to; only a Unix socket has another one for lookups."""
        self.path = place.removeprefix("unix:") + SUFFIX if place.startswith("unix:") else ""
        self._place = place
        self._again_at = 0.0
        self._pid = os.getpid()

    def message(self, request: pb.LookupRequest) -> tuple[bytes, bytes] | None:
        """What is sent for a request, in two pieces; None where gRPC is to be asked."""
        if request.group or not self._open:  # before the hashes are copied
            return None
        return self.packed(request.namespace_id, request.epoch, request.hashes)

    def packed(self, namespace_id: int, epoch: str, hashes: bytes) -> tuple[bytes, bytes] | None:
        """`message` of a request about one namespace."""
        if not self._open or len(epoch) > EPOCH_BYTES:
            return None
        return REQUEST.pack(MAGIC, namespace_id, len(hashes) // 32, epoch.encode()), hashes

    @property
    def _open(self) -> bool:
        """Whether it can be tried now, in the process that made it: a connection must not be two processes'."""
        return bool(self.path) and time.monotonic() >= self._again_at and self._pid == os.getpid()

    def reply(self, request: pb.LookupRequest, status: int, body: bytes) -> pb.LookupReply:
        """The service's reply in an answer. Raises what the service would."""
        if status:
            raise self.error(body)
        return pb.LookupReply(epoch=request.epoch, blocks=len(body), tiers=[body])

    def error(self, body: bytes) -> errors.KVStoreError:
        """What the service would raise."""
        code, _, text = body.decode("utf-8", "replace").partition(" ")
        return errors.from_code(code, text)

    def missed(self) -> None:
        """Nobody listens there, or takes no more connections: leave it alone for a while."""
        self._again_at = max(self._again_at, time.monotonic() + AGAIN_S)

    def close(self) -> None:
        """Use it no more."""
        self._again_at = float("inf")

    @property
    def closed(self) -> bool:
        """`close` was called."""
        return self._again_at == float("inf")

    def late(self, timeout_s: float) -> errors.DeadlineExceeded:
        """The error where no answer came in time."""
        return errors.DeadlineExceeded(f"daemon at {self._place}: no answer within {timeout_s:g} s; see its log")


class QuickLookups:
    """The connections of one client."""

    def __init__(self, place: str) -> None:
        """`place`: as of a Way."""
        self.way = Way(place)
        self._idle: deque[tuple[socket.socket, float]] = deque()  # and the timeout, seconds, that each has now

    def ask(self, request: pb.LookupRequest, timeout_s: float) -> pb.LookupReply | None:
        """The answer; None where gRPC is to be asked. Raises what the service would, DeadlineExceeded after `timeout_s`."""
        message = self.way.message(request)
        answer = None if message is None else self._exchange(message, timeout_s)
        return None if answer is None else self.way.reply(request, *answer)

    def look(self, namespace_id: int, epoch: str, hashes: bytes, timeout_s: float) -> bytes | None:
        """The tiers of the leading blocks that are here, the shortest way; raises as `ask`. None where more than one call is needed."""
        message = self.way.packed(namespace_id, epoch, hashes) if hashes and epoch else None
        answer = None if message is None else self._exchange(message, timeout_s)
        if answer is None or not answer[0]:
            return None if answer is None else answer[1]
        error = self.way.error(answer[1])
        if isinstance(error, AGAIN):
            return None
        raise error

    def close(self) -> None:
        """Close the connections."""
        self.way.close()
        while self._idle:
            self._idle.pop()[0].close()

    def _exchange(self, message: tuple[bytes, bytes], timeout_s: float) -> tuple[int, bytes] | None:
        """Over a connection that is there, or over a new one: an old one may be a former daemon's."""
        while True:
            try:
                (connection, limit_s), fresh = self._idle.pop(), False
            except IndexError:
                (connection, limit_s), fresh = (socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), 0.0), True
            try:
                if fresh and not self._connected(connection, timeout_s):
                    return None
                if limit_s != timeout_s:
                    _limit(connection, timeout_s)
                sent = connection.sendmsg(message)  # all of it, unless it is very long
                if sent < len(message[0]) + len(message[1]):
                    connection.sendall(b"".join(message)[sent:])
                answer = _answer(connection)
            except (TimeoutError, BlockingIOError):  # the second is what the kernel's own limit gives
                connection.close()
                raise self.way.late(timeout_s) from None
            except OSError:
                connection.close()
                if fresh:
                    self.way.missed()
                    return None
            except BaseException:  # as an interrupt: the answer to this must not be taken for the next one's
                connection.close()
                raise
            else:
                self._give_back(connection, timeout_s)
                return answer

    def _connected(self, connection: socket.socket, timeout_s: float) -> bool:
        """Connect; False where nobody is there, or so many wait to be let in that the system refuses more. Raises TimeoutError."""
        connection.settimeout(timeout_s)
        try:
            connection.connect(self.way.path)
        except TimeoutError:
            raise
        except OSError:
            connection.close()
            self.way.missed()
            return False
        return True

    def _give_back(self, connection: socket.socket, timeout_s: float) -> None:
        if len(self._idle) < MAX_IDLE and not self.way.closed:
            self._idle.append((connection, timeout_s))
        else:
            connection.close()


def _limit(connection: socket.socket, timeout_s: float) -> None:
    """Have the kernel end each wait of this socket after so long: Python's own timeout asks it before each call whether it may."""
    connection.settimeout(None)
    limit = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6) or int(timeout_s < 1))
    for which in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, which, limit)


def _answer(connection: socket.socket) -> tuple[int, bytes]:
    """One answer, (status, body): mostly it comes in one piece. Raises OSError where the connection ends before."""
    data = b""
    end = REPLY.size
    while len(data) < end:
        more = connection.recv(RECEIVED_BYTES)
        if not more:
            raise ConnectionResetError("the daemon closed the connection")
        data += more
        if len(data) >= REPLY.size:
            end = REPLY.size + REPLY.unpack_from(data)[1]
    if len(data) > end:
        raise ConnectionResetError("more came than the answer")
    return REPLY.unpack_from(data)[0], data[REPLY.size :]
