"""Extents change sizes as often as it comes: what is idle, or cold, can be had for any size."""

from __future__ import annotations

import random

import pytest

from kvstore.cache.core import Cache
from kvstore.cache.invariants import violations
from kvstore.cache.messages import (
    UNIT_BYTES,
    Attach,
    Commit,
    NamespaceSpec,
    Release,
    Reserve,
    Reserved,
    StartDelete,
    StartWrite,
    Tier,
    TransferDone,
    TransferResult,
)
from kvstore.cache.slots import SlotState, SlotTable
from kvstore.cache.state import CacheSizes
from tests.cache.world import ROOT, key_of, pack

EXTENTS, EXTENT_UNITS = 5, 4
SIZES = (1, 2, 4)  # units


@pytest.mark.parametrize("seed", range(20))
def test_slots_are_found_by_their_place_and_known_by_their_name_whatever_was_there_before(seed: int) -> None:
    chance = random.Random(seed)
    table = SlotTable(Tier.NVME, EXTENTS * EXTENT_UNITS, EXTENT_UNITS, EXTENTS * EXTENT_UNITS)
    taken: list[int] = []
    names: set[tuple[int, int]] = set()
    for _ in range(200):
        slot_units = chance.choice(SIZES)
        if table.spare_extents and table.has_numbers(slot_units):
            extent = table.unassigned_extent()
            assert extent is not None
            assert table.assign(extent, slot_units)
            taken.append(slot := table.take_free(slot_units, SlotState.LIVE))
            name = table.units_at[slot], table.generation_at[slot]
            assert name not in names, "a slot has another name each time that it changes hands"
            names.add(name)
        for slot in chance.sample(taken, chance.randrange(len(taken) + 1)):
            taken.remove(slot)
            table.become(slot, SlotState.FREE)
        assert [table.locate(table.units_at[slot]) for slot in taken] == taken
        sizes = set(table.extent_slot_units.tolist()) - {0}
        assert table.only_slot_units == (sizes.pop() if len(sizes) == 1 else 0)


def test_idle_extents_give_their_numbers_back() -> None:
    """Numbers 1-2, 3-4, ... belong to extents of slots of two units each; every second of them is given to another size."""
    table = SlotTable(Tier.NVME, EXTENTS * EXTENT_UNITS, EXTENT_UNITS, EXTENTS * EXTENT_UNITS)
    for extent in range(EXTENTS):
        assert table.assign(extent, 2)
    for extent in (0, 2, 4):
        table.unassign(extent)
    table.free_ids = [(1, 2), (5, 2), (9, 2)]
    assert table.assign(0, 1)


@pytest.mark.parametrize("seed", range(10))
def test_blocks_of_any_size_go_down_while_nothing_is_held(seed: int) -> None:
    chance = random.Random(seed)
    extent_bytes = EXTENT_UNITS * UNIT_BYTES
    cache = Cache(CacheSizes(EXTENTS * extent_bytes, EXTENTS * extent_bytes, extent_bytes, extent_bytes, index_blocks=80))
    for number, units in enumerate(SIZES):
        cache.open_namespace(NamespaceSpec("default", bytes([number]) * 32, units, units * UNIT_BYTES))
    cache.attach(Attach(1, "default"), 0.0)
    for number in range(100):
        namespace = chance.randrange(len(SIZES)) + 1
        got = cache.reserve(Reserve(1, number + 1, namespace, chance.randrange(1, 5)))
        assert isinstance(got, Reserved)
        assert len(got.units) == len(got.outcomes), "room for so few blocks is there, and nothing is held"
        keys = [key_of((number, i)) for i in range(len(got.units))]
        cache.commit(Commit(1, number + 1, namespace, got.units, got.generations, pack(keys), pack([ROOT])))
        cache.release(Release(1, number + 1))
        write_all(cache)
    assert violations(cache.state) == []


def write_all(cache: Cache) -> None:
    """What the mover does, on a disk that is well."""
    for _ in range(20):
        jobs = [*cache.next_writes(4), *(job for job in cache.drain() if isinstance(job, StartWrite | StartDelete))]
        for job in jobs:
            cache.transfer_done(TransferDone(job.transfer, TransferResult.OK, (1, 1)), 0.0)
        if not jobs and not cache.state.to_write.peek():
            return
    raise AssertionError("blocks wait to be written, and nothing is done about it")
