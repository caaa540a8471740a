"""What is copied down from GPU memory, and when: two caches without I/O, copies that the test makes."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import cast

import numpy as np
import pytest

from kvstore.cache.core import Cache
from kvstore.cache.invariants import violations
from kvstore.cache.messages import Abandon, Attach, Commit, NamespaceSpec, Release, Reserve, Reserved, TransferResult, unpack_hashes
from kvstore.cache.state import CacheSizes
from kvstore.daemon import demoter as module
from kvstore.daemon.demoter import DemoteJob, Demoter
from kvstore.daemon.jobs import Moved
from kvstore.daemon.pools import GpuPool, Pools
from kvstore.geometry import UNIT_BYTES
from kvstore.hashing import block_hashes
from kvstore.tiers.hbm import HbmTier

POOL_BLOCKS, DRAM_BLOCKS = 64, 128  # blocks of one unit
EXTENT_BYTES = 8 * UNIT_BYTES
USER, OWN = 1, 2  # sessions
SUM = (3, 4)
GOOD, BAD = Moved(TransferResult.OK, SUM), Moved(TransferResult.FAILED)
ROOT = bytes(32)


class Tier:
    """Of an HbmTier, what is asked here."""

    label, lost = "hbm:0", ""


class Rig:
    """One pool above dram; `now` stands still but for `step`."""

    def __init__(self, dram_blocks: int = DRAM_BLOCKS) -> None:
        self.dram, self.hbm = (
            Cache(CacheSizes(blocks * UNIT_BYTES, dram_extent_bytes=EXTENT_BYTES)) for blocks in (dram_blocks, POOL_BLOCKS)
        )
        self.pool = GpuPool(1, cast(HbmTier, Tier()), Path("s"), self.hbm)
        self.demoter = Demoter([self.pool], self.dram, lambda tenant: OWN)
        self.pools = Pools([self.pool], lambda pool, granted: self.demoter.granted(granted, pool), lambda notice: None)
        self.pools.stored = self.demoter.stored
        self.now = 0.0
        spec = NamespaceSpec("t", bytes(32), 1, UNIT_BYTES)
        for cache in (self.dram, self.hbm):
            assert cache.open_namespace(spec) == 1
            for session in (USER, OWN):
                cache.attach(Attach(session, "t", own=True), self.now)

    def name(self, seed: int, blocks: int) -> bytes:
        """The packed hashes of a chain."""
        return block_hashes(ROOT, [seed * 1000 + at for at in range(blocks)], 1)

    def try_commit(self, seed: int, blocks: int, cache: Cache) -> int:
        """Commit as much of a chain as there is room for, and keep it leased; how many blocks there was room for."""
        reserved = cache.reserve(Reserve(USER, seed, 1, count=blocks))
        assert isinstance(reserved, Reserved)
        hashes = unpack_hashes(self.name(seed, blocks))[: len(reserved.units)]
        if len(hashes):
            cache.commit(Commit(USER, seed, 1, reserved.units, reserved.generations, hashes, unpack_hashes(ROOT)))
        cache.abandon(Abandon(USER, seed))
        return len(hashes)

    def commit(self, seed: int, blocks: int, cache: Cache | None = None) -> bytes:
        """Commit a chain, in the pool or elsewhere, and hold nothing."""
        assert self.try_commit(seed, blocks, cache or self.hbm) == blocks
        self.release(seed)
        self.pools.settle()
        return self.name(seed, blocks)

    def release(self, seed: int) -> None:
        """End the leases on a chain."""
        for cache in (self.dram, self.hbm):
            cache.release(Release(USER, seed))

    def begin(self) -> list[DemoteJob]:
        """The copies that begin now."""
        self.pools.settle()
        jobs = self.demoter.next_jobs(self.now)
        while self.pools.settle():
            jobs += self.demoter.next_jobs(self.now)
        return jobs

    def step(self, result: Moved = GOOD, after_s: float = 0.0) -> list[DemoteJob]:
        """The copies that begin now, made at once with this result."""
        self.now += after_s
        jobs = self.begin()
        for job in jobs:
            self.demoter.finished(job, [result] * len(job.items), self.now)
        self.look()
        return jobs

    def look(self) -> None:
        """Every rule holds in both caches."""
        self.pools.settle()
        self.dram.drain()
        for cache in (self.dram, self.hbm):
            assert violations(cache.state) == []

    def run(self) -> None:
        """Until nothing begins any more."""
        while self.step():
            pass

    def in_dram(self, hashes: bytes) -> int:
        """How many of these blocks are there."""
        return int(np.count_nonzero(self.dram.has(1, unpack_hashes(hashes))))


def test_a_chain_is_copied_down_with_its_parents_and_checksums() -> None:
    rig = Rig()
    hashes = rig.commit(1, 40)
    rig.run()
    assert rig.in_dram(hashes) == 40
    index = rig.dram.state.index
    rows = index.find(1, unpack_hashes(hashes))
    assert index.parent[rows].tolist()[1:] == rows.tolist()[:-1]
    assert {tuple(each) for each in index.checksum[rows].tolist()} == {SUM}
    assert rig.demoter.idle
    assert rig.hbm.stats().sessions[1].leases == rig.dram.stats().sessions[1].leases == 0


def test_no_more_than_a_share_of_the_pool_is_held_and_the_rest_may_be_evicted() -> None:
    rig = Rig()
    first = rig.commit(1, POOL_BLOCKS)
    assert rig.hbm.stats().sessions[1].held_bytes == POOL_BLOCKS // module.HELD_SHARE * UNIT_BYTES
    second = rig.commit(2, POOL_BLOCKS - POOL_BLOCKS // module.HELD_SHARE)
    rig.run()
    assert rig.in_dram(first) >= POOL_BLOCKS // module.HELD_SHARE
    assert rig.demoter.counts["dropped_from_hbm"] == POOL_BLOCKS - rig.in_dram(first)
    assert rig.in_dram(second) == len(second) // 32
    assert rig.demoter.idle


def test_a_block_that_dram_has_is_left_alone() -> None:
    rig = Rig()
    rig.commit(1, 5, rig.dram)
    rig.commit(1, 5)
    assert rig.step() == []
    assert rig.demoter.idle


def test_a_block_that_somebody_else_is_writing_in_dram_is_tried_again() -> None:
    rig = Rig()
    hashes = rig.commit(1, 3)
    rig.dram.reserve(Reserve(USER, 7, 1, hashes=unpack_hashes(hashes[:32])))
    assert [len(job.items) for job in rig.step()] == [2]
    assert not rig.step()
    rig.dram.session_lost(USER, "gone")
    assert [len(job.items) for job in rig.step(after_s=module.RETRY_S)] == [1]
    assert rig.in_dram(hashes) == 3


def test_where_dram_has_no_room_blocks_wait_and_are_given_up_in_the_end() -> None:
    rig = Rig(dram_blocks=8)
    rig.dram.reserve(Reserve(USER, 7, 1, count=8))
    rig.commit(1, 3)
    for _ in range(module.MAX_TRIES):
        assert rig.step(after_s=module.RETRY_S) == []
    assert rig.demoter.idle
    assert rig.demoter.counts["dropped_from_hbm"] == 3
    assert rig.hbm.stats().sessions[1].held_bytes == 0


def test_a_copy_that_failed_is_made_again_but_not_for_ever() -> None:
    rig = Rig()
    hashes = rig.commit(1, 2)
    rig.step(BAD)
    assert rig.in_dram(hashes) == 0
    assert len(rig.dram.state.sessions[OWN].reserved) == 0
    rig.step(after_s=module.RETRY_S)
    assert rig.in_dram(hashes) == 2
    rig.commit(2, 2)
    for _ in range(module.MAX_TRIES):
        rig.step(BAD, after_s=module.RETRY_S)
    assert rig.demoter.idle
    assert rig.demoter.counts == {"failed_from_hbm": 2 + 2 * module.MAX_TRIES, "demoted_from_hbm": 2, "dropped_from_hbm": 2}


def test_what_is_cleared_under_its_copy_does_not_come_back() -> None:
    rig = Rig()
    hashes = rig.commit(1, 4)
    (job,) = rig.demoter.next_jobs(rig.now)
    for cache in (rig.hbm, rig.dram):
        cache.clear(1, (1,))
    rig.demoter.finished(job, [GOOD] * 4, rig.now)
    assert rig.step() == []
    assert rig.in_dram(hashes) == 0
    assert rig.demoter.idle
    assert rig.hbm.stats().sessions[1].held_bytes == 0


def test_what_is_cleared_and_committed_anew_under_its_copy_is_copied_from_where_it_lies_then() -> None:
    rig = Rig()
    hashes = rig.commit(1, 4)
    (old,) = rig.demoter.next_jobs(rig.now)
    for cache in (rig.hbm, rig.dram):
        cache.clear(1, (1,))
    rig.commit(1, 4)
    rig.demoter.finished(old, [GOOD] * 4, rig.now)
    assert rig.in_dram(hashes) == 0, "the bytes of before the clear"
    (new,) = rig.step(after_s=1.0)
    assert {block.units for block in old.items}.isdisjoint(block.units for block in new.items)
    assert rig.in_dram(hashes) == 4
    assert rig.demoter.counts["demoted_from_hbm"] == 4
    rig.run()
    assert rig.demoter.idle


def test_when_the_gpu_is_lost_nothing_more_is_copied_and_nothing_is_held() -> None:
    rig = Rig()
    rig.commit(1, POOL_BLOCKS)
    jobs = rig.demoter.next_jobs(rig.now)
    rig.pool.lost = "gone"
    rig.demoter.give_up(rig.pool)
    for job in jobs:
        rig.demoter.finished(job, [BAD] * len(job.items), rig.now)
    assert rig.step(after_s=module.RETRY_S) == []
    assert rig.demoter.idle
    assert rig.hbm.stats().sessions[1].held_bytes == 0
    assert rig.demoter.counts["dropped_from_hbm"] == POOL_BLOCKS


@pytest.mark.parametrize("seed", range(16))
def test_whatever_happens_every_rule_holds_and_nothing_stays_held(seed: int) -> None:
    chance = Random(seed)
    rig = Rig(8 * chance.randint(1, DRAM_BLOCKS // 16))
    out: list[DemoteJob] = []
    for _ in range(60):
        match chance.randrange(9):
            case 0 | 1 | 2:
                rig.try_commit(chance.randrange(1, 6), chance.randint(1, 20), rig.dram if chance.random() < 0.3 else rig.hbm)
            case 3:
                rig.release(chance.randrange(1, 6))
            case 4:
                hashes = unpack_hashes(rig.name(chance.randrange(1, 6), 20))
                rig.hbm.forget(1, hashes[chance.randrange(20) :][:1])
            case 5 if chance.random() < 0.2:
                rig.hbm.clear(1, (1,))
                rig.dram.clear(1, (1,))
            case 6 | 7 if out:
                job = out.pop(chance.randrange(len(out)))
                rig.demoter.finished(job, [chance.choice((GOOD, GOOD, GOOD, BAD)) for _ in job.items], rig.now)
            case _:
                rig.now += chance.choice((0.0, module.RETRY_S))
                out += rig.begin()
        rig.look()
    for job in out:
        rig.demoter.finished(job, [GOOD] * len(job.items), rig.now)
    for chain in range(1, 6):
        rig.release(chain)
    for _ in range(3 * module.MAX_TRIES):
        rig.step(after_s=module.RETRY_S)
    assert rig.demoter.idle
    for cache in (rig.hbm, rig.dram):
        own = cache.stats().sessions[1]
        assert (own.held_bytes, own.leases, own.reserved_slots) == (0, 0, 0)


def test_a_namespace_too_large_for_a_pool_lives_in_dram_alone() -> None:
    rig = Rig()
    large = NamespaceSpec("t", b"large".ljust(32), 16, 16 * UNIT_BYTES)
    rig.pool.open(2, large)
    assert "a block of 65536 bytes exceeds an extent of hbm:0, 32768" in rig.pool.left_out[2]
    rig.pool.open(2, large)
    small = NamespaceSpec("t", b"small".ljust(32), 1, UNIT_BYTES)
    rig.pool.open(3, small)
    assert rig.hbm.open_namespace(small) == 3
