"""Cases 20 to 23: what was promised to a reader is kept while its process lives, and given back as soon as it does not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore import errors
from kvstore.clients.aio import AsyncKVClient
from kvstore.clients.client import KVClient
from kvstore.clients.handles import Namespace
from kvstore.proto import kvstore_pb2 as pb
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import GEOMETRY, IDENTITY, chain, each_hash, pattern
from tests.cases.children import Child
from tests.cases.figures import all_on_disk, eventually, nothing_held, opaque, read, settled, store, tier
from tests.cases.pressure import SILENCE_S, SLOT_BYTES, SLOTS, SOON_S, free_soon, held_bytes, press, small_daemon
from tests.cases.raw import TIMEOUT_S, Raw


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon whose memory is soon full."""
    with small_daemon(tmp_path_factory.mktemp("shared")) as process:
        yield process


@pytest.fixture
def namespace(guest: KVClient) -> Namespace:
    return guest.open_namespace(IDENTITY, GEOMETRY)


def read_on(child: Child) -> None:
    """Read until the lease is over. Until the process has heard of it, what it reads is right too."""
    while True:
        assert child.ask("right")


# ---- 20


def test_ten_thousand_lookups_hold_nothing(shared: DaemonProcess, guest: KVClient, namespace: Namespace) -> None:
    """Case 20: looking up, prefetching and pinning take no lease: nothing is held, and all of memory can be had."""
    hashes = chain(1, SLOTS)
    store(guest, namespace, hashes)
    assert settled(guest)
    with Raw(shared.address) as raw:
        request = pb.LookupRequest(namespace_id=raw.open(), hashes=hashes[: 32 * 20], epoch=raw.attached.session.epoch)
        for _ in range(50):
            calls = [raw.stub.Lookup.future(request, timeout=TIMEOUT_S) for _ in range(200)]
            assert {call.result().blocks for call in calls} == {20}
    guest.pin(namespace, hashes)
    guest.prefetch(namespace, hashes)
    assert held_bytes(guest) == 0
    with guest.put(namespace, chain(2, SLOTS)) as put:
        assert len(put.blocks) == SLOTS


# ---- 21


def test_an_abort_frees_at_once(guest: KVClient, namespace: Namespace) -> None:
    """Case 21: an exception between lookup and use gives the lease, and the reservation, back without a wait."""
    store(guest, namespace, chain(1, 20))
    assert settled(guest)
    with pytest.raises(ZeroDivisionError), guest.get(namespace, chain(1, 20)) as lease:
        assert lease.blocks // 0
    assert free_soon(guest)
    with pytest.raises(ZeroDivisionError), guest.put(namespace, chain(2, 20)) as put:
        assert len(put.blocks) // 0
    assert free_soon(guest)
    assert store(guest, namespace, chain(2, 20)).names == ("stored",) * 20


async def _cancelled(address: str, count: int) -> None:
    """Begin many reads and writes, and cancel each after another moment."""
    async with AsyncKVClient(address) as client:
        namespace = await client.open_namespace(IDENTITY, GEOMETRY)

        async def one(number: int) -> None:
            if number % 2:
                async with client.get(namespace, chain(1, 100)):
                    await asyncio.sleep(10)
            async with client.put(namespace, chain(number, 5)):
                await asyncio.sleep(10)

        tasks = [asyncio.create_task(one(number)) for number in range(2, 2 + count)]
        for number, task in enumerate(tasks):
            await asyncio.sleep(0.0003 * (number % 7))
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with client.get(namespace, chain(1, 1)) as lease:
            assert lease.blocks == 1


def test_a_cancelled_call_frees_what_it_had(shared: DaemonProcess, guest: KVClient, namespace: Namespace) -> None:
    """Case 21: so does a task that is cancelled at any point of a read or a write."""
    store(guest, namespace, chain(1, 100))
    assert settled(guest)
    press(guest, namespace, 1)
    with KVClient(shared.address, name="observer") as observer:
        asyncio.run(_cancelled(shared.address, 60))
        assert nothing_held(observer)
        assert eventually(lambda: not any(session.reserved_slots + session.leases for session in observer.stats().sessions))


def test_a_death_frees_within_a_second(shared: DaemonProcess, guest: KVClient, namespace: Namespace) -> None:
    """Case 21: a process killed between lookup and use, with leases and half-filled blocks: all is free soon after its end."""
    store(guest, namespace, chain(1, 100))
    assert settled(guest)
    assert nothing_held(guest)
    with Child(shared.address) as child:
        assert child.ask("hold", 1, 100) == 100
        assert child.ask("reserve", 2, 50) == ["slot"] * 50
        assert held_bytes(guest) == 150 * SLOT_BYTES
        child.kill()
        assert free_soon(guest)
    assert store(guest, namespace, chain(2, 50)).names == ("stored",) * 50


def test_a_death_in_a_wait_frees_too(shared: DaemonProcess, guest: KVClient, namespace: Namespace) -> None:
    """Case 21: and a process killed while its blocks are still on their way up from the disk."""
    store(guest, namespace, chain(1, 400))
    assert all_on_disk(guest, 400)
    press(guest, namespace, 1)
    for _ in range(3):
        with Child(shared.address) as child:
            child.ask("lookup", 1, 1)
            child.say("hold", 1, 400)
            time.sleep(0.01)
        assert eventually(lambda: held_bytes(guest) == 0)


# ---- 22


def test_a_lease_does_not_run_out(shared: DaemonProcess, guest: KVClient, namespace: Namespace) -> None:
    """Case 22: a reader slower than every deadline and the silence allowed still reads its own bytes, under any pressure."""
    store(guest, namespace, chain(1, 100))
    with Child(shared.address) as child:
        assert child.ask("hold", 1, 100) == 100
        ends_at = time.monotonic() + 2 * SILENCE_S
        while time.monotonic() < ends_at:
            press(guest, namespace, 1)
            assert child.ask("right")


def test_a_hung_reader_loses_its_lease_in_words(shared: DaemonProcess, guest: KVClient, namespace: Namespace) -> None:
    """Case 22: a stopped process's lease ends with an error that says so; until its own end nobody's bytes come under its eyes."""
    store(guest, namespace, chain(1, 100))
    with Child(shared.address) as child:
        assert child.ask("hold", 1, 100) == 100
        child.stop()
        assert eventually(lambda: any(session.ended and session.leases for session in guest.stats().sessions))
        assert read(guest, namespace, chain(1, 100)) == 100  # the blocks are everybody's still
        press(guest, namespace)
        assert held_bytes(guest) >= 100 * SLOT_BYTES
        child.go_on()
        with pytest.raises(errors.SessionEnded, match=r"session \d+"):
            read_on(child)
        assert child.ask("peek")
        assert child.ask("hold", 1, 100) == 100  # it attaches again by itself
        assert child.ask("right")


def test_a_restart_ends_leases_in_words(daemon: DaemonProcess, client: KVClient) -> None:
    """Case 22: a lease of an earlier daemon says so when it is used; its memory is left alone as long as its process has it."""
    namespace = client.open_namespace(IDENTITY, opaque(500_000))
    store(client, namespace, chain(9, 8))
    assert all_on_disk(client, 8)
    with Child(daemon.address) as child:
        child.ask("put", 1, 100)
        assert child.ask("hold", 1, 100) == 100
        daemon.restart()
        assert tier(client, "dram").class_bytes["orphaned"] >= 100 * SLOT_BYTES
        assert read(client, namespace, chain(9, 8)) == 8
        for seed in range(20):
            assert store(client, namespace, chain(100 + seed, 8)).stored == 8
        with pytest.raises((errors.SessionEnded, errors.StaleEpoch)):
            child.ask("right")
        assert child.ask("peek")
        child.kill()
        assert eventually(lambda: tier(client, "dram").class_bytes["orphaned"] == 0, SOON_S)


# ---- 23


def test_only_a_lease_keeps_a_block(shared: DaemonProcess, guest: KVClient, namespace: Namespace) -> None:
    """Case 23: what was merely looked up may be gone when it is wanted, and that is a shorter prefix; what was acquired stays."""
    promised, found = chain(1, 100), chain(2, 100)
    store(guest, namespace, promised)
    store(guest, namespace, found)
    with KVClient(shared.address) as other, Child(shared.address) as child:
        assert other.lookup(other.open_namespace(IDENTITY, GEOMETRY), found).blocks == 100
        assert child.ask("hold", 1, 100) == 100
        with guest.get(namespace, promised) as lease:
            press(guest, namespace, 4)  # as much as memory and disk together hold, and more
            assert guest.lookup(namespace, promised).blocks == 100
            assert all(np.array_equal(view, pattern(key)) for view, key in zip(lease.views, each_hash(promised), strict=True))
            assert child.ask("right")
        assert read(guest, namespace, found) == 0
        assert child.ask("hold", 2, 100) == 0
