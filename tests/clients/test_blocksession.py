"""The store as a paged KV cache uses it, against a real daemon that is also killed."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from kvstore import errors
from kvstore.clients.blocks import BlockStore, Slots
from kvstore.clients.blocksession import BlockSession
from kvstore.clients.client import KVClient
from kvstore.clients.link import ATTACH_TIMEOUT_S
from kvstore.clients.requests import MAX_BLOCKS_PER_CALL
from kvstore.geometry import Geometry
from kvstore.hashing import fingerprint
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import BLOCK_TOKENS, GEOMETRY, IDENTITY, chain, each_hash, pattern
from tests.cases.figures import eventually

UNIT_BYTES = 4096
ASKED = 60  # calls to a daemon that stands still: far more than have time to wait for it one after another
TOGETHER_S = 20.0  # seconds that all of them may take on a machine that does other things too; each waits for more than a third of one


@pytest.fixture
def blocks(daemon: DaemonProcess) -> Iterator[BlockStore]:
    with KVClient(daemon.address) as client:
        store = client.open_blocks(IDENTITY, GEOMETRY)
    yield store
    store.close()


def slot_bytes(blocks: BlockStore, slots: Slots, row: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    start = int(slots.units[row]) * UNIT_BYTES
    return blocks.arena[start : start + GEOMETRY.block_bytes]


def fill(blocks: BlockStore, slots: Slots, hashes: bytes) -> None:
    for row, key in enumerate(each_hash(hashes)):
        slot_bytes(blocks, slots, row)[:] = pattern(key)


def holds(blocks: BlockStore, slots: Slots, hashes: bytes) -> bool:
    return all(np.array_equal(slot_bytes(blocks, slots, row), pattern(key)) for row, key in enumerate(each_hash(hashes)[: len(slots)]))


def root() -> bytes:
    return fingerprint(IDENTITY)


def store(blocks: BlockStore, lease: int, hashes: bytes) -> Slots:
    slots = blocks.reserve(len(hashes) // 32)
    assert len(slots) == len(hashes) // 32
    fill(blocks, slots, hashes)
    blocks.commit(lease, slots, hashes, root())
    assert blocks.flush(5)
    return slots


def held(daemon: DaemonProcess) -> int:
    with KVClient(daemon.address) as client:
        return next(tier.held_bytes for tier in client.stats().tiers if tier.tier == "dram")


def wait_until_held(daemon: DaemonProcess, slots: int) -> None:
    """Copies to the disk hold slots too, for as long as they take."""
    assert eventually(lambda: held(daemon) == slots * GEOMETRY.slot_bytes), f"{held(daemon) // GEOMETRY.slot_bytes} slots are held"


def attached_again(blocks: BlockStore) -> bool:
    """Whether the daemon that came back gives slots."""
    try:
        slots = blocks.reserve(1)
    except errors.Unavailable:
        return False
    blocks.abandon(slots)
    return len(slots) == 1


@contextmanager
def standing_still(daemon: DaemonProcess) -> Iterator[None]:
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(daemon.pid, signal.SIGCONT)


def test_committed_slots_are_found_and_stay_where_they_are(blocks: BlockStore) -> None:
    hashes = chain(1, 4)
    written = store(blocks, 1, hashes)
    read = blocks.acquire(2, hashes, 1.0)
    assert read.units.tolist() == written.units.tolist()
    assert holds(blocks, read, hashes)


def test_acquire_answers_with_the_leading_blocks_only(blocks: BlockStore) -> None:
    store(blocks, 1, chain(2, 3))
    assert len(blocks.acquire(2, chain(2, 5), 1.0)) == 3
    assert len(blocks.acquire(3, chain(3, 5), 1.0)) == 0
    blocks.release(3)


def test_what_is_committed_twice_stays_private_and_readable(blocks: BlockStore, daemon: DaemonProcess) -> None:
    hashes = chain(4, 2)
    store(blocks, 1, hashes)
    twin = blocks.reserve(2)
    fill(blocks, twin, hashes)
    blocks.commit(2, twin, hashes, root())
    assert blocks.flush(5)
    assert isinstance(blocks, BlockSession)
    assert blocks.outcomes == {"stored": 2, "exists": 2, "failed": 0}
    assert holds(blocks, twin, hashes)
    blocks.abandon(twin)
    blocks.release(1)
    blocks.release(2)
    wait_until_held(daemon, 0)


def test_a_lease_is_released_from_its_tail(blocks: BlockStore, daemon: DaemonProcess) -> None:
    store(blocks, 1, chain(5, 4))
    blocks.release(1, keep_blocks=1)
    wait_until_held(daemon, 1)
    blocks.release(1)
    blocks.release(99)
    wait_until_held(daemon, 0)


def test_a_full_store_reserves_less_and_says_so_at_once(blocks: BlockStore) -> None:
    capacity = 64 * 2**20 // GEOMETRY.slot_bytes
    got = blocks.reserve(capacity + 100)
    started_at = time.monotonic()
    assert capacity * 0.9 < len(got) <= capacity
    assert len(blocks.reserve(10)) < 10
    assert time.monotonic() - started_at < 1
    blocks.abandon(got)
    assert len(blocks.reserve(10)) == 10


def test_submitting_takes_under_a_millisecond(blocks: BlockStore) -> None:
    slots = blocks.reserve(64)
    hashes = chain(6, 64)
    fill(blocks, slots, hashes)
    times = []
    for row, key in enumerate(each_hash(hashes)):
        parent = root() if row == 0 else each_hash(hashes)[row - 1]
        started_at = time.perf_counter()
        blocks.commit(1, Slots(slots.units[row : row + 1], slots.generations[row : row + 1]), key, parent)
        times.append(time.perf_counter() - started_at)
    assert blocks.flush(5)
    assert sorted(times)[len(times) // 2] < 0.001
    assert len(blocks.acquire(2, hashes, 1.0)) == 64


def test_without_a_daemon_slots_in_hand_stay_valid_and_calls_say_unavailable(blocks: BlockStore, daemon: DaemonProcess) -> None:
    hashes = chain(7, 3)
    mine = store(blocks, 1, hashes)
    private = blocks.reserve(2)
    daemon.kill9()
    time.sleep(0.2)
    slot_bytes(blocks, private, 0)[:] = 7
    assert holds(blocks, mine, hashes)
    with pytest.raises(errors.Unavailable):
        blocks.reserve(1)
    started_at = time.monotonic()
    with pytest.raises(errors.Unavailable):
        blocks.acquire(2, hashes, 1.0)
    assert time.monotonic() - started_at < 0.5, "it was just tried"
    blocks.commit(1, private, chain(8, 2), root())
    blocks.release(1)
    assert blocks.flush(1)


def test_after_a_restart_old_slots_are_kept_until_given_back(blocks: BlockStore, daemon: DaemonProcess) -> None:
    hashes = chain(9, 3)
    mine = store(blocks, 1, hashes)
    private = blocks.reserve(2)
    slot_bytes(blocks, private, 1)[:] = 9
    daemon.restart()
    assert eventually(lambda: attached_again(blocks))
    capacity = 64 * 2**20 // GEOMETRY.slot_bytes
    new = blocks.reserve(capacity)
    taken = set(mine.units.tolist()) | set(private.units.tolist())
    assert len(new) > capacity * 0.9
    assert not taken & set(new.units.tolist())
    for row in range(len(new)):
        slot_bytes(blocks, new, row)[:] = 1
    assert holds(blocks, mine, hashes)
    assert (slot_bytes(blocks, private, 1) == 9).all()
    assert isinstance(blocks, BlockSession)
    failed = blocks.outcomes.get("failed", 0)
    blocks.commit(2, private, chain(10, 2), root())
    assert blocks.outcomes["failed"] == failed + 2, "a slot of the session that is over cannot be committed"
    blocks.release(1)
    assert held(daemon) == (len(new) + 5) * GEOMETRY.slot_bytes, "until the last of the old session's slots is given back"
    blocks.abandon(private)
    wait_until_held(daemon, len(new))


@pytest.mark.parametrize("dram", ["32MiB", "96MiB"])
def test_a_daemon_that_comes_back_with_other_memory_is_used_once_hands_are_empty(
    blocks: BlockStore, daemon: DaemonProcess, dram: str
) -> None:
    hashes, private = chain(7, 2), chain(8, 1)
    store(blocks, 1, hashes)
    assert blocks.flush(10)
    in_hand = blocks.reserve(1)
    fill(blocks, in_hand, private)
    old = blocks.arena
    daemon.flags[daemon.flags.index("--dram") + 1] = dram
    daemon.restart(kill=False)
    for _ in range(3):
        with pytest.raises(errors.Unavailable):
            blocks.reserve(1)
        time.sleep(0.6)
    assert blocks.arena is old
    assert holds(blocks, in_hand, private), "what is in hand stays what it is"
    blocks.commit(2, in_hand, private, root())
    blocks.abandon(in_hand)
    blocks.release(1)
    blocks.release(2)
    assert eventually(lambda: found_again(blocks, hashes))
    assert len(blocks.arena) != len(old)
    assert len(blocks.acquire(9, private, 1.0)) == 0, "what was filled in the old memory is not published in the new"
    del old
    gc.collect()
    assert not deleted_arenas(daemon), "the old one is let go, and those that were refused"


def found_again(blocks: BlockStore, hashes: bytes) -> bool:
    try:
        return holds(blocks, blocks.acquire(3, hashes, 2.0), hashes)
    except errors.Unavailable:
        return False


def deleted_arenas(daemon: DaemonProcess) -> list[str]:
    """This process's maps of a daemon's arenas whose files are gone."""
    with open("/proc/self/maps", encoding="ascii") as maps:
        return [line for line in maps if str(daemon.shared) in line and "(deleted)" in line]


def test_more_blocks_than_a_call_takes_are_committed_all_the_same(daemon: DaemonProcess) -> None:
    tiny = Geometry("mha", 1, 1, 64, 64, "bfloat16", BLOCK_TOKENS)
    count = MAX_BLOCKS_PER_CALL + 500
    hashes = chain(12, count)
    with KVClient(daemon.address) as client:
        blocks = client.open_blocks(IDENTITY, tiny)
        first, second = blocks.reserve(count), blocks.reserve(500)
        assert (len(first), len(second)) == (MAX_BLOCKS_PER_CALL, 500)
        slots = Slots(np.concatenate([first.units, second.units]), np.concatenate([first.generations, second.generations]))
        blocks.commit(1, slots, hashes, root())
        assert blocks.flush(10)
        namespace = client.open_namespace(IDENTITY, tiny)
        assert client.lookup(namespace, hashes[: 32 * MAX_BLOCKS_PER_CALL]).blocks == MAX_BLOCKS_PER_CALL
        assert client.lookup(namespace, hashes[32 * MAX_BLOCKS_PER_CALL :]).blocks == 500
        blocks.release(1)
        more = blocks.reserve(1000)
        blocks.abandon(more)
        blocks.close()


def test_close_gives_everything_back(blocks: BlockStore, daemon: DaemonProcess) -> None:
    store(blocks, 1, chain(11, 4))
    blocks.reserve(7)
    blocks.close()
    blocks.close()
    wait_until_held(daemon, 0)
    with pytest.raises(errors.Unavailable):
        blocks.reserve(1)


@pytest.mark.parametrize("first", ["reserve", "acquire"])
def test_a_daemon_that_stands_still_is_waited_for_once(
    blocks: BlockStore, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """And is used again as soon as it gives a sign of life; what it was asked meanwhile is taken back."""
    hashes = chain(20, 3)
    store(blocks, 1, hashes)
    monkeypatch.setattr("kvstore.clients.blocksession.RESERVE_S", 0.4)
    monkeypatch.setattr("kvstore.clients.blocksession.GRACE_S", 0.4)
    calls: dict[str, Callable[[], Slots]] = {"reserve": lambda: blocks.reserve(5), "acquire": lambda: blocks.acquire(2, hashes, 0.0)}
    with standing_still(daemon):
        with pytest.raises(errors.Unavailable, match="no answer within"):
            calls[first]()
        began_at = time.monotonic()
        for _ in range(ASKED // 2):
            for call in calls.values():
                with pytest.raises(errors.Unavailable, match="did not answer"):
                    call()
        assert time.monotonic() - began_at < TOGETHER_S
    assert eventually(lambda: attached_again(blocks))
    assert len(blocks.acquire(3, hashes, 5.0)) == 3
    blocks.release(3)
    wait_until_held(daemon, 3)


def test_nobody_waits_for_long_behind_a_session_that_does_not_come(blocks: BlockStore, daemon: DaemonProcess) -> None:
    """The daemon was restarted, and stands still before it has taken anybody."""
    outcomes: list[str] = []

    def ask() -> None:
        for _ in range(ASKED // 10):
            try:
                blocks.reserve(1)
            except errors.KVStoreError as error:
                outcomes.append(type(error).__name__)

    daemon.restart()
    with standing_still(daemon):
        threads = [threading.Thread(target=ask) for _ in range(10)]
        began_at = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert time.monotonic() - began_at < ATTACH_TIMEOUT_S
    assert outcomes == ["Unavailable"] * ASKED
    assert eventually(lambda: attached_again(blocks))
