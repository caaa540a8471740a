"""How a client ends: closed amid calls, in a child of `fork`. A program of its own forks, as a user's would."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from kvstore import errors
from kvstore.clients.aio import AsyncKVClient
from kvstore.clients.client import KVClient
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import GEOMETRY, IDENTITY, chain
from tests.cases.figures import eventually

FORKS = """
import os, sys
from kvstore import errors
from kvstore.clients.client import KVClient
from tests.blocks import GEOMETRY, IDENTITY, chain
from tests.cases.figures import eventually

def in_child(work):
    child = os.fork()
    if not child:
        sys.exit(work())
    assert os.waitpid(child, 0)[1] == 0, work

def refused(call):
    try:
        call()
    except errors.InvalidArgument as error:
        assert "before a fork" in str(error)
    else:
        raise AssertionError(call)

def took(manager):
    with manager:
        pass

address, hashes = sys.argv[1], chain(1, 2)
with KVClient(address) as client:
    namespace = client.open_namespace(IDENTITY, GEOMETRY)
    with client.put(namespace, hashes) as put:
        for block in put.blocks:
            block.view[:] = 7
            block.done()

    def calls():
        for call in (lambda: client.lookup(namespace, hashes), client.stats, lambda: next(client.watch()),
                     lambda: took(client.get(namespace, hashes)), lambda: took(client.put(namespace, hashes)),
                     lambda: client.open_blocks(IDENTITY, GEOMETRY)):
            refused(call)
        client.close()
        with KVClient(address) as own:
            return own.lookup(own.open_namespace(IDENTITY, GEOMETRY), hashes).blocks - 2

    in_child(calls)
    with client.get(namespace, hashes) as lease:
        with client.put(namespace, chain(2, 1)) as unfinished:
            child = os.fork()
            if not child:
                sys.exit(0)  # leaves both blocks, and the client's, in the child
            assert os.waitpid(child, 0)[1] == 0
            unfinished.blocks[0].write(b"x" * GEOMETRY.block_bytes)
        assert lease.views[0][0] == 7
    assert client.lookup(namespace, chain(2, 1)).blocks == 1
    assert eventually(lambda: [(each.leases, each.reserved_slots) for each in client.stats().sessions] == [(0, 0)])

"""
FORKS_ON_A_LOOP = """
import asyncio, os, sys
from kvstore import errors
from kvstore.clients.aio import AsyncKVClient
from tests.blocks import GEOMETRY, IDENTITY, chain

async def on_a_loop():
    hashes = chain(3, 2)
    async with AsyncKVClient(sys.argv[1]) as client:
        namespace = await client.open_namespace(IDENTITY, GEOMETRY)
        async with client.put(namespace, hashes) as put:
            put.write_all([bytes([7]) * GEOMETRY.block_bytes] * 2)
        async with client.get(namespace, hashes) as lease:
            child = os.fork()
            if not child:
                try:
                    await client.lookup(namespace, hashes)
                except errors.InvalidArgument:
                    await client.close()
                    os._exit(0)
                os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
            assert lease.views[0][0] == 7

asyncio.run(on_a_loop())
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), nvme=False) as process:
        yield process


@pytest.mark.parametrize("program", [FORKS, FORKS_ON_A_LOOP], ids=["threads", "loop"])
def test_a_child_of_fork_is_told_so_and_ends_nothing_of_its_parent(shared: DaemonProcess, program: str) -> None:
    environment = dict(os.environ)
    if program == FORKS_ON_A_LOOP:
        environment["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # see AsyncKVClient
    command = [sys.executable, "-c", program, shared.address]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_closing_ends_a_watch_in_another_thread(shared: DaemonProcess) -> None:
    client = KVClient(shared.address)
    begun, ended = threading.Event(), list[Exception]()

    def watch() -> None:
        try:
            for _ in client.watch():
                begun.set()
        except errors.KVStoreError as error:
            ended.append(error)

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert begun.wait(30)
    client.close()
    watcher.join(30)
    assert [(type(each), "closed" in str(each)) for each in ended] == [(errors.SessionEnded, True)]


def test_a_closed_client_answers_every_call_alike(shared: DaemonProcess) -> None:
    client = KVClient(shared.address)
    namespace = client.open_namespace(IDENTITY, GEOMETRY)
    client.close()

    def get() -> None:
        with client.get(namespace, chain(1, 1)):
            pass

    for call in (get, client.stats, client.clear, lambda: next(client.watch()), lambda: client.open_blocks(IDENTITY, GEOMETRY)):
        with pytest.raises(errors.SessionEnded, match="closed"):
            call()


def test_closing_ends_what_other_tasks_wait_for(shared: DaemonProcess) -> None:
    asyncio.run(_closed_amid_tasks(shared.address))


async def _closed_amid_tasks(address: str) -> None:
    client = AsyncKVClient(address)
    begun = asyncio.Event()

    async def watch() -> None:
        async for _ in client.watch():
            begun.set()

    async def ask() -> None:
        while True:
            await client.stats()

    tasks = [asyncio.create_task(watch()), asyncio.create_task(ask())]
    cancelled = asyncio.create_task(watch())
    await asyncio.wait_for(begun.wait(), 30)
    cancelled.cancel()
    await client.close()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    for task in tasks:
        with pytest.raises(errors.SessionEnded, match="closed"):
            await asyncio.wait_for(task, 30)
    with pytest.raises(errors.SessionEnded, match="closed"):
        await anext(aiter(client.watch()))


def test_clients_that_are_dropped_end_their_sessions(shared: DaemonProcess) -> None:
    with KVClient(shared.address) as watcher:
        threads = threading.active_count()
        for seed in range(5):
            client = KVClient(shared.address, name="dropped")
            namespace = client.open_namespace(IDENTITY, GEOMETRY)
            with client.get(namespace, chain(seed, 1)):
                gc.collect()
                assert sessions(watcher, "dropped"), "a client in use is not dropped"
            del client
        gc.collect()
        assert eventually(lambda: not sessions(watcher, "dropped"))
        assert eventually(lambda: threading.active_count() <= threads)


def sessions(client: KVClient, name: str) -> int:
    return sum(each.client == name for each in client.stats().sessions)


def test_clients_that_are_dropped_on_a_loop_end_their_sessions(shared: DaemonProcess) -> None:
    async def drop() -> None:
        client = AsyncKVClient(shared.address, name="dropped")
        namespace = await client.open_namespace(IDENTITY, GEOMETRY)
        async with client.get(namespace, chain(1, 1)):
            pass

    async def run() -> None:
        for _ in range(3):
            await drop()
        gc.collect()
        assert await asyncio.to_thread(eventually, lambda: not sessions(watcher, "dropped"))

    with KVClient(shared.address) as watcher:
        asyncio.run(run())


def test_a_client_belongs_to_one_loop(shared: DaemonProcess) -> None:
    with pytest.raises(errors.InvalidArgument, match="no event loop"):
        AsyncKVClient(shared.address)

    async def make() -> AsyncKVClient:
        client = AsyncKVClient(shared.address)
        await client.stats()
        return client

    async def use(client: AsyncKVClient) -> None:
        for call in (client.stats, client.close, lambda: anext(aiter(client.watch()))):
            with pytest.raises(errors.InvalidArgument, match="another event loop"):
                await call()

    asyncio.run(use(asyncio.run(make())))
