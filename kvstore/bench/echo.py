"""An empty call of each kind that the daemon answers: over gRPC, and over a plain socket with the framing of lookups.

A process of its own answers them, with the same library, loop and kind of socket as the daemon's: a byte a block, and nothing looked up.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Self, cast

import grpc
import grpc.aio

from kvstore.bench.yardsticks import second_of_two_s
from kvstore.hashing import HASH_BYTES
from kvstore.proto.lookups import MAGIC, REPLY, REQUEST, SUFFIX

METHOD = "/kvstore.bench.Echo/Unary"
ANSWER_BYTES = 16_384  # bytes taken at once: more than an answer has


class Echo:
    """The process, and a connection of each kind to it."""

    def __init__(self, directory: Path) -> None:
        place = directory / "echo.sock"
        command = [sys.executable, "-m", "kvstore.bench.echo", str(place)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        if not self._process.stdout or not self._process.stdout.readline():
            raise RuntimeError("the echo process did not start")
        self._channel = grpc.insecure_channel(f"unix:{place}")
        self._call: Any = self._channel.unary_unary(METHOD)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(str(place) + SUFFIX)

    def grpc_ms(self, blocks: int) -> float:
        """Milliseconds of a call of gRPC, with a message of so many hashes, after another."""
        message = bytes(HASH_BYTES * blocks)
        return 1e3 * second_of_two_s(lambda: self._call(message))

    def socket_ms(self, blocks: int) -> float:
        """Milliseconds of an exchange over the plain socket, likewise."""
        message = bytes(HASH_BYTES * blocks)
        return 1e3 * second_of_two_s(lambda: self._exchange(message, blocks))

    def _exchange(self, message: bytes, blocks: int) -> None:
        self._socket.sendall(REQUEST.pack(MAGIC, 1, blocks, b"") + message)
        left = REPLY.size + blocks
        while left:
            left -= len(self._socket.recv(ANSWER_BYTES))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._channel.close()
        self._process.terminate()
        self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()


class _Line(asyncio.Protocol):
    """One connection of the plain kind."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._transport is None or len(self._received) < REQUEST.size:
            return
        blocks = REQUEST.unpack_from(self._received)[2]
        if len(self._received) == REQUEST.size + HASH_BYTES * blocks:
            message = bytes(self._received[REQUEST.size :])  # as gRPC gives it to a handler
            self._received.clear()
            self._transport.write(REPLY.pack(0, blocks) + bytes(len(message) // HASH_BYTES))


async def _serve(place: str) -> None:
    async def unary(message: bytes, _: object) -> bytes:
        return bytes(len(message) // HASH_BYTES)

    server = grpc.aio.server()
    handlers: dict[str, Any] = {"Unary": grpc.unary_unary_rpc_method_handler(unary)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("kvstore.bench.Echo", handlers),))
    server.add_insecure_port(f"unix:{place}")
    await server.start()
    plain = await asyncio.get_running_loop().create_unix_server(_Line, place + SUFFIX)
    print("ready", flush=True)
    async with plain:
        await server.wait_for_termination()


if __name__ == "__main__":
    try:
        import uvloop

        uvloop.install()
    except ImportError:
        pass
    asyncio.run(_serve(sys.argv[1]))
