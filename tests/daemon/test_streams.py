"""A session's stream inside one process, where a test can make the daemon's own parts fail: real cache, real arena, no socket."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore import errors
from kvstore.cache.core import Cache
from kvstore.cache.messages import Mark
from kvstore.cache.state import CacheSizes
from kvstore.clients import requests
from kvstore.daemon.hub import Hub
from kvstore.daemon.rpc import Edge
from kvstore.daemon.streams import SessionLimits, SessionStream
from kvstore.geometry import UNIT_BYTES
from kvstore.proto import kvstore_pb2 as pb
from kvstore.tiers.dram import DramOptions, DramTier
from tests.blocks import GEOMETRY, IDENTITY

CAPACITY_BYTES = 4 << 20
EXTENT_BYTES = 1 << 20


class Desk:
    """One daemon's hub and one stream to it."""

    def __init__(self, directory: Path) -> None:
        options = DramOptions(directory, "test", CAPACITY_BYTES, EXTENT_BYTES // UNIT_BYTES, "e")
        self.dram = DramTier(options)
        self.hub = Hub(Cache(CacheSizes(CAPACITY_BYTES, dram_extent_bytes=EXTENT_BYTES)), self.dram, "e")
        opening = requests.open_namespace(IDENTITY, GEOMETRY, "", "", requests.KEEP_ALL)
        self.namespace = self.hub.namespaces.open("default", opening).id
        self.stream = SessionStream(self.hub, self.dram, "default", SessionLimits(1.0, 0), Counter())
        self.sent: asyncio.Queue[pb.ServerMessage] = asyncio.Queue()
        self._incoming: asyncio.Queue[pb.ClientMessage | None] = asyncio.Queue()
        self.serving = asyncio.create_task(self.stream.serve(self._messages(), self.sent.put))
        self.session = 0

    async def _messages(self) -> AsyncIterator[pb.ClientMessage]:
        while (message := await self._incoming.get()) is not None:
            yield message

    def send(self, **kind: Any) -> None:
        self._incoming.put_nowait(pb.ClientMessage(**kind))

    async def receive(self) -> pb.ServerMessage:
        return await asyncio.wait_for(self.sent.get(), 5)

    async def attach(self) -> int:
        self.send(hello=pb.Hello(maps_arena=True))
        welcome = (await self.receive()).welcome
        lock = os.open(welcome.session_path, os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self.send(locked=pb.Locked())
        assert (await self.receive()).HasField("ready")
        self.session = welcome.session
        return lock

    async def close(self) -> None:
        self._incoming.put_nowait(None)
        await asyncio.wait_for(self.serving, 5)
        self.dram.close()


def with_desk(directory: Path, act: Callable[[Desk], Awaitable[None]]) -> None:
    async def run() -> None:
        desk = Desk(directory)
        lock = await desk.attach()
        try:
            await act(desk)
        finally:
            await desk.close()
            os.close(lock)

    asyncio.run(run())


def test_slots_are_marked_before_the_client_hears_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(desk: Desk) -> None:
        order: list[str] = []
        mark, push = desk.hub.sessions.mark, desk.stream._out.push

        def marked(decision: Mark) -> None:
            order.append("mark")
            mark(decision)

        def pushed(message: pb.ServerMessage) -> bool:
            order.append(message.WhichOneof("kind") or "")
            return push(message)

        monkeypatch.setattr(desk.hub.sessions, "mark", marked)
        monkeypatch.setattr(desk.stream._out, "push", pushed)
        desk.send(batch=pb.Batch(number=1, ops=[requests.reserve(1, desk.namespace, count=3)]))
        slots = (await desk.receive()).reply.replies[0].slots
        assert order == ["mark", "reply"]
        known = desk.hub.sessions.get(desk.session)
        assert known is not None
        assert known.files[-1].marked_units().astype("<u4").tobytes() == slots.units

    with_desk(tmp_path, act)


def test_what_cannot_be_marked_is_never_granted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(desk: Desk) -> None:
        def full(_: Mark) -> None:
            raise errors.ResourceExhausted("the arena's file system has no room")

        monkeypatch.setattr(desk.hub.sessions, "mark", full)
        desk.send(batch=pb.Batch(number=1, ops=[requests.reserve(1, desk.namespace, count=3)]))
        message = await desk.receive()
        assert message.HasField("ended"), "not the reply with the slots"
        assert "no room" in message.ended.text
        await asyncio.sleep(0.01)
        (session,) = desk.hub.cache.stats().sessions
        assert session.ended

    with_desk(tmp_path, act)


def test_a_fault_of_the_daemons_own_ends_one_session_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def act(desk: Desk) -> None:
        def broken(*_: object) -> None:
            raise ZeroDivisionError("a bug")

        with monkeypatch.context() as patch:
            patch.setattr(desk.hub.cache, "reserve", broken)
            desk.send(batch=pb.Batch(number=1, ops=[requests.reserve(1, desk.namespace, count=3)]))
            message = await desk.receive()
        assert message.ended.code == "INTERNAL"
        other = Desk.__new__(Desk)
        other.hub, other.dram, other.namespace = desk.hub, desk.dram, desk.namespace
        other.stream = SessionStream(desk.hub, desk.dram, "default", SessionLimits(1.0, 0), Counter())
        other.sent, other._incoming = asyncio.Queue(), asyncio.Queue()
        other.serving = asyncio.create_task(other.stream.serve(other._messages(), other.sent.put))
        lock = await other.attach()
        other.send(batch=pb.Batch(number=1, ops=[requests.reserve(1, desk.namespace, count=3)]))
        assert len((await other.receive()).reply.replies[0].slots.outcomes) == 3
        other._incoming.put_nowait(None)
        await other.serving
        os.close(lock)

    with_desk(tmp_path, act)
    assert "a bug" in caplog.text


def test_an_ended_sessions_file_goes_with_its_process(tmp_path: Path) -> None:
    async def run() -> None:
        desk = Desk(tmp_path)
        lock = await desk.attach()
        desk.send(batch=pb.Batch(number=1, ops=[requests.reserve(1, desk.namespace, count=3)]))
        await desk.receive()
        desk._incoming.put_nowait(None)
        await desk.serving
        desk.hub.collect()
        assert len(list(desk.dram.sessions_directory.iterdir())) == 1, "the process lives"
        os.close(lock)
        desk.hub.collect()
        assert not list(desk.dram.sessions_directory.iterdir())
        assert not desk.hub.cache.stats().sessions
        desk.dram.close()

    asyncio.run(run())


class Meter:
    def __init__(self) -> None:
        self.codes: list[str] = []

    def call_ended(self, method: str, code: str, seconds: float) -> None:
        self.codes.append(code)


class Context:
    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        raise RuntimeError(f"{code.name} {text}")


@pytest.mark.parametrize(
    ("raised", "says"),
    [
        (errors.NotFound("no such"), "NOT_FOUND NotFound: no such"),
        (errors.StaleEpoch("old"), "FAILED_PRECONDITION StaleEpoch: old"),
        (ZeroDivisionError("a bug"), "INTERNAL InternalFault: ZeroDivisionError"),
    ],
)
def test_every_error_becomes_a_status_in_one_place(raised: Exception, says: str) -> None:
    async def act(_request: object, _context: object) -> None:
        raise raised

    async def call() -> None:
        handler = grpc.unary_unary_rpc_method_handler(act, pb.LookupRequest.FromString, pb.LookupReply.SerializeToString)
        no_server: Any = None  # wrapping needs none
        await Edge(no_server, meter).wrap("Lookup", handler).unary_unary(pb.LookupRequest(), Context())

    meter = Meter()
    with pytest.raises(RuntimeError, match=says):
        asyncio.run(call())
    assert meter.codes == [says.split()[0]]


class Left(Context):
    """Of a caller who has gone, which grpc notices as it answers."""

    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        raise grpc.aio.InternalError("the batch failed")


@pytest.mark.parametrize(("raised", "code"), [(errors.NotFound("no such"), "NOT_FOUND"), (grpc.aio.InternalError("a batch"), "CANCELLED")])
def test_a_caller_who_has_gone_is_told_nothing_and_is_no_fault(raised: Exception, code: str, caplog: pytest.LogCaptureFixture) -> None:
    async def act(_request: object, _context: object) -> None:
        raise raised

    async def call() -> None:
        handler = grpc.unary_stream_rpc_method_handler(act, pb.WatchRequest.FromString, pb.WatchEvent.SerializeToString)
        no_server: Any = None
        with pytest.raises(asyncio.CancelledError):
            await Edge(no_server, meter).wrap("Watch", handler).unary_stream(pb.WatchRequest(), Left())

    meter = Meter()
    asyncio.run(call())
    assert (meter.codes, caplog.messages) == ([code], [])


KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.KVStoreError)]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.code != "UNKNOWN"])
def test_every_error_class_comes_back_as_itself(kind: type[errors.KVStoreError]) -> None:
    back = errors.from_code(kind.code, errors.to_text(kind("what happened")))
    assert type(back) is kind
    assert grpc.StatusCode[kind.code].name == kind.code
