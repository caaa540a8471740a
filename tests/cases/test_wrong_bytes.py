"""Cases 5 to 7 and 10 to 12: nothing that was not written is ever served, and nothing is said to be there that is not."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvstore.clients import requests
from kvstore.clients.client import KVClient
from kvstore.clients.handles import OUTCOME_NAMES
from kvstore.hashing import usable_blocks
from kvstore.proto import kvstore_pb2 as pb
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import BLOCK_TOKENS, GEOMETRY, IDENTITY, chain, each_hash, pattern, tokens_of
from tests.cases.children import Child
from tests.cases.disks import flip, limit_files
from tests.cases.figures import all_on_disk, eventually, opaque, present, read, settled, store, store_each, tier
from tests.cases.raw import Raw

SLOT_BYTES = GEOMETRY.slot_bytes
ODD = opaque(10_000)  # bytes: a slot of 12 KiB, of which the end is padding
LOOKED_AT_BYTES = 16 << 20  # of the data file: far more than these tests use


# ---- 5


@pytest.mark.parametrize("cut", [0, 12288], ids=["between two blocks", "late in a block"])
def test_a_write_cut_short_is_never_visible(daemon: DaemonProcess, client: KVClient, cut: int) -> None:
    """Case 5: of blocks whose write failed, whole or half-way, none is found on disk, before a restart or after."""
    namespace = client.open_namespace(IDENTITY, GEOMETRY)
    hashes = chain(1, 120)
    limit_files(daemon.pid, 40 * SLOT_BYTES + cut)
    store_each(client, namespace, hashes)
    assert eventually(lambda: client.stats().counters["failed_writes"] > 0 and tier(client, "nvme").blocks == 40)
    daemon.restart()
    found = [key for key, here in zip(each_hash(hashes), present(client, namespace, hashes), strict=True) if here]
    assert len(found) == 40
    assert [read(client, namespace, key) for key in found] == [1] * 40
    assert client.stats().counters["corrupt_blocks"] == 0


def test_failed_writes_are_made_up_for(daemon: DaemonProcess, client: KVClient) -> None:
    """Case 5: once the disk takes writes again, it gets what it had missed, and every byte is right."""
    namespace = client.open_namespace(IDENTITY, GEOMETRY)
    hashes = chain(1, 120)
    limit_files(daemon.pid, 40 * SLOT_BYTES + 4096)
    store(client, namespace, hashes)
    assert eventually(lambda: client.stats().counters["failed_writes"] > 0)
    limit_files(daemon.pid, None)
    assert all_on_disk(client, 120)
    daemon.restart()
    assert read(client, namespace, hashes) == 120


# ---- 6


def places(data: Path, hashes: bytes) -> list[int]:
    """Where each block's bytes begin in the data file."""
    with data.open("rb") as file:
        everything = file.read(LOOKED_AT_BYTES)
    return [everything.index(pattern(key, ODD.block_bytes).tobytes()) for key in each_hash(hashes)]


def test_a_flipped_bit_on_disk_is_a_miss(daemon: DaemonProcess, client: KVClient) -> None:
    """Case 6: bits flipped at random places: each block hit is a miss, counted, logged, its slot out of use for good."""
    chance = random.Random(5)
    namespace = client.open_namespace(IDENTITY, ODD)
    hashes = chain(1, 150)
    store_each(client, namespace, hashes)
    assert all_on_disk(client, 150)
    daemon.restart(kill=False)
    hit = chance.sample(range(150), 25)
    where = places(daemon.data / "data", hashes)
    for block in hit:
        flip(daemon.data / "data", where[block] + chance.randrange(ODD.block_bytes), chance.randrange(8))
    assert [read(client, namespace, key) for key in each_hash(hashes)] == [int(block not in hit) for block in range(150)]
    assert [client.lookup(namespace, key).blocks for key in each_hash(hashes)] == [int(block not in hit) for block in range(150)]
    assert client.stats().counters["corrupt_blocks"] == 25
    assert daemon.log().count("corrupt block") == 25
    assert eventually(lambda: tier(client, "nvme").class_bytes["quarantined"] == 25 * ODD.slot_bytes)
    daemon.restart(kill=False)
    assert tier(client, "nvme").class_bytes["quarantined"] == 25 * ODD.slot_bytes
    assert store_each(client, namespace, hashes) == 150
    assert all_on_disk(client, 150)


def test_flipped_padding_harms_nobody(daemon: DaemonProcess, client: KVClient) -> None:
    """Case 6: between a block's end and its slot's nothing is kept, so nothing is lost."""
    namespace = client.open_namespace(IDENTITY, ODD)
    store_each(client, namespace, chain(1, 20))
    assert all_on_disk(client, 20)
    daemon.restart(kill=False)
    for where in places(daemon.data / "data", chain(1, 20)):
        flip(daemon.data / "data", where + ODD.slot_bytes - 1, 7)
    assert [read(client, namespace, key) for key in each_hash(chain(1, 20))] == [1] * 20


@pytest.mark.parametrize("kill", [True, False], ids=["killed", "stopped"])
def test_a_flipped_bit_of_a_record_is_a_miss(daemon: DaemonProcess, client: KVClient, kill: bool) -> None:
    """Case 6: records are bytes on the disk too: a damaged one costs its block, and never gives another's bytes."""
    chance = random.Random(kill)
    namespace = client.open_namespace(IDENTITY, ODD)
    hashes = chain(1, 150)
    store_each(client, namespace, hashes)
    assert all_on_disk(client, 150)
    if kill:
        daemon.kill9()
    else:
        daemon.stop()
    records = (daemon.data / "records").read_bytes()
    hit = chance.sample(range(150), 25)
    for block in hit:
        record = records.index(each_hash(hashes)[block]) // 128 * 128
        flip(daemon.data / "records", record + chance.randrange(128), chance.randrange(8))
    daemon.start()
    assert [read(client, namespace, key) for key in each_hash(hashes)] == [int(block not in hit) for block in range(150)]
    assert store_each(client, namespace, hashes) == 150


def test_bits_flipped_anywhere_never_lie(daemon: DaemonProcess, client: KVClient) -> None:
    """Case 6: damage wherever it falls, in data and records, extents' heads too: some blocks are missing, none is wrong."""
    chance = random.Random(6)
    namespace = client.open_namespace(IDENTITY, ODD)
    hashes = chain(1, 200)
    for round_number in range(2):
        store_each(client, namespace, hashes)
        assert all_on_disk(client, 200)
        daemon.stop()
        for name, used_bytes in (("data", 4 << 20), ("records", 2 * 513 * 128)):
            for _ in range(40):
                flip(daemon.data / name, chance.randrange(used_bytes), chance.randrange(8))
        if round_number == 1:
            flip(daemon.data / "records", 513 * 128 + chance.randrange(128), chance.randrange(8))
        daemon.start()
        assert sum(read(client, namespace, key) for key in each_hash(hashes)) < 200


# ---- 7


def test_interleaved_sessions_never_mix_their_bytes(tmp_path: Path) -> None:
    """Case 7: three processes and two threads store and read at once, all through a small memory: every byte belongs to its key."""
    with DaemonProcess(tmp_path, ["--nvme-write-bytes-per-s", "1GiB"], dram="8MiB", nvme_bytes="24MiB") as daemon:
        with Child(daemon.address) as one, Child(daemon.address) as two, Child(daemon.address) as three:
            children = [one, two, three]
            for number, child in enumerate(children):
                child.say("work", number, 200, 3.0, 200)
            counts = [child.hear() for child in children]
        with KVClient(daemon.address) as client:
            counters = client.stats().counters
    assert [count["wrong"] for count in counts] == [0] * 3
    assert all(count["read"] > 100 and count["stored"] > 100 for count in counts)
    assert counters["promoted"] > 0
    assert counters["evicted_dram"] > 0
    assert counters["corrupt_blocks"] == 0


# ---- 10


def test_what_is_acknowledged_is_found_by_anyone(shared: DaemonProcess, guest: KVClient) -> None:
    """Case 10: the very next lookup after an acknowledged write hits, from another thread's client and another process."""
    namespace = guest.open_namespace(IDENTITY, GEOMETRY)
    with KVClient(shared.address) as other, Child(shared.address) as child:
        mine = other.open_namespace(IDENTITY, GEOMETRY)
        for seed in range(60):
            assert store(guest, namespace, chain(seed, 3)).names == ("stored",) * 3
            assert child.ask("lookup", seed, 3) == 3
            assert other.lookup(mine, chain(seed, 3)).blocks == 3
            assert read(other, mine, chain(seed, 3)) == 3
        for seed in range(60, 90):
            assert child.ask("put", seed, 3) == ["stored"] * 3
            assert read(guest, namespace, chain(seed, 3)) == 3


def test_nothing_is_found_before_it_is_acknowledged(guest: KVClient) -> None:
    """Case 10: and not before: while a block is being filled nobody finds it, and what is abandoned is never found."""
    namespace = guest.open_namespace(IDENTITY, GEOMETRY)
    with guest.put(namespace, chain(1, 3)) as put:
        for block in put.blocks:
            block.write(pattern(block.hash))
        assert guest.lookup(namespace, chain(1, 3)).blocks == 0
    assert guest.lookup(namespace, chain(1, 3)).blocks == 3
    with pytest.raises(ZeroDivisionError), guest.put(namespace, chain(2, 3)) as put:
        put.blocks[0].view[:] = 1 // (len(put.blocks) - 3)
    assert guest.lookup(namespace, chain(2, 3)).blocks == 0


# ---- 11


def test_a_failed_pull_ends_the_prefix_there(daemon: DaemonProcess, client: KVClient) -> None:
    """Case 11: wherever in a chain a block cannot be read, the lease has the blocks before it and no more."""
    namespace = client.open_namespace(IDENTITY, ODD)
    chains = {seed: chain(seed, 12) for seed in range(12)}
    for hashes in chains.values():
        store(client, namespace, hashes)
    assert all_on_disk(client, 144)
    daemon.restart(kill=False)
    for seed, hashes in chains.items():
        flip(daemon.data / "data", places(daemon.data / "data", hashes)[seed], 0)
    assert [read(client, namespace, hashes) for hashes in chains.values()] == list(range(12))
    assert settled(client)
    assert [client.lookup(namespace, hashes).blocks for hashes in chains.values()] == list(range(12))


def test_bytes_sent_over_the_wire_end_there_too(daemon: DaemonProcess, client: KVClient) -> None:
    """Case 11: the same for a client that cannot map the arena: it gets whole, verified blocks up to the lost one."""
    namespace = client.open_namespace(IDENTITY, ODD)
    store(client, namespace, chain(1, 12))
    assert all_on_disk(client, 12)
    daemon.restart(kill=False)
    flip(daemon.data / "data", places(daemon.data / "data", chain(1, 12))[7], 3)
    with Raw(daemon.address) as raw:
        request = pb.ReadRequest(namespace_id=raw.open(ODD), hashes=chain(1, 12), timeout_s=5, epoch=raw.attached.session.epoch)
        pieces = list(raw.stub.Read(request, timeout=10))
    blocks = b"".join(piece.data for piece in pieces if piece.last)
    assert blocks == b"".join(pattern(key, ODD.block_bytes).tobytes() for key in each_hash(chain(1, 12))[:7])


def test_each_block_of_a_batch_has_its_outcome(shared: DaemonProcess, guest: KVClient) -> None:
    """Case 11: one failure of a batch neither stops the rest nor hides among it."""
    namespace = guest.open_namespace(IDENTITY, GEOMETRY)
    keys = each_hash(chain(1, 4))
    store(guest, namespace, keys[0])
    with Raw(shared.address) as raw, Raw(shared.address) as other:
        mine = raw.open()
        other.slots(requests.reserve(1, mine, hashes=keys[1]))
        reserved = raw.slots(requests.reserve(1, mine, hashes=b"".join(keys)))
        assert [OUTCOME_NAMES[each] for each in reserved.outcomes] == ["exists", "in_flight", "slot", "slot"]
        for at in (2, 3):
            raw.attached.arena.writable_view(reserved.units[at], GEOMETRY.block_bytes)[:] = pattern(keys[at])
        generations = reserved.generations + np.array([0, 0, 1, 0], np.uint32)  # one of another tenure of the slot
        commit = requests.commit(1, mine, (reserved.units[2:], generations[2:]), keys[2] + keys[3], keys[1])
        unknown, committed, released = raw.ask(requests.release(77), commit, requests.release(1))
        assert [OUTCOME_NAMES[each] for each in getattr(committed, "outcomes", [])] == ["bad_slot", "stored"]
        assert (getattr(unknown, "count", None), getattr(released, "count", None)) == (0, 1)
    assert present(guest, namespace, b"".join(keys)) == [True, False, False, True]


# ---- 12


@pytest.mark.parametrize("blocks", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_the_last_token_is_always_computed(guest: KVClient, blocks: int, more: int) -> None:
    """Case 12: prompts of k·B−1, k·B and k·B+1 tokens get what is stored of them, less the block of their last token."""
    namespace = guest.open_namespace(IDENTITY, GEOMETRY)
    tokens = tokens_of(12, 8)[: max(0, blocks * BLOCK_TOKENS + more)]
    store(guest, namespace, chain(12, 8))
    usable = usable_blocks(len(tokens), BLOCK_TOKENS)
    assert usable == max(0, blocks if more == 1 else blocks - 1)
    assert guest.lookup(namespace, tokens=tokens).blocks == usable
    with guest.get(namespace, tokens=tokens) as lease:
        assert lease.blocks == usable
        assert all(np.array_equal(view, pattern(key)) for view, key in zip(lease.views, each_hash(chain(12, 8)), strict=False))
    assert usable * BLOCK_TOKENS < max(1, len(tokens))


def test_prompts_of_all_lengths_at_once(guest: KVClient) -> None:
    """Case 12: the same from several threads of one client, for every length from nothing to three blocks and a token."""
    namespace = guest.open_namespace(IDENTITY, GEOMETRY)
    store(guest, namespace, chain(1, 3))
    with ThreadPoolExecutor(4) as pool:
        lengths = range(3 * BLOCK_TOKENS + 2)
        found = list(pool.map(lambda length: guest.lookup(namespace, tokens=tokens_of(1, 3)[:length]).blocks, lengths))
    assert found == [max(0, length - 1) // BLOCK_TOKENS for length in lengths]
