"""Making room: which slots, extents and index rows are given up for what comes.

Room is made at once or not at all: free slots, then an unassigned extent, then a whole extent of another size if it is the colder, then
the coldest evictable leaf, then a whole extent of another size anyway. A dram victim with a copy on nvme is just dropped. Of the coldest
few, one with a copy below goes before one without; when none of them has one, the coldest is dropped all the same and counted.
"""

from __future__ import annotations

import heapq

import numpy as np

from kvstore.cache import leases
from kvstore.cache.eviction.candidates import Candidates
from kvstore.cache.index import CHECKSUM_FLAGS, IN_FLIGHT
from kvstore.cache.messages import AssignExtent, EndReason, NoticeKind, Tier
from kvstore.cache.slots import DIRTY, UNSUMMED, WRONG, SlotIds, SlotState, SlotTable
from kvstore.cache.state import State

CLEAN_RESERVE = 64  # dram slots: how many of the coldest are looked at for one with a copy below
FREE_ROWS_LOOKED_AT = 4096  # blocks: a search for a row to free gives up after so many that are held in another tier
DESCENDANTS_FIRST = 16_384  # blocks put first in line when an ancestor goes by force: 10 ms of work at most


def make_room(state: State, tier: Tier, slot_units: int, wanted: int, becomes: SlotState) -> list[int]:
    """Up to `wanted` slots of this size, in state `becomes`. Fewer only when everything else is held."""
    table = state.tables[tier]
    got: list[int] = table.take_free_many(slot_units, wanted, becomes).tolist()
    while len(got) < wanted:
        found = assign_extent(state, table, slot_units) or take_colder_extent(state, table, slot_units)
        found = found or evict_many(state, tier, slot_units, wanted - len(got)) > 0
        if not found and not take_cold_extent(state, table, slot_units):
            break
        more = table.take_free_many(slot_units, wanted - len(got), becomes).tolist()
        if not more:
            break
        got += more
    return got


def assign_extent(state: State, table: SlotTable, slot_units: int) -> bool:
    """Give an unassigned (or idle) extent to this slot size."""
    extent = table.unassigned_extent()
    if extent is None or not table.assign(extent, slot_units):
        return False
    state.decide(AssignExtent(table.tier, extent, slot_units))
    return True


def evict_one(state: State, tier: Tier, slot_units: int) -> bool:
    """Evict the coldest leaf of this size from the tier. On nvme the slot is reusable only after its record is deleted."""
    return evict_many(state, tier, slot_units, 1) == 1


def evict_many(state: State, tier: Tier, slot_units: int, wanted: int) -> int:
    """Evict up to `wanted` leaves of this size, coldest first; a parent that becomes a leaf takes its turn. Answers how many."""
    candidates = state.candidates(tier, slot_units)
    writes = tier is Tier.DRAM and writes_down(state)
    passed: list[tuple[int, int]] = []  # (rank, slot), a heap: looked at, and without a copy below
    evicted = 0
    while evicted < wanted and (slot := _clean_victim(state, candidates, passed) if writes else candidates.pop()):
        evict(state, tier, slot)
        evicted += 1
    for _, slot in passed:
        if candidates.evictable(slot):
            candidates.expose(slot)
    candidates.evictions_until_look -= evicted
    return evicted


def writes_down(state: State) -> bool:
    """Whether blocks in dram are to have a copy on nvme sooner or later."""
    return state.nvme is not None and state.sizes.nvme_write != "off"


def _clean_victim(state: State, candidates: Candidates, passed: list[tuple[int, int]]) -> int:
    """While writes go down, the coldest dram slot of a few that has a copy below, or else the coldest; 0 when there is none."""
    on_nvme, row_at = state.index.slot_at[Tier.NVME], state.dram.row_at
    while len(passed) < CLEAN_RESERVE and (slot := candidates.pop()):
        if on_nvme[row_at[slot]]:
            return slot
        heapq.heappush(passed, (candidates.rank(slot), slot))
    while passed:
        if candidates.evictable(slot := heapq.heappop(passed)[1]):  # it may have been listed twice, and be gone
            return slot
    return 0


def evict(state: State, tier: Tier, slot: int) -> None:
    """Take an unheld leaf out of one tier."""
    table = state.tables[tier]
    row = table.row_at[slot]
    state.counters[f"evicted_{tier.name.lower()}"] += 1
    if tier is Tier.DRAM and writes_down(state) and not state.index.slot_at[Tier.NVME][row]:
        state.counters["dropped_before_written"] += 1
    state.story.tell(state.index.word(row), "evict", slot, tier)
    _leave_tier(state, tier, row, slot)
    state.index.drop_if_empty(row)


def _leave_tier(state: State, tier: Tier, row: int, slot: int) -> None:
    """The block in `row` is no longer in this slot. The row itself is left to the caller."""
    table, index = state.tables[tier], state.index
    state.notice(NoticeKind.REMOVED, tier, row)
    parent = index.parent_at[row]
    state.policies[tier].left(slot)
    index.displace(tier, row)
    table.row_at[slot] = 0
    table.flags_at[slot] &= ~(DIRTY | UNSUMMED)
    if tier is Tier.NVME:
        table.become(slot, SlotState.DOOMED)
        state.settle(table, slot)
    elif table.is_held(slot):
        table.become(slot, SlotState.DOOMED)
    else:
        table.become(slot, SlotState.QUARANTINED if table.flags_at[slot] & WRONG else SlotState.FREE)
    if parent and (above := index.slot_at[tier][parent]):
        state.expose(tier, above)


def remove(state: State, row: int) -> None:
    """Take a block out of every tier by force; held slots become doomed. Its descendants, which nobody can reach now, go first in line."""
    take_out(state, row)
    _descendants_first(state, row)


def take_out(state: State, row: int) -> None:
    """`remove` where the descendants go too."""
    index = state.index
    for transfers in (state.reading, state.writing, state.verifying):
        if transfer := transfers.pop(row, None):
            transfer.row = 0
            leases.fail_waiters(state, transfer, EndReason.FAILED)
    for tier in index.tiers:
        if slot := index.slot_at[tier][row]:
            _leave_tier(state, tier, row, slot)
    index.flags_at[row] &= ~CHECKSUM_FLAGS
    index.drop_if_empty(row)


def _descendants_first(state: State, row: int) -> None:
    below = state.index.children_of(row)
    for _ in range(DESCENDANTS_FIRST):
        if not below:
            return
        child = below.pop()
        below.extend(state.index.children_of(child))
        for tier in state.index.tiers:
            if slot := state.index.slot_at[tier][child]:
                state.policies[tier].first_in_line(slot)
                state.expose(tier, slot)


def free_rows(state: State, wanted: int) -> bool:
    """Make index rows free by evicting blocks from every tier, coldest leaves of the lowest tier first. False after a bounded search."""
    for tier in reversed(state.index.tiers):
        for slot_units in np.unique(state.tables[tier].extent_slot_units).tolist():
            candidates = state.candidates(tier, slot_units) if slot_units else None
            passed: list[int] = []
            while candidates and state.index.room < wanted and len(passed) < FREE_ROWS_LOOKED_AT and (slot := candidates.pop()):
                if not _evict_everywhere(state, state.tables[tier].row_at[slot]):
                    passed.append(slot)
            for slot in passed:
                state.expose(tier, slot)
    return state.index.room >= wanted


def _evict_everywhere(state: State, row: int) -> bool:
    copies = [(tier, slot) for tier in state.index.tiers if (slot := state.index.slot_at[tier][row])]
    for tier, slot in copies:
        if not state.candidates(tier, state.tables[tier].slot_units_of(slot)).evictable(slot):
            return False
    for tier, slot in copies:
        evict(state, tier, slot)
    return True


# ---- whole extents


def take_colder_extent(state: State, table: SlotTable, slot_units: int) -> bool:
    """Take an extent all of whose blocks are colder than the coldest leaf of this size: sizes share a tier by use, not by who came first.

    A look passes over the whole tier: where it finds none, the next one comes after an extent's worth of evictions.
    """
    candidates = state.candidates(table.tier, slot_units)
    if candidates.evictions_until_look > 0 or not (slot := candidates.pop()):
        return False
    rank = candidates.rank(slot)
    candidates.expose(slot)
    if take_cold_extent(state, table, slot_units, rank):
        return True
    candidates.evictions_until_look = table.extent_units // slot_units
    return False


def take_cold_extent(state: State, table: SlotTable, slot_units: int, colder_than: int | None = None) -> bool:
    """Empty the coldest unheld extent of another size, and give it to this one. On nvme it is usable only after its deletes.

    Where slots of this size cannot be numbered, further ones are emptied for their numbers.
    """
    for age, extent in _extents_by_age(state, table, slot_units):
        if colder_than is not None and age >= colder_than:
            return False
        rows = _closure(state, table, extent)
        if rows is None:
            continue
        for row in rows:
            evict(state, table.tier, state.index.slot_at[table.tier][row])
        state.counters["extents_reassigned"] += 1
        if assign_extent(state, table, slot_units):
            return True
        if table.tier is Tier.NVME:  # its deletes come first
            return False
    return False


def _extents_by_age(state: State, table: SlotTable, slot_units: int) -> list[tuple[int, int]]:
    """Assigned extents of other sizes without a held slot, by the rank of their hottest block, coldest first: (rank, extent)."""
    found = []
    for extent in np.flatnonzero((table.extent_slot_units > 0) & (table.extent_slot_units != slot_units)):
        slots = _slots_of_extent(table, int(extent))
        states = table.state[slots]
        live = states == SlotState.LIVE
        held = (table.holds[slots] > 0) | (table.transfers[slots] > 0) | ~(live | (states == SlotState.FREE))
        if not held.any():
            used = state.candidates(table.tier, int(table.extent_slot_units[extent])).ranks(slots[live])
            found.append((int(used.max()) if used.size else 0, int(extent)))
    return sorted(found)


def _slots_of_extent(table: SlotTable, extent: int) -> SlotIds:
    first = int(table.extent_first[extent])
    return np.arange(first, first + table.extent_units // int(table.extent_slot_units[extent]), dtype=np.int32)


def _closure(state: State, table: SlotTable, extent: int) -> list[int] | None:
    """Rows of the extent's blocks and all that hangs below them in this tier, deepest first; None where one is held."""
    index, slot_at = state.index, state.index.slot_at[table.tier]
    slots = _slots_of_extent(table, extent)
    ordered: list[int] = []
    seen: set[int] = set()
    stack = table.row[slots[table.state[slots] == SlotState.LIVE]].tolist()
    while stack:
        row = stack.pop()
        if row < 0:  # all below this row is listed
            ordered.append(-row)
        elif row not in seen:
            if table.is_held(slot_at[row]):
                return None
            seen.add(row)
            stack.append(-row)
            stack.extend(child for child in index.children_of(row) if slot_at[child] and child not in seen)
    return ordered


# ---- rows


def needs_row(state: State) -> bool:
    """See to one free index row (and one for a ghost parent); False when everything is held."""
    return state.index.room >= 2 or free_rows(state, 2)


def ghost(state: State, namespace: int, parent: bytes) -> int:
    """The row of a parent hash, made without bytes where it is unknown."""
    return state.index.find_one(namespace, parent) or state.index.add_one(namespace, parent)


def is_in_flight(state: State, row: int) -> bool:
    return bool(state.index.flags_at[row] & IN_FLIGHT)
