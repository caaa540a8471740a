"""Making room: which slots, extents and index rows are given up for what comes.

Room is made at once or not at all: free slots, then an unassigned extent, then a whole extent of another size if it is the colder, then
the coldest evictable leaf, then a whole extent of another size anyway.
"""

from __future__ import annotations

import numpy as np

from kvstore.cache.index import IN_FLIGHT
from kvstore.cache.leaving import evict, evict_all, evict_chain, evict_many
from kvstore.cache.messages import AssignExtent, Tier
from kvstore.cache.slots import WRONG, SlotIds, SlotState, SlotTable
from kvstore.cache.state import State

AHEAD_SHARE = 16  # extents: when one in so many is left, the search for what to evict begins, in steps too small to be felt
FREE_ROWS_LOOKED_AT = 4096  # blocks: a search for a row to free gives up after so many that are held in another tier


def make_room(state: State, tier: Tier, slot_units: int, wanted: int, becomes: SlotState) -> list[int]:
    """Up to `wanted` slots of this size, in state `becomes`. Fewer only when everything else is held."""
    table = state.tables[tier]
    one = table.take_free(slot_units, becomes) if wanted == 1 else 0
    got: list[int] = [one] if one else table.take_free_many(slot_units, wanted, becomes).tolist()
    if table.spare_extents <= table.extent_count // AHEAD_SHARE:
        free = len(table.free.get(slot_units, ())) + table.spare_extents * (table.extent_units // slot_units)
        state.candidates(tier, slot_units).look_ahead(wanted, free)
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


def free_rows(state: State, wanted: int) -> bool:
    """Make index rows free by evicting blocks from every tier, coldest leaves of the lowest tier first. False after a bounded search."""
    for tier in reversed(state.index.tiers):
        for slot_units in np.unique(state.tables[tier].extent_slot_units).tolist():
            candidates = state.candidates(tier, slot_units) if slot_units else None
            passed: list[int] = []
            while candidates and state.index.room < wanted and len(passed) < FREE_ROWS_LOOKED_AT and (slot := candidates.pop()):
                chain = _only_there(state, tier, candidates.chain_above(slot, wanted - state.index.room))
                if len(chain) > 1:
                    evict_chain(state, tier, chain)
                elif not _evict_everywhere(state, state.tables[tier].row_at[slot]):
                    passed.append(slot)
            for slot in passed:
                state.expose(tier, slot)
    return state.index.room >= wanted


def _only_there(state: State, tier: Tier, chain: list[int]) -> SlotIds:
    """The first of these slots, as far as their blocks are in no other tier."""
    slots = np.array(chain, np.int32)
    rows = state.tables[tier].row[slots]
    elsewhere = np.zeros(len(rows), bool)
    for other in state.index.tiers:
        if other is not tier:
            elsewhere |= state.index.slot[other][rows] > 0
    return slots[: int(np.argmax(elsewhere))] if elsewhere.any() else slots


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
        slots = _closure(state, table, extent)
        if slots is None:
            continue
        evict_all(state, table.tier, slots)
        state.counters["extents_reassigned"] += 1
        if assign_extent(state, table, slot_units):
            return True
        if table.tier is Tier.NVME:  # its deletes come first
            return False
    return False


def _extents_by_age(state: State, table: SlotTable, slot_units: int) -> list[tuple[int, int]]:
    """Assigned extents of other sizes without a held slot, by the rank of their hottest block, coldest first: (rank, extent)."""
    found = []
    for extent in np.flatnonzero((table.extent_slot_units > 0) & (table.extent_slot_units != slot_units)).tolist():
        slots = table.slots_in(extent)
        states = table.state[slots]
        live = states == SlotState.LIVE
        idle = live | (states == SlotState.FREE)
        if not idle.all() or table.holds[slots].any() or table.transfers[slots].any():
            continue
        ranks = state.candidates(table.tier, int(table.extent_slot_units[extent])).ranks(slots)[live]
        found.append((int(ranks.max()) if ranks.size else 0, extent))
    return sorted(found)


def _closure(state: State, table: SlotTable, extent: int) -> SlotIds | None:
    """Slots of the extent's blocks and of all that hangs below them in this tier; None where one is held, or has wrong bytes."""
    index, slot_of = state.index, state.index.slot[table.tier]
    here = table.slots_in(extent)
    level = table.row[here][table.state[here] == SlotState.LIVE]
    seen = np.zeros(index.capacity + 1, bool)  # a page of it takes memory when it is touched
    seen[level] = True
    levels = [level]
    while level.size:
        slots = slot_of[level]
        if table.held_many(slots).any() or (table.flags[slots] & WRONG).any():
            return None
        level = index.children_of_many(level)
        level = level[(slot_of[level] > 0) & ~seen[level]]
        seen[level] = True
        levels.append(level)
    found: SlotIds = slot_of[np.concatenate(levels)]
    return found


# ---- rows


def needs_row(state: State) -> bool:
    """See to one free index row (and one for a ghost parent); False when everything is held."""
    return state.index.room >= 2 or free_rows(state, 2)


def ghost(state: State, namespace: int, parent: bytes) -> int:
    """The row of a parent hash, made without bytes where it is unknown."""
    return state.index.find_one(namespace, parent) or state.index.add_one(namespace, parent)


def is_in_flight(state: State, row: int) -> bool:
    return bool(state.index.flags_at[row] & IN_FLIGHT)
