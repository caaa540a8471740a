"""Blocks found on disk, survivors of an earlier daemon, and clear."""

from __future__ import annotations

import hashlib
import time

import numpy as np

from kvstore.cache.core import Cache
from kvstore.cache.invariants import violations
from kvstore.cache.messages import (
    Acquire,
    Attach,
    ClearFinished,
    Commit,
    NamespaceSpec,
    Recovered,
    Release,
    Reserve,
    Reserved,
    StartDelete,
    StartRead,
    Tier,
    TransferDone,
    TransferResult,
)
from kvstore.cache.state import CacheSizes
from tests.cache.world import ROOT, UNIT, World, chain, pack, sizes


def found(keys: list[bytes], parents: list[bytes], namespaces: list[int], units: list[int], suspect: bool = False) -> Recovered:
    count = len(keys)
    return Recovered(
        np.array(namespaces, np.int32), pack(keys), pack(parents), np.array(units, np.uint32),
        np.full(count, 5, np.uint32), np.full((count, 2), 7, np.uint64), suspect,
    )  # fmt: skip


def test_recovered_blocks_are_found_and_can_be_loaded() -> None:
    world = World(Cache(sizes()))
    keys = chain((0, 1, 0))
    assert world.cache.recover(found(keys, [ROOT, *keys[:2]], [1, 1, 1], [0, 1, 5])) == 3
    world.step()
    assert world.cache.lookup("default", 1, "", pack(keys)).blocks == 3  # type: ignore[union-attr]
    assert world.cache.stats().tiers[Tier.NVME].class_bytes["live"] == 3 * UNIT
    world.attach(0, 0, 0)
    world.cache.acquire(Acquire(1, 1, pack(keys), 9.0, 1), 0.0)
    reads = [decision for decision in world.cache.drain() if isinstance(decision, StartRead)]
    assert [read.source_units for read in reads] == [0, 1, 5]
    assert all(read.checksum == (7, 7) for read in reads)


def test_a_block_whose_parent_is_gone_waits_for_it() -> None:
    world = World(Cache(sizes()))
    keys = chain((0, 1, 0))
    world.cache.recover(found(keys[1:], keys[:2], [1, 1], [0, 1]))
    world.step()
    assert world.cache.lookup("default", 1, "", pack(keys)).blocks == 0  # type: ignore[union-attr]
    world.attach(0, 0, 0)
    client = world.clients[1]
    world.reserve(client, 1, [], 1)
    world.commit(client, list(client.reserved), (0,), lease=1)
    world.step()
    assert world.cache.lookup("default", 1, "", pack(keys)).blocks == 3  # type: ignore[union-attr]


def test_records_that_contradict_each_other_are_deleted_but_one() -> None:
    world = World(Cache(sizes()))
    keys = chain((0, 1))
    assert world.cache.recover(found([keys[0], keys[0], keys[1]], [ROOT, ROOT, keys[0]], [1, 1, 2], [0, 1, 2])) == 1
    deletes = [decision for decision in world.cache.drain() if isinstance(decision, StartDelete)]
    assert [delete.units.tolist() for delete in deletes] == [[1, 2]] or [delete.units.tolist() for delete in deletes] == [[1]]
    assert violations(world.cache.state) == []


def test_parents_chosen_to_look_alike_do_not_overfill_the_index() -> None:
    """Words that differ in their upper bits alone, in pairs: sums of products by odd factors would be equal."""
    cache = Cache(sizes(index_blocks=64, nvme_bytes=64 * UNIT, nvme_extent_bytes=2 * UNIT))
    for number in range(1, 4):
        cache.open_namespace(NamespaceSpec("default", bytes([number]) * 32, 1, UNIT))
    parents = []
    for (key,) in (chain((1000 + number,)) for number in range(20)):
        twin = pack([key]).copy()
        twin[:, [0, 2]] ^= np.uint64(1 << 63 | 1 << 31)
        parents += [key, twin.tobytes()]
    keys = [chain((number,))[0] for number in range(40)]
    kept = cache.recover(found(keys, parents, [1] * 40, list(range(40))))
    assert 0 < kept < 40
    assert cache.state.index.room >= 0
    assert violations(cache.state) == []


def test_a_mismatch_after_an_unclean_stop_frees_the_slot() -> None:
    for suspect, quarantined in ((True, 0), (False, UNIT)):
        world = World(Cache(sizes()))
        world.cache.recover(found(chain((0,)), [ROOT], [1], [3], suspect))
        world.attach(0, 0, 0)
        world.cache.acquire(Acquire(1, 1, pack(chain((0,))), 9.0, 1), 0.0)
        (read,) = [decision for decision in world.cache.drain() if isinstance(decision, StartRead)]
        world.cache.transfer_done(TransferDone(read.transfer, TransferResult.CORRUPT), 1.0)
        (delete,) = [decision for decision in world.cache.drain() if isinstance(decision, StartDelete)]
        assert delete.quarantine == bool(quarantined)
        world.cache.transfer_done(TransferDone(delete.transfer, TransferResult.OK), 1.0)
        assert world.cache.stats().tiers[Tier.NVME].class_bytes["quarantined"] == quarantined
        assert violations(world.cache.state) == []


def test_what_survivors_may_touch_is_kept_out_of_use() -> None:
    world = World(Cache(sizes(nvme_bytes=0)))
    table = np.array([1, 2, 0, 0], np.int32)
    assert world.cache.survivors(np.array([1, 6], np.uint32), table) == 2
    world.step()
    world.attach(0, 0, 0)
    world.reserve(world.clients[1], 1, [], 64)
    assert {units for units, _ in world.clients[1].reserved}.isdisjoint({1, 6, 7})
    world.cache.survivors_gone(np.array([1, 6], np.uint32))
    world.step()
    assert world.cache.stats().tiers[Tier.DRAM].class_bytes["orphaned"] == 0


def test_clear_is_finished_when_also_writes_on_their_way_are_deleted() -> None:
    world = World(Cache(sizes()))
    world.attach(0, 0, 0)
    client = world.clients[1]
    world.reserve(client, 1, [], 2)
    world.commit(client, list(client.reserved), (0, 1), lease=1)
    first, second = world.cache.next_writes(2)
    world.pending = {first.transfer: first, second.transfer: second}
    world.finish(first.transfer, TransferResult.OK)
    cleared = world.cache.clear(77, (1,))
    assert (cleared.blocks, cleared.held_blocks) == (2, 2)
    world.cache.release(Release(1, 1))
    client.leases.clear()
    finished: list[int] = []
    for _ in range(5):
        for decision in world.cache.drain():
            finished += [decision.clear] if isinstance(decision, ClearFinished) else []
            world._carry_out(decision)
        assert not finished or not world.pending
        for transfer in list(world.pending):
            world.finish(transfer, TransferResult.OK)
    assert finished == [77]
    assert world.records == {}


def test_a_clear_waits_for_what_an_earlier_one_could_not_delete_yet() -> None:
    world = World(Cache(sizes()))
    world.attach(0, 0, 0)
    client = world.clients[1]
    world.reserve(client, 1, [], 1)
    world.commit(client, list(client.reserved), (0,), lease=1)
    (write,) = world.cache.next_writes(1)
    world.pending = {write.transfer: write}
    world.finish(write.transfer, TransferResult.OK)
    world.cache.release(Release(1, 1))
    world.cache.clear(1, (1,))
    (delete,) = [decision for decision in world.cache.drain() if isinstance(decision, StartDelete)]
    world.cache.transfer_done(TransferDone(delete.transfer, TransferResult.FAILED), 0.0)
    world.cache.clear(2, (1,))
    assert not [decision for decision in world.cache.drain() if isinstance(decision, ClearFinished)], "the record is still on disk"
    world.cache.tick(5.0)
    (again,) = [decision for decision in world.cache.drain() if isinstance(decision, StartDelete)]
    world.cache.transfer_done(TransferDone(again.transfer, TransferResult.OK), 5.0)
    assert sorted(decision.clear for decision in world.cache.drain() if isinstance(decision, ClearFinished)) == [1, 2]


def test_a_million_blocks_are_recovered_within_seconds() -> None:
    count = 200_000  # a fifth, to keep the suite quick; the cost is linear
    cache = Cache(CacheSizes(64 << 20, count * UNIT, index_blocks=count + 10, nvme_extent_bytes=1000 * UNIT))
    cache.open_namespace(NamespaceSpec("default", bytes(32), 1, UNIT))
    raw = b"".join(hashlib.sha256(number.to_bytes(4, "little")).digest() for number in range(count))
    hashes = np.frombuffer(raw, "<u8").reshape(-1, 4)
    parents = np.concatenate([np.zeros((1, 4), np.uint64), hashes[:-1]])
    ones = np.ones(count, np.uint32)
    record = Recovered(
        np.ones(count, np.int32), hashes, parents, np.arange(count, dtype=np.uint32), ones, np.zeros((count, 2), np.uint64), False
    )
    began = time.perf_counter()
    assert cache.recover(record) == count
    assert time.perf_counter() - began < 5.0
    assert cache.lookup("default", 1, "", hashes[:8192]).blocks == 8192  # type: ignore[union-attr]


def test_a_session_may_come_back_for_its_holds() -> None:
    world = World(Cache(sizes()))
    world.attach(0, 0, 0)
    world.reserve(world.clients[1], 1, chain((0,)), 0)
    world.cache.session_lost(1, "gone")
    world.step()
    assert world.cache.stats().tiers[Tier.DRAM].class_bytes["orphaned"] == UNIT
    world.cache.attach(Attach(9, "default", resume=1), 0.0)
    assert world.cache.stats().tiers[Tier.DRAM].class_bytes["reserved"] == UNIT


def test_a_long_chain_is_cleared_at_once() -> None:
    """Each block's descendants are not gone through again: that would be a minute for these."""
    blocks = 4096
    cache = Cache(CacheSizes(2 * blocks * UNIT))
    namespace = cache.open_namespace(NamespaceSpec("default", bytes(32), 1, UNIT))
    assert isinstance(namespace, int)
    cache.attach(Attach(1, "default"), 0.0)
    hashes = np.random.default_rng(1).integers(0, 1 << 63, (blocks, 4)).astype(np.uint64)
    reserved = cache.reserve(Reserve(1, 1, namespace, blocks))
    assert isinstance(reserved, Reserved)
    cache.commit(Commit(1, 1, namespace, reserved.units, reserved.generations, hashes, pack([ROOT])))
    cache.release(Release(1, 1))
    began_at = time.perf_counter()
    assert cache.clear(1, (namespace,)).blocks == blocks
    assert time.perf_counter() - began_at < 2.0
    assert violations(cache.state) == []
