"""The copies down to nvme: which blocks go next, and the slots kept free for them.

An nvme slot is reusable only once its record is deleted, so a stock of free ones is kept ahead: the staging slots of the edge from dram
to nvme.
"""

from __future__ import annotations

import numpy as np

from kvstore.cache.holders import TransferKind
from kvstore.cache.index import HAS_CHECKSUM
from kvstore.cache.leaving import CLEAN_RESERVE, evict_one, writes_down
from kvstore.cache.messages import UNIT_BYTES, StartWrite, Tier
from kvstore.cache.moving import assign_extent, take_cold_extent, take_colder_extent
from kvstore.cache.slots import GONE_BELOW, SlotState, SlotTable
from kvstore.cache.state import State

STAGING_SLOTS = 64  # nvme slots kept free ahead of writes, per size; at most a 16th of the size's slots


def next_writes(state: State, limit: int) -> list[StartWrite]:
    """Up to `limit` blocks to copy down now. The mover asks when it has room; nothing is started otherwise."""
    if not writes_down(state) or state.now < state.writes_paused_until:
        return []
    if state.sizes.nvme_write == "on_evict":
        _queue_coldest(state, limit)
    started: list[StartWrite] = []
    while len(started) < limit and (slot := state.to_write.peek()) and (write := _start_write(state, slot)):
        state.to_write.pop()
        started.append(write)
    return started


def _queue_coldest(state: State, limit: int) -> None:
    """on_evict: of the coldest evictable dram blocks, queue those without a copy below.

    Not those whose copy was pushed out there: where nvme is the smaller, the two tiers would write and push out the same blocks for ever.
    """
    for slot_units in np.unique(state.dram.extent_slot_units):
        if not slot_units:
            continue
        candidates = state.candidates(Tier.DRAM, int(slot_units))
        looked: list[int] = []
        free = len(state.dram.free.get(int(slot_units), ()))
        while len(looked) + free < CLEAN_RESERVE and (slot := candidates.pop()):
            looked.append(slot)
        for slot in looked:
            candidates.expose(slot)
            settled = state.index.slot_at[Tier.NVME][state.dram.row_at[slot]] or state.dram.flags_at[slot] & GONE_BELOW
            if not settled and len(state.to_write) < limit:
                state.to_write.add(slot)


def _start_write(state: State, slot: int) -> StartWrite | None:
    table, index = state.nvme, state.index
    if table is None:
        return None
    row = state.dram.row_at[slot]
    slot_units = state.dram.slot_units_of(slot)
    target = table.take_free(slot_units, SlotState.FILLING)
    if not target and assign_extent(state, table, slot_units):
        target = table.take_free(slot_units, SlotState.FILLING)
    keep_staging(state, table, slot_units)
    if not target:
        return None
    transfer = state.new_transfer(TransferKind.WRITE, row, slot, target)
    state.writing[row] = transfer
    state.dram.busy(slot, 1)
    table.busy(target, 1)
    low, high = index.checksum[row].tolist()
    checksum = (low, high) if index.flags_at[row] & HAS_CHECKSUM else None
    namespace, parent = index.namespace_at[row], index.hash_bytes(index.parent_at[row])
    return StartWrite(
        transfer.id,
        namespace,
        index.hash_bytes(row),
        parent,
        state.dram.units_at[slot],
        table.units_at[target],
        table.generation_at[target],
        checksum,
    )


def keep_staging(state: State, table: SlotTable, slot_units: int) -> None:
    """Evict ahead so that some nvme slots of this size are free (or soon will be) for the next writes."""
    extents = int(np.count_nonzero(table.extent_slot_units == slot_units))
    wanted = min(STAGING_SLOTS, max(1, extents * (table.extent_units // slot_units) // 16))
    unassigned = int(np.count_nonzero(table.extent_slot_units == 0)) * (table.extent_units // slot_units)
    unassigned = unassigned if table.has_numbers(slot_units) else 0
    coming = table.bytes_in[SlotState.DOOMED] // (slot_units * UNIT_BYTES)
    if not table.spare_extents:
        state.candidates(Tier.NVME, slot_units).look_ahead(1, len(table.free.get(slot_units, ())))
    short = wanted - len(table.free.get(slot_units, ())) - unassigned - coming
    if short > 0:
        take_colder_extent(state, table, slot_units)
        short -= table.bytes_in[SlotState.DOOMED] // (slot_units * UNIT_BYTES) - coming
    victims = 0
    while victims < short and evict_one(state, Tier.NVME, slot_units):
        victims += 1
    if short > 0 and not victims and not coming and not table.free.get(slot_units):
        take_cold_extent(state, table, slot_units)
