"""Cases 27 to 32 and 34: full is an ordinary state: bounded, honest, and over as soon as something is given back."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from kvstore import errors
from kvstore.clients import requests
from kvstore.clients.client import KVClient
from kvstore.clients.handles import OUTCOME_NAMES, Namespace
from kvstore.clients.steps import packed_checksum
from kvstore.geometry import Geometry
from kvstore.hashing import Identity
from kvstore.proto import kvstore_pb2 as pb
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import GEOMETRY, IDENTITY, chain, each_hash, pattern
from tests.cases.figures import all_on_disk, eventually, opaque, present, private_bytes, read, settled, store, store_each, tier
from tests.cases.raw import TIMEOUT_S, Raw

SLOT_BYTES = GEOMETRY.slot_bytes
SLOTS = 512  # of 16 KiB in 8 MiB
QUICK_S = 5.0  # seconds: far beyond what an answer takes, also while the machine stands still; half of what anybody waits for blocks
LARGE = opaque(512 << 10)  # bytes: four fill an extent
LARGEST = opaque(2 << 20)  # bytes: one fills an extent


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon with 8 MiB of memory, four extents, and no disk."""
    with DaemonProcess(tmp_path_factory.mktemp("shared"), dram="8MiB", nvme=False) as process:
        yield process


@pytest.fixture
def full(shared: DaemonProcess, guest: KVClient) -> Iterator[Raw]:
    """A session that holds all of memory but twelve slots, as reservation 1."""
    with Raw(shared.address) as raw:
        assert len(raw.slots(requests.reserve(1, raw.open(), count=SLOTS - 12)).units) == SLOTS - 12
        yield raw
        raw.ask(requests.abandon(1))


@pytest.fixture
def namespace(guest: KVClient) -> Namespace:
    return guest.open_namespace(IDENTITY, GEOMETRY)


def whole(client: KVClient) -> bool:
    """Whether every byte of every tier is in just one class."""
    return all(sum(each.class_bytes.values()) == each.capacity_bytes for each in client.stats().tiers)


# ---- 27, 32


def test_a_full_pool_answers_at_once(full: Raw, guest: KVClient, namespace: Namespace) -> None:
    """Cases 27 and 32: what fits is granted, then the first block without room is told, and nothing is tried behind it."""
    for seed in range(50):
        started_at = time.monotonic()
        with guest.put(namespace, chain(seed, 40)) as put:
            names = put.names
        assert time.monotonic() - started_at < QUICK_S
        assert names == ("slot",) * 12 + ("no_room",) + ("none",) * 27
    assert guest.stats().counters["no_room"] >= 50


def test_room_is_there_once_it_is_given_back(full: Raw, guest: KVClient, namespace: Namespace) -> None:
    """Case 32: no room is a passing state: the same call succeeds as soon as somebody lets go."""
    assert store(guest, namespace, chain(1, 40)).stored == 12
    full.ask(requests.abandon(1))
    assert store(guest, namespace, chain(1, 40)).names == ("exists",) * 12 + ("stored",) * 28
    assert read(guest, namespace, chain(1, 40)) == 40


def test_what_did_not_fit_leaves_no_hole(full: Raw, guest: KVClient, namespace: Namespace) -> None:
    """Case 32: however often a write finds too little room, what is stored of its chain is a prefix, and is what it was told."""
    for seed, step in ((1, 5), (2, 7), (3, 40)):
        for end in range(step, 41, step):
            put = store(guest, namespace, chain(seed, end))
            here = present(guest, namespace, chain(seed, 40))
            assert here == [True] * put.stored + [False] * (40 - put.stored)
        assert guest.lookup(namespace, chain(seed, 40)).blocks == 12


def test_writes_over_the_wire_stop_there_too(full: Raw, guest: KVClient, namespace: Namespace) -> None:
    """Case 32: a client that cannot map the arena is told block by block as well, and may try again."""
    held = full.slots(requests.reserve(2, full.open(), count=12))
    assert len(held.units) == 12
    pieces = [
        pb.BlockBytes(
            namespace_id=namespace.id,
            epoch=namespace.epoch,
            hash=key,
            parent=namespace.root,
            data=pattern(key).tobytes(),
            last=True,
            checksum=packed_checksum(namespace.digest, key, pattern(key).tobytes()),
        )
        for key in each_hash(chain(1, 3))
    ]
    reply: pb.WriteReply = full.stub.Write(iter(pieces), timeout=TIMEOUT_S)
    assert [OUTCOME_NAMES[each] for each in reply.outcomes] == ["no_room", "none", "none"]
    full.ask(requests.abandon(2))
    reply = full.stub.Write(iter(pieces), timeout=TIMEOUT_S)
    assert [OUTCOME_NAMES[each] for each in reply.outcomes] == ["stored"] * 3


def test_a_full_memory_shortens_a_read(tmp_path: Path) -> None:
    """Case 27: blocks that cannot come up for want of room end the prefix at once, and say why."""
    with DaemonProcess(tmp_path, dram="8MiB", nvme_bytes="8MiB") as daemon, KVClient(daemon.address) as client:
        store(client, client.open_namespace(IDENTITY, GEOMETRY), chain(1, 40))
        assert all_on_disk(client, 40)
        daemon.restart(kill=False)
        with Raw(daemon.address) as raw:
            namespace = raw.open()
            raw.slots(requests.reserve(1, namespace, count=SLOTS - 12))
            started_at = time.monotonic()
            granting = raw.acquire(1, chain(1, 40), namespace=namespace)
            assert time.monotonic() - started_at < QUICK_S
            assert (granting.blocks, granting.ended) == (12, "no_room")


def test_one_session_cannot_starve_another(shared: DaemonProcess, guest: KVClient) -> None:
    """Case 27: a session's own limit, and what others are guaranteed, end its grants with a status that says so."""
    with Raw(shared.address, limit_bytes=10 * SLOT_BYTES) as small, Raw(shared.address, guarantee_bytes=100 * SLOT_BYTES) as sure:
        reserved = small.slots(requests.reserve(1, small.open(), count=20))
        assert [OUTCOME_NAMES[each] for each in reserved.outcomes] == ["slot"] * 10 + ["limit"]
        with Raw(shared.address) as greedy:
            assert len(greedy.slots(requests.reserve(1, greedy.open(), count=SLOTS)).units) == SLOTS - 10 - 100
            assert len(sure.slots(requests.reserve(1, sure.open(), count=100)).units) == 100
        with pytest.raises(errors.ResourceExhausted, match="not promised yet") as caught:
            Raw(shared.address, guarantee_bytes=(SLOTS - 99) * SLOT_BYTES)
        assert caught.value.retryable


# ---- 28


def test_ten_times_the_capacity_leaves_memory_flat(tmp_path: Path) -> None:
    """Case 28: writing ten times what memory and disk hold: resident memory stays, every answer is true to the end."""
    geometry = opaque(64 << 10)
    with DaemonProcess(tmp_path, dram="8MiB", nvme_bytes="8MiB") as daemon, KVClient(daemon.address) as client:
        namespace = client.open_namespace(IDENTITY, geometry)
        after: list[int] = []
        for seed in range(80):  # of 2 MiB
            assert store(client, namespace, chain(seed, 32)).names == ("stored",) * 32
            assert read(client, namespace, chain(seed, 32)) == 32
            found = client.lookup(namespace, chain(max(0, seed - 6), 32)).blocks
            assert read(client, namespace, chain(max(0, seed - 6), 32)) <= found
            assert whole(client)
            after.append(private_bytes(daemon.pid))
        assert max(after) - after[16] < 8 << 20
        assert client.stats().index_used_blocks <= 2 * 128 + 80  # blocks of both tiers, and the parents of the first of each chain


# ---- 29


def test_a_burst_as_large_as_memory_is_taken(guest: KVClient, namespace: Namespace) -> None:
    """Case 29: with memory full of blocks that nobody holds, a burst evicts on demand and is stored whole, time after time."""
    for seed in range(4):
        started_at = time.monotonic()
        with guest.put(namespace, chain(seed, SLOTS)) as put:
            assert len(put.blocks) == SLOTS
        assert time.monotonic() - started_at < QUICK_S
        assert store(guest, namespace, chain(seed, SLOTS)).names == ("stored",) * SLOTS


def test_eleven_blocks_come_up_into_a_full_memory(tmp_path: Path) -> None:
    """Case 29: a restore never waits for a timer to make room."""
    with DaemonProcess(tmp_path, dram="8MiB", nvme_bytes="32MiB") as daemon, KVClient(daemon.address) as client:
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        store(client, namespace, chain(1, 11))
        assert all_on_disk(client, 11)
        for seed in range(2, 5):
            store(client, namespace, chain(seed, SLOTS - 1))
            assert settled(client)
        assert client.lookup(namespace, chain(1, 11)).tiers == ("nvme",) * 11
        started_at = time.monotonic()
        assert read(client, namespace, chain(1, 11)) == 11
        assert time.monotonic() - started_at < QUICK_S


# ---- 30


def test_a_large_block_costs_its_own_bytes(guest: KVClient, namespace: Namespace) -> None:
    """Case 30: eviction counts bytes: large blocks push out as many bytes of older small ones as they need, to the extent."""
    large = guest.open_namespace(IDENTITY, LARGE)
    store_each(guest, namespace, chain(1, SLOTS))
    for number, key in enumerate(each_hash(chain(2, 9)), start=1):
        assert store(guest, large, key).stored == 1
        if number in (1, 4, 5, 9):
            assert sum(present(guest, namespace, chain(1, SLOTS))) == SLOTS - 128 * -(-number // 4)
            assert whole(guest)
    assert present(guest, large, chain(2, 9)) == [True] * 9


def test_sizes_share_memory_and_disk_by_use(tmp_path: Path) -> None:
    """Case 30: a size that comes late is not kept to the first extent it got: what is used least goes, whatever its size."""
    with DaemonProcess(tmp_path, dram="8MiB", nvme_bytes="16MiB") as daemon, KVClient(daemon.address) as client:
        early, late = client.open_namespace(IDENTITY, GEOMETRY), client.open_namespace(IDENTITY, LARGE)
        for seed in range(3):
            store(client, early, chain(seed, SLOTS))
            assert settled(client)
        assert tier(client, "nvme").class_bytes["live"] > 14 << 20
        for key in each_hash(chain(9, 40)):
            assert store(client, late, key).stored == 1
            assert settled(client)
        assert {"dram"} == {client.lookup(late, key).tiers[0] for key in each_hash(chain(9, 40))[-12:]}
        assert sum(present(client, late, chain(9, 40))) >= 24  # of 32 that the disk has room for


def test_small_blocks_take_back_what_large_ones_had(guest: KVClient, namespace: Namespace) -> None:
    """Case 30: and the other way round; nothing of memory is lost on the way, whatever the order of sizes."""
    chance = random.Random(30)
    namespaces = [namespace, guest.open_namespace(IDENTITY, LARGE), guest.open_namespace(IDENTITY, LARGEST)]
    for step in range(25):
        size = chance.choice(namespaces)
        room = (8 << 20) // size.geometry.slot_bytes
        blocks = chain(100 + step, chance.randint(1, min(room, 200)))
        assert store(guest, size, blocks).stored == len(blocks) // 32
        assert read(guest, size, blocks) == len(blocks) // 32
        assert whole(guest)
    assert store(guest, namespace, chain(1, SLOTS)).stored == SLOTS
    assert tier(guest, "dram").class_bytes["live"] == 8 << 20


# ---- 31


def forest(chance: random.Random, blocks: int) -> list[tuple[bytes, bytes]]:
    """Random (hash, parent): sequences that branch where they like."""
    root = chain(99, 1)
    found = [(root, bytes(32))]
    for seed in range(blocks):
        parent = chance.choice(found[-20:])[0] if chance.random() < 0.9 else root
        found.append((chain(1_000 + seed, 1), parent))
    return found


@pytest.mark.parametrize("seed", range(2))
def test_no_block_is_left_behind_its_parent(guest: KVClient, namespace: Namespace, seed: int) -> None:
    """Case 31: whatever is pushed out of a tree of prefixes, every block that is left has all its ancestors."""
    chance = random.Random(seed)
    blocks = forest(chance, 200)
    for key, parent in blocks:
        store(guest, namespace, key, parent)
    for pressure in range(4):
        for key, _ in chance.sample(blocks, 20):
            read(guest, namespace, key)
        store_each(guest, namespace, chain(2000 + pressure, 110))
        here = {key for key, _ in blocks if guest.lookup(namespace, key).blocks}
        assert all(parent in here for key, parent in blocks[1:] if key in here)
    assert 0 < len(here) < 200


def test_a_prompts_last_blocks_go_first(tmp_path: Path) -> None:
    """Case 31: in memory and on disk what is left of a long prompt is its beginning, also after a restart."""
    with DaemonProcess(tmp_path, dram="8MiB", nvme_bytes="8MiB") as daemon, KVClient(daemon.address) as client:
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        prompt = chain(1, 300)
        store(client, namespace, prompt)
        assert all_on_disk(client, 300)
        left = [300]
        for pressure in range(6):
            store_each(client, namespace, chain(2000 + pressure, 90))
            assert settled(client)
            here = present(client, namespace, prompt)
            left.append(sum(here))
            assert here == [True] * left[-1] + [False] * (300 - left[-1])
            if pressure == 4:
                daemon.restart()
        assert left == sorted(left, reverse=True)
        assert left[-1] < 300


# ---- 34


def fill_beyond(client: KVClient, namespace: Namespace) -> None:
    """Write a byte more than a block has."""
    with client.put(namespace, chain(1, 1)) as put:
        put.blocks[0].write(bytes(SLOT_BYTES + 1))


def copy_short(client: KVClient, namespace: Namespace) -> None:
    """Read into a buffer that is a byte too small."""
    store(client, namespace, chain(2, 1))
    with client.get(namespace, chain(2, 1)) as lease:
        lease.copy_into([bytearray(SLOT_BYTES - 1)])


TOO_LARGE: dict[str, Callable[[KVClient, Namespace], object]] = {
    "a block": lambda client, _: Geometry("mha", 80, 64, 128, 128, "bfloat16", 2048),
    "a block for an extent": lambda client, _: client.open_namespace(IDENTITY, opaque((2 << 20) + 1)),
    "a chain": lambda client, namespace: client.lookup(namespace, chain(1, 8193)),
    "a chain to write": lambda client, namespace: store(client, namespace, chain(1, 8193)),
    "a fact": lambda client, _: client.open_namespace(Identity(model="m" * 5000), GEOMETRY),
    "a message": lambda client, _: client.open_namespace(Identity(model="m" * (5 << 20)), GEOMETRY),
    "bytes for a block": fill_beyond,
    "bytes for a buffer": copy_short,
}


@pytest.mark.parametrize("what", TOO_LARGE)
def test_what_is_too_large_is_told_the_limit(guest: KVClient, namespace: Namespace, what: str) -> None:
    """Case 34: a value past any limit is a typed error of the caller's, not to be tried again, with both numbers in it."""
    with pytest.raises(errors.CallerError, match=r"\d.*\d") as caught:
        TOO_LARGE[what](guest, namespace)
    assert not caught.value.retryable


def test_a_batch_too_large_is_told_the_limit(shared: DaemonProcess, guest: KVClient, namespace: Namespace) -> None:
    """Case 34: the same for whoever speaks the protocol itself; the daemon and its other sessions go on."""
    with Raw(shared.address) as raw:
        reservations = [requests.reserve(number, raw.open(), count=1) for number in range(1, 1026)]
        stream = raw.stub.Attach(iter([pb.ClientMessage(hello=pb.Hello(client="own"))]))
        assert next(stream).WhichOneof("kind") == "welcome"
        messages = [pb.ClientMessage(hello=pb.Hello(client="own")), pb.ClientMessage(batch=pb.Batch(number=1, ops=reservations))]
        answers = list(raw.stub.Attach(iter(messages)))
        assert answers[-1].ended.code == "OUT_OF_RANGE"
        assert "1025 operations; give 1 to 1024" in answers[-1].ended.text
        with pytest.raises(grpc.RpcError) as caught:
            raw.lookup(bytes(32 * 8193), namespace=raw.open())
        assert "8193 blocks, the most is 8192" in str(raw.raised(caught.value))
    assert store(guest, namespace, chain(1, 3)).stored == 3
    assert np.array_equal(_bytes_of(guest, namespace), pattern(chain(1, 1)))
    assert eventually(lambda: whole(guest))


def _bytes_of(client: KVClient, namespace: Namespace) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    with client.get(namespace, chain(1, 1)) as lease:
        return lease.views[0].copy()
