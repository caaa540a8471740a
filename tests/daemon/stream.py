"""A session's stream by hand: any message in any order, and what the daemon answers."""

from __future__ import annotations

import fcntl
import os
import queue
from collections.abc import Iterator
from typing import Self

import grpc

from kvstore.clients.channel import OPTIONS
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.kvstore_pb2_grpc import KVStoreStub

TIMEOUT_S = 15.0  # seconds: far beyond what any answer here takes


class Stream:
    """Use it in a `with` block; the stream is cut at its end."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(f"unix:{address}", OPTIONS)
        self.stub = KVStoreStub(self.channel)
        self._outgoing: queue.SimpleQueue[pb.ClientMessage | None] = queue.SimpleQueue()
        self._call = self.stub.Attach(iter(self._outgoing.get, None), timeout=TIMEOUT_S * 4)
        self.incoming: Iterator[pb.ServerMessage] = iter(self._call)
        self.welcome = pb.Welcome()
        self.lock = -1

    def send(self, **kind: object) -> None:
        """One message."""
        self._outgoing.put(pb.ClientMessage(**kind))  # type: ignore[arg-type]

    def receive(self) -> pb.ServerMessage:
        """The next answer."""
        return next(self.incoming)

    def ask(self, *ops: pb.Op, number: int = 1) -> list[pb.OpReply]:
        """One batch, and its whole reply; grants that come before it are dropped."""
        self.send(batch=pb.Batch(number=number, ops=ops))
        replies: list[pb.OpReply] = []
        while len(replies) < len(ops):
            message = self.receive()
            assert message.WhichOneof("kind") in ("reply", "grant"), message
            replies.extend(message.reply.replies)
        return replies

    def attach(self, hello: pb.Hello | None = None) -> pb.Welcome:
        """Hello, the lock, Ready."""
        self.send(hello=hello or pb.Hello(client="by hand", maps_arena=True))
        self.welcome = self.receive().welcome
        if self.welcome.session_path:
            self.lock = os.open(self.welcome.session_path, os.O_RDWR)
            fcntl.flock(self.lock, fcntl.LOCK_EX)
            self.send(locked=pb.Locked())
        assert self.receive().HasField("ready")
        return self.welcome

    def cut(self) -> None:
        """End the stream without a word; the lock stays."""
        self._outgoing.put(None)
        self._call.cancel()
        self.channel.close()

    def unlock(self) -> None:
        """What the end of the process does."""
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1

    def half_close(self) -> None:
        """No more messages from this side."""
        self._outgoing.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()
        self.unlock()
