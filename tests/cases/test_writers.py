"""Cases 24 to 26: what was given to be filled: the key goes with the session, the slot with the last that can write into it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from kvstore import errors
from kvstore.clients import requests
from kvstore.clients.client import KVClient
from kvstore.clients.handles import OUTCOME_NAMES, Namespace
from kvstore.proto import kvstore_pb2 as pb
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import GEOMETRY, IDENTITY, chain, each_hash, pattern, right
from tests.cases.children import Child
from tests.cases.figures import all_on_disk, eventually, opaque, present, read, settled, store, store_each, tier
from tests.cases.pressure import SILENCE_S, SLOT_BYTES, SLOTS, SOON_S, free_soon, held_bytes, press, small_daemon
from tests.cases.raw import TIMEOUT_S, Raw
from tests.daemon.faulty import FaultyDaemon


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon whose memory is soon full."""
    with small_daemon(tmp_path_factory.mktemp("shared")) as process:
        yield process


@pytest.fixture
def namespace(guest: KVClient) -> Namespace:
    return guest.open_namespace(IDENTITY, GEOMETRY)


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


def test_a_load_past_its_deadline_keeps_its_slots_until_the_disk_is_done(tmp_path: Path) -> None:
    """Case 26: while the disk still fills slots of a read that was given up nobody else gets them; late bytes are where they belong."""
    late = 40  # blocks
    with FaultyDaemon(tmp_path, dram="8MiB", nvme_bytes="16MiB") as sick, KVClient(sick.address) as client:
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        store(client, namespace, chain(1, late))
        assert all_on_disk(client, late)
        sick.restart(kill=False)
        sick.fault("stuck", "read")
        with client.get(namespace, chain(1, late), timeout_s=0.2) as lease:
            assert lease.blocks == 0
        assert client.stats().counters["acquire_deadlines"] == 1
        assert tier(client, "dram").class_bytes["filling"] == late * SLOT_BYTES
        with Raw(sick.address) as raw:
            mine = raw.slots(requests.reserve(1, raw.open(), count=SLOTS))
            assert len(mine.units) == SLOTS - late, "all of memory but what the disk may still write into"
            views = [raw.attached.arena.writable_view(units, GEOMETRY.block_bytes) for units in mine.units.tolist()]
            for at, view in enumerate(views):
                view[:] = at % 251
            sick.heal()
            assert eventually(lambda: tier(client, "dram").class_bytes["filling"] == 0)
            assert all((view == at % 251).all() for at, view in enumerate(views))
            assert client.lookup(namespace, chain(1, late)).tiers == ("dram",) * late, "what came late is kept"
            assert read(client, namespace, chain(1, late)) == late
        assert client.stats().counters["corrupt_blocks"] == 0


def test_impatient_reads_among_writes_harm_nobody(shared: DaemonProcess, guest: KVClient, namespace: Namespace) -> None:
    """Case 26: the same without a fault: reads that wait for nothing, among writes that want slots: no byte ends up elsewhere."""
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
    assert guest.stats().counters["corrupt_blocks"] == 0


def test_a_stop_amid_loads_and_writes_corrupts_nothing(tmp_path: Path) -> None:
    """Case 26: SIGTERM while processes read and write: what is on disk afterwards is whole, and its own."""
    with DaemonProcess(tmp_path, dram="8MiB", nvme_bytes="16MiB") as daemon:
        with Child(daemon.address) as one, Child(daemon.address) as two:
            for number, child in enumerate((one, two)):
                child.ask("lookup", 1, 1)
                child.say("work", number, 100, 60.0)
            with KVClient(daemon.address) as watcher:
                assert eventually(lambda: tier(watcher, "nvme").blocks > 50)
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
