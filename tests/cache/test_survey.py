"""Candidates of a class that is surveyed in many small steps, while the cache goes on in between."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvstore.cache.core import Cache
from kvstore.cache.eviction import candidates, survey
from kvstore.cache.invariants import violations
from kvstore.cache.leaving import evict_one, remove
from kvstore.cache.messages import Abandon, Acquire, Attach, Commit, NamespaceSpec, Release, Reserve, Reserved, Tier, pack_hashes
from kvstore.cache.state import CacheSizes
from tests.cache.world import UNIT, chain, pack

SLOTS = 600
ROOT = bytes(32)


class Rig:
    """A full cache of single blocks, in the order in which they were used."""

    def __init__(self, seed: int, eviction: str) -> None:
        self.chance = random.Random(seed)
        self.cache = Cache(CacheSizes(dram_bytes=SLOTS * UNIT, dram_extent_bytes=20 * UNIT, index_blocks=2 * SLOTS, eviction=eviction))
        namespace = self.cache.open_namespace(NamespaceSpec("default", bytes(32), 1, UNIT))
        assert isinstance(namespace, int)
        self.namespace = namespace
        self.cache.attach(Attach(1, "default"), 0.0)
        self.number = 0
        self.known: list[bytes] = []

    def put(self, count: int) -> None:
        """One chain."""
        keys = chain(tuple(self.chance.randrange(1 << 30) for _ in range(count)))
        self.number += 1
        slots = self.cache.reserve(Reserve(1, self.number, self.namespace, count=count))
        assert isinstance(slots, Reserved)
        got = len(slots.units)
        if got:
            self.cache.commit(Commit(1, self.number, self.namespace, slots.units, slots.generations, pack(keys[:got]), pack([ROOT])))
            self.known.append(pack_hashes(pack(keys[:got])))
        self.cache.abandon(Abandon(1, self.number))
        if self.chance.random() < 0.9:
            self.cache.release(Release(1, self.number))
        self.cache.drain()

    def use(self) -> None:
        packed = self.chance.choice(self.known)
        self.number += 1
        hashes = np.frombuffer(packed, "<u8").reshape(-1, 4)
        self.cache.acquire(Acquire(1, self.number, hashes, 100.0, self.namespace), 1.0)
        self.cache.drain()
        self.cache.release(Release(1, self.number))
        self.cache.drain()


@pytest.mark.parametrize("eviction", ["lru", "s3fifo", "cost"])
@pytest.mark.parametrize("seed", range(6))
def test_every_cold_slot_is_listed_however_the_survey_is_cut(seed: int, eviction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "STRETCH_SLOTS", 7)
    monkeypatch.setattr(survey, "RANGE_SLOTS", 1)
    monkeypatch.setattr(candidates, "MIN_KEPT", 5)
    monkeypatch.setattr(candidates, "MAX_KEPT", 25)
    rig = Rig(seed, eviction)
    for _ in range(900):
        if rig.chance.random() < 0.7 or not rig.known:
            rig.put(rig.chance.choice((1, 1, 1, 2, 5)))
        else:
            rig.use()
        for _, listed in rig.cache.state.listed_candidates():
            assert not listed.missing().size
    assert rig.cache.state.counters["evicted_dram"] > 300


def test_a_pinned_slot_that_can_be_reached_again_stays_listed() -> None:
    """Its use moves it to another queue of the policy, and within the list of the pinned ones."""
    rig = Rig(0, "s3fifo")
    cache = rig.cache
    for blocks in (2, 1, 1):
        rig.put(blocks)
    for lease in list(cache.state.sessions[1].leases):
        cache.release(Release(1, lease))
    chained, proven, _ = (np.frombuffer(packed, "<u8").reshape(-1, 4) for packed in rig.known)
    cache.pin(rig.namespace, chained[1:])
    cache.pin(rig.namespace, proven)
    slot = cache.state.index.slot_at[Tier.DRAM][int(cache.state.index.find(rig.namespace, proven)[0])]
    cache.state.policies[Tier.DRAM].used_many(np.array([slot], np.int32))
    cache.state.policies[Tier.DRAM].used(slot)
    assert cache.state.policies[Tier.DRAM].spares(slot)  # into the main queue
    remove(cache.state, int(cache.state.index.find(rig.namespace, chained[:1])[0]))
    listed = cache.state.candidates(Tier.DRAM, 1)
    listed.refill()
    cache.prefetch(rig.namespace, chained[1:], 9.0)
    assert not listed.missing().size
    assert [evict_one(cache.state, Tier.DRAM, 1) for _ in range(4)] == [True, True, True, False]


def test_numbers_that_went_to_another_size_are_listed_there_alone() -> None:
    """Blocks that nobody can reach share a rank, so an old entry of the one size looks like a new one of the other."""
    cache = Cache(CacheSizes(dram_bytes=40 * UNIT, dram_extent_bytes=20 * UNIT, index_blocks=200))
    cache.attach(Attach(1, "default"), 0.0)
    for size in (1, 2):
        assert cache.open_namespace(NamespaceSpec("default", bytes([size]) * 32, size, size * UNIT)) == size
    for lease, (size, blocks) in enumerate(((1, 40), (2, 10), (2, 10), (2, 20)), start=1):
        keys = [chain((100 * lease + number,))[0] for number in range(blocks)]
        slots = cache.reserve(Reserve(1, lease, size, count=blocks))
        assert isinstance(slots, Reserved)
        assert len(slots.units) == blocks
        parents = pack([ROOT] + keys[:1] * (blocks - 1))
        cache.commit(Commit(1, lease, size, slots.units, slots.generations, pack(keys), parents))
        cache.release(Release(1, lease))
        cache.state.candidates(Tier.DRAM, size).refill()
        if blocks > 10:
            remove(cache.state, int(cache.state.index.find(size, pack(keys[:1]))[0]))
        cache.drain()
    slots = cache.reserve(Reserve(1, 9, 1, count=5))
    assert isinstance(slots, Reserved)
    assert len(slots.units) == 5
    assert violations(cache.state) == []


@pytest.mark.parametrize("seed", range(4))
def test_with_lru_the_coldest_leaf_goes_first_also_from_a_survey_in_steps(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "STRETCH_SLOTS", 7)
    monkeypatch.setattr(candidates, "MIN_KEPT", 5)
    rig = Rig(seed, "lru")
    for _ in range(SLOTS):
        rig.put(1)
    for _ in range(300):
        if rig.chance.random() < 0.3:
            rig.use()
        state = rig.cache.state
        listed = state.candidates(Tier.DRAM, 1)
        coldest = listed.ranks(listed.all_evictable()).min()
        before = set(listed.all_evictable().tolist())
        ranks = {slot: listed.rank(slot) for slot in before}
        assert evict_one(state, Tier.DRAM, 1)
        (gone,) = before - set(listed.all_evictable().tolist())
        assert ranks[gone] == coldest
        rig.cache.drain()
        rig.put(1)
