"""Cases 20 to 26: what is promised is kept while its process lives, and given back as soon as it does not."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from kvstore import errors
from kvstore.clients import requests
from kvstore.clients.aio import AsyncKVClient
from kvstore.clients.client import KVClient
from kvstore.clients.handles import OUTCOME_NAMES, Namespace
from kvstore.proto import kvstore_pb2 as pb
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import GEOMETRY, IDENTITY, chain, each_hash, pattern, right
from tests.cases.children import Child
from tests.cases.figures import all_on_disk, eventually, opaque, present, read, settled, store, store_each, tier
from tests.cases.raw import TIMEOUT_S, Raw

SLOT_BYTES = GEOMETRY.slot_bytes
SLOTS = 512  # of 16 KiB in 8 MiB
PART = 64  # blocks stored at once: far fewer than what nobody holds
SILENCE_S = 1.0  # seconds
SOON_S = 1.0  # seconds: within which a dead process's memory is free


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon with 8 MiB of memory and 16 of disk, which gives a silent session up after a second."""
    flags = ["--session-silence-s", str(SILENCE_S), "--acquire-timeout-s", "2"]
    with DaemonProcess(tmp_path_factory.mktemp("shared"), flags, dram="8MiB", nvme_bytes="16MiB") as process:
        yield process


@pytest.fixture
def namespace(guest: KVClient) -> Namespace:
    return guest.open_namespace(IDENTITY, GEOMETRY)


def held_bytes(client: KVClient) -> int:
    """What leases, reservations, orphans and transfers keep of memory."""
    return tier(client, "dram").held_bytes


def free_soon(client: KVClient) -> bool:
    """Whether nothing is held of memory a second from now, or sooner."""
    return eventually(lambda: held_bytes(client) == 0, SOON_S)


def press(client: KVClient, namespace: Namespace, rounds: int = 2) -> None:
    """Store more than the memory holds, a part at a time, so that all that is not held is pushed out; down to the disk if need be."""
    for each in range(rounds):
        hashes, parent = chain(1000 + each, SLOTS), namespace.root
        for start in range(0, len(hashes), 32 * PART):
            part = hashes[start : start + 32 * PART]
            assert store(client, namespace, part, parent).stored == PART
            parent = part[-32:]
        assert settled(client)


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
        assert eventually(lambda: held_bytes(observer) == 0, 5.0)
        assert sum(session.reserved_slots + session.leases for session in observer.stats().sessions) == 0


def test_a_death_frees_within_a_second(shared: DaemonProcess, guest: KVClient, namespace: Namespace) -> None:
    """Case 21: a process killed between lookup and use, with leases and half-filled blocks: all is free soon after its end."""
    store(guest, namespace, chain(1, 100))
    assert settled(guest)
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
        ends_at = time.monotonic() + 3 * SILENCE_S
        while time.monotonic() < ends_at:
            press(guest, namespace, 1)
            assert child.ask("right")


def test_a_hung_reader_loses_its_lease_in_words(shared: DaemonProcess, guest: KVClient, namespace: Namespace) -> None:
    """Case 22: a stopped process's lease ends with an error that says so; until its own end nobody's bytes come under its eyes."""
    store(guest, namespace, chain(1, 100))
    with Child(shared.address) as child:
        assert child.ask("hold", 1, 100) == 100
        child.stop()
        assert eventually(lambda: any(session.ended for session in guest.stats().sessions))
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


# ---- 24


def test_a_killed_writers_keys_and_slots_are_free(shared: DaemonProcess, guest: KVClient, namespace: Namespace) -> None:
    """Case 24: until then a second writer is told that they are in flight; within a second of the kill it may write them itself."""
    with Child(shared.address) as child:
        assert child.ask("reserve", 1, 10) == ["slot"] * 10
        assert store(guest, namespace, chain(1, 10)).names == ("in_flight",) * 10
        assert guest.lookup(namespace, chain(1, 10)).blocks == 0
        child.kill()
        assert eventually(lambda: store(guest, namespace, chain(1, 10)).stored == 10, SOON_S)
        assert free_soon(guest)
    assert read(guest, namespace, chain(1, 10)) == 10


def test_a_hung_writers_keys_are_free_its_slots_not(shared: DaemonProcess, guest: KVClient, namespace: Namespace) -> None:
    """Case 24: stopped past the silence allowed: the keys may be written by others, the slots by nobody until the process is gone."""
    with Child(shared.address) as child:
        assert child.ask("reserve", 1, 60) == ["slot"] * 60
        child.stop()
        assert eventually(lambda: store(guest, namespace, chain(1, 60)).stored == 60, 10 * SILENCE_S)
        assert tier(guest, "dram").class_bytes["orphaned"] == 60 * SLOT_BYTES
        with guest.get(namespace, chain(1, 60)) as lease:
            press(guest, namespace)
            assert tier(guest, "dram").class_bytes["orphaned"] == 60 * SLOT_BYTES
            child.go_on()
            child.ask("scribble", 255)
            with pytest.raises(errors.SessionEnded):
                child.ask("commit")
            assert lease.blocks == 60
            assert right(lease.views, chain(1, 60))
            assert all(present(guest, namespace, chain(1, 60)))
        assert sum(read(guest, namespace, key) for key in each_hash(chain(1001, SLOTS))) > 100


def test_a_hung_writers_slots_are_free_with_its_end(shared: DaemonProcess, guest: KVClient) -> None:
    """Case 24: and within a second of that end they are."""
    with Child(shared.address) as child:
        child.ask("reserve", 2, 40)
        child.stop()
        assert eventually(lambda: tier(guest, "dram").class_bytes["orphaned"] == 40 * SLOT_BYTES)
        child.kill()
        assert free_soon(guest)


# ---- 25


def test_writers_of_one_key_make_one_whole_value(shared: DaemonProcess, guest: KVClient, namespace: Namespace) -> None:
    """Case 25: processes that write the same keys at once: each is told what became of each block, and what is visible is whole."""
    with Child(shared.address) as one, Child(shared.address) as two, Child(shared.address) as three:
        children = (one, two, three)
        for seed in range(30):
            for child in children:
                child.say("put", seed, 20)
            assert read(guest, namespace, chain(seed, 20)) <= 20
            outcomes = [child.hear() for child in children]
            for block in range(20):
                told = sorted(outcome[block] for outcome in outcomes)
                assert told.count("stored") == 1
                assert set(told) <= {"stored", "exists", "in_flight"}
            assert read(guest, namespace, chain(seed, 20)) == 20


def test_the_first_commit_wins(shared: DaemonProcess, guest: KVClient, namespace: Namespace) -> None:
    """Case 25: of two slots filled for one key the first committed is the block; the second writer is told, and where it is."""
    key = chain(1, 1)
    with Raw(shared.address) as one, Raw(shared.address) as two:
        mine = one.open()
        slots = [session.slots(requests.reserve(1, mine, count=1)) for session in (one, two)]
        for session, slot, name in zip((one, two), slots, (key, bytes(32)), strict=True):
            session.attached.arena.writable_view(int(slot.units[0]), GEOMETRY.block_bytes)[:] = pattern(name)
        commits = [requests.commit(1, mine, (slot.units, slot.generations), key, namespace.root) for slot in slots]
        first, second = one.slots(commits[0]), two.slots(commits[1])
        assert [OUTCOME_NAMES[each.outcomes[0]] for each in (first, second)] == ["stored", "exists"]
        assert second.units.tolist() == slots[0].units.tolist()
        assert np.array_equal(two.attached.arena.view(int(second.units[0]), GEOMETRY.block_bytes), pattern(key))
        again = two.slots(commits[1])  # the slot is still its own, and the key still another's
        assert OUTCOME_NAMES[again.outcomes[0]] == "exists"
    assert read(guest, namespace, key) == 1


# ---- 26


def test_a_load_past_its_deadline_harms_nobody(shared: DaemonProcess, guest: KVClient, namespace: Namespace) -> None:
    """Case 26: reads given up while the disk still fills their slots, among writes that want slots: no byte ends up elsewhere."""
    store_each(guest, namespace, chain(1, 300))
    stop = threading.Event()

    def impatient() -> int:
        wrong = 0
        with KVClient(shared.address) as mine:
            own = mine.open_namespace(IDENTITY, GEOMETRY)
            while not stop.is_set():
                for key in each_hash(chain(1, 300)):
                    with mine.get(own, key, timeout_s=0.0) as lease:
                        wrong += not right(lease.views, key)
        return wrong

    with ThreadPoolExecutor(1) as pool:
        wrong = pool.submit(impatient)
        for _ in range(2):
            press(guest, namespace)
            assert sum(read(guest, namespace, key) for key in each_hash(chain(1001, SLOTS))) > 0
        stop.set()
        assert wrong.result() == 0
    assert settled(guest)
    assert eventually(lambda: held_bytes(guest) == 0)
    assert guest.stats().counters["acquire_deadlines"] > 0
    assert guest.stats().counters["corrupt_blocks"] == 0


def test_a_stop_amid_loads_and_writes_corrupts_nothing(tmp_path: Path) -> None:
    """Case 26: SIGTERM while processes read and write: what is on disk afterwards is whole, and its own."""
    with DaemonProcess(tmp_path, dram="8MiB", nvme_bytes="16MiB") as daemon:
        with Child(daemon.address) as one, Child(daemon.address) as two:
            for number, child in enumerate((one, two)):
                child.ask("lookup", 1, 1)
                child.say("work", number, 100, 60.0)
            time.sleep(0.7)
            assert daemon.stop() == 0
        daemon.start()
        with KVClient(daemon.address) as client:
            namespace = client.open_namespace(IDENTITY, GEOMETRY)
            found = tier(client, "nvme").blocks
            assert found > 0
            assert sum(read(client, namespace, chain(seed, 12)) for seed in range(100)) > 0
            assert client.stats().counters["corrupt_blocks"] == 0


def test_an_upload_cut_off_leaves_nothing(guest: KVClient) -> None:
    """Case 26: a client elsewhere that goes away in the middle of a block: no block, no slot kept, and the key is free."""
    large = guest.open_namespace(IDENTITY, opaque(1_500_000))
    key = chain(1, 1)
    going = threading.Event()

    def half() -> Iterator[pb.BlockBytes]:
        piece = bytes(1 << 20)
        yield pb.BlockBytes(namespace_id=large.id, epoch=large.epoch, hash=key, parent=large.root, offset_bytes=0, data=piece)
        going.wait(TIMEOUT_S)

    with Raw(guest.place.removeprefix("unix:")) as raw:
        call = raw.stub.Write.future(half(), timeout=TIMEOUT_S)
        assert eventually(lambda: tier(guest, "dram").class_bytes["reserved"] > 0)
        assert guest.lookup(large, key).blocks == 0
        call.cancel()
        going.set()
        with suppress(Exception):
            call.result()
    assert free_soon(guest)
    assert present(guest, large, key) == [False]
    assert store(guest, large, key).names == ("stored",)
    assert read(guest, large, key) == 1
