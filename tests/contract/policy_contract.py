"""What every eviction policy must do, seen through the cache that it serves. Subclass `PolicyContract` and name the policy."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.cache.core import Cache
from kvstore.cache.invariants import violations
from kvstore.cache.leaving import evict_one, remove
from kvstore.cache.messages import Acquire, Recovered, Release, Tier
from tests.cache.test_machine import CacheMachine
from tests.cache.test_walks import walk
from tests.cache.world import LARGE, ROOT, SMALL, Path, World, chain, pack, sizes

WALKS = 5  # walks; each some 0.2 s
STEPS = 200  # operations a walk
SLOTS = 16  # small slots of dram in the world


class PolicyContract:
    """One policy's suite."""

    eviction: str

    @pytest.fixture
    def world(self) -> World:
        world = World(Cache(sizes(eviction=self.eviction, nvme_bytes=0)))
        world.attach(0, 0, 0)
        return world

    def put(self, world: World, path: Path, namespace: int = 1, keep: bool = False) -> None:
        """Store a chain and, but for `keep`, let go of it. Its lease is its first token."""
        client = world.clients[1]
        world.reserve(client, namespace, [], len(path))
        world.commit(client, list(client.reserved), path, path[0])
        if not keep:
            world.release(client, path[0], 0, world.cache.release(Release(1, path[0])))
        world.step()

    def use(self, world: World, path: Path) -> None:
        world.next_id += 1
        world.cache.acquire(Acquire(1, 1000 + world.next_id, pack(chain(path)), world.now, 1), world.now)
        world.cache.release(Release(1, 1000 + world.next_id))
        world.step()

    def stored(self, world: World, path: Path, namespace: int = 1) -> int:
        """Leading blocks of a chain that are here."""
        return world.cache.lookup("default", namespace, "", pack(chain(path))).blocks  # type: ignore[union-attr]

    def test_a_new_cache_has_nobody_to_evict(self, world: World) -> None:
        assert not evict_one(world.cache.state, Tier.DRAM, SMALL)

    def test_a_chain_is_evicted_from_its_end(self, world: World) -> None:
        path = tuple(range(1, 9))
        self.put(world, path)
        for left in range(7, -1, -1):
            assert evict_one(world.cache.state, Tier.DRAM, SMALL)
            world.step()
            assert self.stored(world, path) == left

    def test_whatever_is_not_held_makes_room(self, world: World) -> None:
        """However often it was used."""
        for first in range(SLOTS // 2):
            self.put(world, (first + 1, 0))
            for _ in range(first):
                self.use(world, (first + 1, 0))
        self.put(world, tuple(range(100, 100 + SLOTS)))
        assert self.stored(world, tuple(range(100, 100 + SLOTS))) == SLOTS

    def test_what_is_held_stays(self, world: World) -> None:
        self.put(world, (1, 2, 3), keep=True)
        for first in range(10, 60):
            self.put(world, (first, 0))
        assert self.stored(world, (1, 2, 3)) == 3

    def test_pinned_blocks_go_last(self, world: World) -> None:
        for first in (1, 2, 3):
            self.put(world, (first, 0, 0, 0))
        world.cache.pin(1, pack(chain((2, 0, 0, 0))))
        for first in (1, 3, 1, 3):
            self.use(world, (first, 0, 0, 0))
        for _ in range(8):
            assert evict_one(world.cache.state, Tier.DRAM, SMALL)
        assert [self.stored(world, (first,)) for first in (1, 2, 3)] == [0, 1, 0]
        assert self.stored(world, (2, 0, 0, 0)) == 4
        assert evict_one(world.cache.state, Tier.DRAM, SMALL)
        world.step()

    def test_what_nobody_can_reach_goes_first(self, world: World) -> None:
        self.put(world, (1, 0))
        self.put(world, (2, 3, 4))
        for _ in range(4):
            self.use(world, (2, 3, 4))
        state = world.cache.state
        remove(state, state.index.find_one(1, chain((2,))[0]))
        for _ in range(2):
            assert evict_one(state, Tier.DRAM, SMALL)
        world.step()
        assert not state.index.find(1, pack(chain((2, 3, 4)))).any()
        assert self.stored(world, (1, 0)) == 2

    def test_what_can_be_reached_again_is_no_longer_first(self, world: World) -> None:
        self.put(world, (1, 0))
        self.put(world, (2, 3, 4))
        state = world.cache.state
        remove(state, state.index.find_one(1, chain((2,))[0]))
        self.put(world, (2,))
        state.candidates(Tier.DRAM, SMALL).refill()
        self.use(world, (2, 3, 4))
        assert evict_one(state, Tier.DRAM, SMALL)
        world.step()
        assert (self.stored(world, (1, 0)), self.stored(world, (2, 3, 4))) == (1, 3)

    def test_memory_passes_from_one_size_to_another(self, world: World) -> None:
        for first in range(SLOTS):
            self.put(world, (first + 1,))
        self.put(world, tuple(range(50, 58)), namespace=2)
        assert self.stored(world, tuple(range(50, 58)), namespace=2) == SLOTS * SMALL // LARGE
        assert world.cache.stats().counters["extents_reassigned"] == 4

    def test_the_same_inputs_evict_the_same_blocks(self) -> None:
        left = []
        for _ in range(2):
            machine = self.machine()
            walk(machine, 77, STEPS)
            left.append([tuple(index.word(row) for row in index.rows().tolist()) for index in [machine.cache.state.index]])
        assert left[0] == left[1]

    def test_recovered_blocks_have_a_place_in_line(self) -> None:
        world = World(Cache(sizes(eviction=self.eviction)))
        keys = chain((0, 1, 0, 1))
        units, ones = np.array([0, 1, 2, 3], np.uint32), np.ones(4, np.uint32)
        sums, owner = np.ones((4, 2), np.uint64), np.ones(4, np.int32)
        world.cache.recover(Recovered(owner, pack(keys), pack([ROOT, *keys[:3]]), units, ones, sums, False))
        for left in range(3, -1, -1):
            assert evict_one(world.cache.state, Tier.NVME, SMALL)
            assert violations(world.cache.state) == []
            assert self.stored(world, (0, 1, 0, 1)) == left

    @pytest.mark.parametrize("number", range(WALKS))
    def test_all_rules_hold_on_a_walk(self, number: int) -> None:
        machine = self.machine()
        walk(machine, 1000 + number, STEPS)
        machine.teardown()

    def machine(self) -> CacheMachine:
        """A state machine whose cache has this policy."""
        machine = CacheMachine()
        machine.eviction = self.eviction
        return machine
