"""Lookups of an asyncio program over the socket for them alone: the service's answers, and never another question's."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore import errors
from kvstore.clients.aio import AsyncKVClient
from kvstore.clients.aio_quick import MAX_CONNECTIONS, AsyncQuickLookups
from kvstore.clients.handles import Namespace
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.lookups import REPLY, REQUEST, SUFFIX
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import GEOMETRY, IDENTITY, chain, pattern

TIMEOUT_S = 30.0  # seconds: far beyond what an answer takes
SOON_S = 0.05  # seconds: for an answer that does not come

Act = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("quick"), nvme=False) as process:
        yield process


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that awaits, as one that pytest calls."""

    @functools.wraps(test)
    def run(*args: object, **named: object) -> None:
        asyncio.run(test(*args, **named))

    return run


async def stored(client: AsyncKVClient, seed: int, blocks: int) -> tuple[Namespace, bytes]:
    """A chain that is there."""
    space, hashes = await client.open_namespace(IDENTITY, GEOMETRY), chain(seed, blocks)
    async with client.put(space, hashes) as put:
        for block in put.blocks:
            block.write(pattern(block.hash))
    return space, hashes


def request(space: Namespace, hashes: bytes, epoch: str = "") -> pb.LookupRequest:
    return pb.LookupRequest(namespace_id=space.id, hashes=hashes, epoch=epoch or space.epoch)


@pytest.mark.parametrize("blocks", [1, 2048])
@on_a_loop
async def test_it_answers_as_the_service_does(daemon: DaemonProcess, blocks: int) -> None:
    async with AsyncKVClient(daemon.address) as client:
        space, hashes = await stored(client, 100 + blocks, blocks)
        asked = request(space, hashes + chain(7, 5))
        answer = await client._quick.ask(asked, TIMEOUT_S)
        assert answer is not None
        assert answer.blocks == blocks
        assert answer == await client._stub.Lookup(asked, timeout=TIMEOUT_S)
        assert (await client.lookup(space, asked.hashes)).blocks == blocks
        assert client._quick._idle, "the call went that way too"


@on_a_loop
async def test_its_errors_are_those_of_the_service(daemon: DaemonProcess) -> None:
    async with AsyncKVClient(daemon.address) as client:
        space, hashes = await stored(client, 2, 2)
        with pytest.raises(errors.StaleEpoch):
            await client._quick.ask(request(space, hashes, "f" * 16), TIMEOUT_S)
        with pytest.raises(errors.InvalidArgument):
            await client._quick.ask(request(space, b""), TIMEOUT_S)
        assert (await client.lookup(space, hashes)).blocks == 2


@on_a_loop
async def test_many_at_once_share_a_few_connections(daemon: DaemonProcess) -> None:
    """Each gets the answer to its own question, also where others are given up meanwhile."""
    async with AsyncKVClient(daemon.address) as client:
        space, hashes = await stored(client, 3, 64)
        calls = [asyncio.create_task(client.lookup(space, hashes[: 32 * (1 + n % 64)])) for n in range(300)]
        for n, call in enumerate(calls[::3]):
            asyncio.get_running_loop().call_later(0.0003 * n, call.cancel)
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert len(client._quick._idle) <= MAX_CONNECTIONS
        kept = [(n, each) for n, each in enumerate(found) if not isinstance(each, asyncio.CancelledError)]
        assert len(kept) >= 200
        assert all(not isinstance(each, BaseException) and each.blocks == 1 + n % 64 for n, each in kept)


@on_a_loop
async def test_without_it_the_service_answers(daemon: DaemonProcess) -> None:
    async with AsyncKVClient(daemon.address) as client:
        space, hashes = await stored(client, 4, 2)
        client._quick = AsyncQuickLookups("unix:/nowhere/s")
        assert await client._quick.ask(request(space, hashes), TIMEOUT_S) is None
        assert (await client.lookup(space, hashes)).blocks == 2
        assert await AsyncQuickLookups("localhost:7").ask(request(space, hashes), TIMEOUT_S) is None


@on_a_loop
async def test_a_restart_is_seen_by_who_was_connected(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, nvme=False) as daemon:
        async with AsyncKVClient(daemon.address) as client:
            space, hashes = await stored(client, 8, 2)
            assert (await client.lookup(space, hashes)).blocks == 2
            daemon.restart()
            assert (await client.lookup(space, hashes)).blocks == 0
            daemon.stop()
            with pytest.raises(errors.Unavailable):
                await client.lookup(space, hashes)
        with pytest.raises(errors.SessionEnded):
            await client.lookup(space, hashes)


# ---- a daemon that does not answer in time


@asynccontextmanager
async def serving(tmp_path: Path, *acts: Act) -> AsyncIterator[AsyncQuickLookups]:
    """A client of a socket whose first connections are served so, one each."""
    left = iter(acts)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await next(left)(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_unix_server(serve, str(tmp_path / "s") + SUFFIX)
    lookups = AsyncQuickLookups(f"unix:{tmp_path / 's'}")
    try:
        yield lookups
    finally:
        lookups.close()
        server.close()


async def asked(reader: asyncio.StreamReader) -> int:
    """Read one question: its blocks."""
    blocks = int(REQUEST.unpack(await reader.readexactly(REQUEST.size))[2])
    await reader.readexactly(32 * blocks)
    return blocks


async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As the daemon does where all of it is there."""
    while True:
        try:
            blocks = await asked(reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        writer.write(REPLY.pack(0, blocks) + bytes([1]) * blocks)


def ask(lookups: AsyncQuickLookups, blocks: int, timeout_s: float = TIMEOUT_S) -> Awaitable[pb.LookupReply | None]:
    return lookups.ask(pb.LookupRequest(namespace_id=1, epoch="e", hashes=bytes(32 * blocks)), timeout_s)


@pytest.mark.parametrize("sent", [0, 3, REPLY.size, REPLY.size + 2])
@on_a_loop
async def test_what_was_cancelled_is_not_the_next_ones_answer(tmp_path: Path, sent: int) -> None:
    """Whatever part of the answer had come by then: the rest comes later, and is nobody's."""
    heard, cancelled = asyncio.Event(), asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer = REPLY.pack(0, await asked(reader)) + bytes([2]) * 5
        writer.write(answer[:sent])
        heard.set()
        await cancelled.wait()
        writer.write(answer[sent:])
        await answers(reader, writer)

    async with serving(tmp_path, slow, answers) as lookups:
        call = asyncio.ensure_future(ask(lookups, 5))
        await heard.wait()
        await asyncio.sleep(SOON_S)  # what was sent has mostly arrived by then
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        cancelled.set()
        for blocks in (2, 3):
            reply = await ask(lookups, blocks)
            assert reply is not None
            assert reply.tiers == [bytes([1]) * blocks]
        assert len(lookups._idle) == 1


@on_a_loop
async def test_an_answer_that_does_not_come_is_an_error_in_time(tmp_path: Path) -> None:
    over = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()

    async with serving(tmp_path, silent, answers) as lookups:
        with pytest.raises(errors.DeadlineExceeded):
            await ask(lookups, 5, SOON_S)
        assert not lookups._idle
        reply = await ask(lookups, 1)
        assert reply is not None
        over.set()


@on_a_loop
async def test_a_connection_that_ends_within_an_answer_is_left_for_the_service(tmp_path: Path) -> None:
    async def dying(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked(reader)
        writer.write(REPLY.pack(0, 5) + b"\1")

    async with serving(tmp_path, dying) as lookups:
        assert await ask(lookups, 5) is None
        assert await ask(lookups, 5) is None, "for a while it is not tried again"


@on_a_loop
async def test_a_connection_that_was_closed_meanwhile_is_replaced(tmp_path: Path) -> None:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        blocks = await asked(reader)
        writer.write(REPLY.pack(0, blocks) + bytes([1]) * blocks)

    async with serving(tmp_path, once, once, once) as lookups:
        for blocks in (1, 2, 3):
            reply = await ask(lookups, blocks)
            assert reply is not None
            assert reply.blocks == blocks
