"""The slots of one tier: extents, size classes, and what each slot is doing.

A tier is cut into extents of equal size; an extent holds slots of one size while it is assigned. Slot numbers are dense (an extent gets
a range of them when it is assigned), 0 means "none". A slot's address is its offset in 4 KiB units; with its generation it names one
tenure.
"""

from __future__ import annotations

from array import array
from collections import Counter
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from kvstore.cache.messages import UNIT_BYTES, Tier, Units

SlotIds = NDArray[np.int32]

SUSPECT = 1  # flag: found on disk after an unclean stop, so a mismatch may be a torn write
DIRTY = 2  # flag: its block waits to be written to the tier below
QUEUED = 4  # flag: is in the queue of slots to be written, for this block or an earlier one
UNSUMMED = 8  # flag: its block waits for its first checksum
SUM_QUEUED = 16  # flag: is in the queue of slots to be summed, for this block or an earlier one
GONE_BELOW = 64  # flag, of a dram slot: its block's copy below was pushed out as cold, and nobody has asked for the block since
WRONG = 32  # flag: returned wrong bytes; goes to quarantine when nobody holds it any more

_STAY = QUEUED | SUM_QUEUED  # flags: a queue has one place a slot, whoever owns the slot


FEW_SLOTS = 128  # slots: up to so many a loop is faster than a dozen array operations


class SlotState(IntEnum):
    """What a slot is doing; every byte of a tier is in exactly one of these (rule: conserved)."""

    UNASSIGNED = 0  # in no extent, or the rest of an extent that no slot fits into
    FREE = 1
    RESERVED = 2  # a session fills it
    FILLING = 3  # a transfer fills it
    LIVE = 4  # a block that can be found
    DOOMED = 5  # removed, but still held, or its record not yet deleted
    ORPHANED = 6  # reserved by a session that ended while its process may still write
    QUARANTINED = 7  # returned wrong bytes


_IDLE = (SlotState.UNASSIGNED, SlotState.FREE, SlotState.QUARANTINED)
_BUSY = np.array([state not in _IDLE for state in SlotState])  # by state: held, whoever else has a lease on it


class SlotTable:
    """Arrays of one tier's slots. `bytes_in[state]` adds up to `capacity_bytes` at all times."""

    def __init__(self, tier: Tier, capacity_units: int, extent_units: int, max_slots: int) -> None:
        self.tier = tier
        self.extent_units = extent_units
        self.extent_count = capacity_units // extent_units
        self.capacity_units = capacity_units
        self.ready_units = capacity_units  # extents past this are not yet usable (memory not touched)
        self.max_slots = max_slots
        size = max_slots + 1
        self.units = np.zeros(size, np.uint32)
        self.row = np.zeros(size, np.int32)
        self.generation = np.zeros(size, np.uint32)
        self.holds = np.zeros(size, np.int32)  # leases and claims on it
        self.transfers = np.zeros(size, np.int16)
        self.state = np.zeros(size, np.uint8)
        self.flags = np.zeros(size, np.uint8)
        self.row_at, self.generation_at = self.row.data, self.generation.data
        self.holds_at, self.transfers_at = self.holds.data, self.transfers.data
        self.state_at, self.flags_at = self.state.data, self.flags.data
        self.units_at = self.units.data
        self.extent_slot_units = np.zeros(self.extent_count, np.int32)
        self.extent_first = np.zeros(self.extent_count, np.int32)
        self.extent_generation = np.zeros(self.extent_count, np.uint32)  # the highest that a slot had there when it was last given back
        self.extent_used = np.zeros(self.extent_count, np.int32)  # slots that are not FREE
        self.extent_slot_units_at, self.extent_used_at = self.extent_slot_units.data, self.extent_used.data
        self.extent_first_at = self.extent_first.data
        self._extents_of: Counter[int] = Counter()  # by slot_units, the assigned ones
        self.only_slot_units = 0  # the one size that all assigned extents have; 0 where there is none, or several
        self.spare_extents = self.extent_count  # unassigned, or all of whose slots are free
        self.free: dict[int, array[int]] = {}  # by slot_units
        self.free_ids: list[tuple[int, int]] = [(1, max_slots)]  # (first, count), ordered
        self.bytes_in = [0] * len(SlotState)
        self.bytes_in[SlotState.UNASSIGNED] = capacity_units * UNIT_BYTES
        self.held_bytes = 0  # of slots that eviction may not touch
        self.blocks = 0  # LIVE slots

    @property
    def capacity_bytes(self) -> int:
        return self.capacity_units * UNIT_BYTES

    # ---- addresses

    def extent_of(self, slot: int) -> int:
        return self.units_at[slot] // self.extent_units

    def slot_units_of(self, slot: int) -> int:
        return self.extent_slot_units_at[self.units_at[slot] // self.extent_units]

    def locate(self, units: int) -> int:
        """The slot that begins at this unit; 0 where none does."""
        extent, within = divmod(units, self.extent_units)
        if extent >= self.extent_count:
            return 0
        slot_units = self.extent_slot_units_at[extent]
        if not slot_units or within % slot_units or within + slot_units > self.extent_units:
            return 0
        return self.extent_first_at[extent] + within // slot_units

    def locate_all(self, units: Units) -> SlotIds:
        """`locate` for many. [n]"""
        extent, within = np.divmod(units.astype(np.int64), self.extent_units)
        inside = extent < self.extent_count
        extent = np.where(inside, extent, 0)
        slot_units = np.maximum(self.extent_slot_units[extent], 1)
        good = inside & (self.extent_slot_units[extent] > 0) & (within % slot_units == 0) & (within + slot_units <= self.extent_units)
        return np.where(good, self.extent_first[extent] + within // slot_units, 0).astype(np.int32)

    def slots_in(self, extent: int) -> slice:
        """The slots of an assigned extent: their numbers follow each other."""
        first = int(self.extent_first[extent])
        return slice(first, first + self.extent_units // int(self.extent_slot_units[extent]))

    def slots_of_class(self, slot_units: int) -> SlotIds:
        """All slots of one size, in extent order."""
        extents = np.flatnonzero(self.extent_slot_units == slot_units)
        per_extent = self.extent_units // slot_units
        slots = self.extent_first[extents][:, None] + np.arange(per_extent, dtype=np.int32)
        return slots.ravel().astype(np.int32)

    # ---- extents

    def assign(self, extent: int, slot_units: int) -> bool:
        """Cut an unassigned extent into free slots of this size. False when there are no numbers for them."""
        count = self.extent_units // slot_units
        if not self.has_numbers(slot_units):
            return False
        place = self._place_of_range(count)
        first, length = self.free_ids[place]
        self.free_ids[place : place + 1] = [(first + count, length - count)] if length > count else []
        self._resize(extent, slot_units)
        self.extent_first[extent] = first
        self.extent_used[extent] = 0
        self.units[first : first + count] = extent * self.extent_units + slot_units * np.arange(count, dtype=np.uint32)
        self.generation[first : first + count] = self.extent_generation[extent]
        self.state[first : first + count] = SlotState.FREE
        self.free.setdefault(slot_units, array("i")).frombytes(np.arange(first + count - 1, first - 1, -1, dtype=np.int32).tobytes())
        self._move_bytes(SlotState.UNASSIGNED, SlotState.FREE, count * slot_units * UNIT_BYTES)
        return True

    def unassign(self, extent: int) -> None:
        """Give back an extent all of whose slots are free."""
        slot_units = int(self.extent_slot_units[extent])
        first, count = int(self.extent_first[extent]), self.extent_units // slot_units
        stack = np.array(self.free[slot_units], np.int32)
        self.free[slot_units] = array("i", stack[(stack < first) | (stack >= first + count)].tobytes())
        self.state[first : first + count] = SlotState.UNASSIGNED
        self._resize(extent, 0)
        self.extent_generation[extent] = self.generation[first : first + count].max()
        self._move_bytes(SlotState.FREE, SlotState.UNASSIGNED, count * slot_units * UNIT_BYTES)
        self._free_id_range(first, count)

    def _resize(self, extent: int, slot_units: int) -> None:
        self._extents_of.update({self.extent_slot_units_at[extent]: -1, slot_units: 1})
        self.extent_slot_units_at[extent] = slot_units
        self._extents_of = Counter({size: extents for size, extents in self._extents_of.items() if size and extents > 0})
        self.only_slot_units = next(iter(self._extents_of)) if len(self._extents_of) == 1 else 0

    def has_numbers(self, slot_units: int) -> bool:
        """Whether an extent of this size could be numbered: its slots need a range without a gap. Idle extents give theirs back for it."""
        count = self.extent_units // slot_units
        if self._place_of_range(count) < 0:
            for idle in np.flatnonzero((self.extent_used == 0) & (self.extent_slot_units > 0)).tolist():
                self.unassign(idle)
        return self._place_of_range(count) >= 0

    def _place_of_range(self, count: int) -> int:
        """Where in `free_ids`; -1 where no range is so long."""
        return next((i for i, (_, length) in enumerate(self.free_ids) if length >= count), -1)

    def _free_id_range(self, first: int, count: int) -> None:
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self.free_ids, (first, count)]):
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self.free_ids = merged

    def unassigned_extent(self) -> int | None:
        """An extent to assign: a fresh one, else one whose slots are all free (given back first)."""
        if not self.spare_extents:
            return None
        ready = self.ready_units // self.extent_units
        fresh = np.flatnonzero(self.extent_slot_units[:ready] == 0)
        if fresh.size:
            return int(fresh[0])
        idle = np.flatnonzero((self.extent_used[:ready] == 0) & (self.extent_slot_units[:ready] > 0))
        if not idle.size:
            return None
        self.unassign(int(idle[0]))
        return int(idle[0])

    # ---- slots

    def take_free(self, slot_units: int, state: SlotState) -> int:
        """A free slot of this size, now in `state`, with a new generation; 0 when there is none."""
        stack = self.free.get(slot_units)
        if not stack:
            return 0
        slot = stack.pop()
        self.generation_at[slot] = self.generation_at[slot] % 0xFFFFFFFF + 1  # 0 is never a generation: it marks holes
        self.flags_at[slot] &= _STAY
        self.row_at[slot] = 0
        self.become(slot, state)
        return slot

    def take_free_many(self, slot_units: int, wanted: int, state: SlotState) -> SlotIds:
        """`take_free` for up to `wanted` slots. [n]"""
        stack = self.free.get(slot_units, array("i"))
        count = min(wanted, len(stack))
        slots = np.array(stack[len(stack) - count :][::-1], np.int32)
        del stack[len(stack) - count :]
        if count <= FEW_SLOTS:
            self._take_few(slots.tolist(), slot_units, state)
            return slots
        self.generation[slots] = self.generation[slots] % np.uint32(0xFFFFFFFF) + np.uint32(1)
        self.flags[slots] &= _STAY
        self.row[slots] = 0
        self.move_many(slots, SlotState.FREE, state)
        self.held_bytes += count * slot_units * UNIT_BYTES * (state not in (SlotState.LIVE, SlotState.QUARANTINED))
        return slots

    def _take_few(self, slots: list[int], slot_units: int, state: SlotState) -> None:
        generation_at, flags_at, row_at, state_at = self.generation_at, self.flags_at, self.row_at, self.state_at
        becomes = int(state)
        for slot in slots:
            generation_at[slot] = generation_at[slot] % 0xFFFFFFFF + 1
            flags_at[slot] &= _STAY
            row_at[slot] = 0
            state_at[slot] = becomes
            self.use_extents(self.units_at[slot] // self.extent_units, 1)
        size_bytes = len(slots) * slot_units * UNIT_BYTES
        self._move_bytes(SlotState.FREE, state, size_bytes)
        self.held_bytes += size_bytes * (state not in (SlotState.LIVE, SlotState.QUARANTINED))
        self.blocks += len(slots) * (state == SlotState.LIVE)

    def move_many(self, slots: SlotIds, before: SlotState, after: SlotState) -> None:
        """Book many distinct slots from one state to another; held bytes and the free stacks are the caller's."""
        self.state[slots] = after
        extents = self.units[slots] // self.extent_units
        total = int(self.extent_slot_units[extents].sum(dtype=np.int64)) * UNIT_BYTES
        self._move_bytes(before, after, total)
        self.blocks += len(slots) * ((after == SlotState.LIVE) - (before == SlotState.LIVE))
        if SlotState.FREE in (before, after):
            change = 1 if before == SlotState.FREE else -1
            for extent, used in _counted(extents):
                self.use_extents(extent, change * used)

    def publish(self, slot: int, row: int) -> None:
        """A reserved slot is live now, with one lease, and has this row's block. `published` books the bytes."""
        self.state_at[slot] = SlotState.LIVE
        self.holds_at[slot] += 1  # held before, as reserved, and held now
        self.row_at[slot] = row

    def published(self, count: int, slot_units: int) -> None:
        """Book so many reserved slots of one size as live and held."""
        self._move_bytes(SlotState.RESERVED, SlotState.LIVE, count * slot_units * UNIT_BYTES)
        self.blocks += count

    def free_many(self, slots: SlotIds, before: SlotState) -> None:
        """Give back many distinct slots of one size, which nobody holds, from this state."""
        self.move_many(slots, before, SlotState.FREE)
        self.free[self.slot_units_of(int(slots[0]))].frombytes(slots.astype(np.int32).tobytes())

    def held_many(self, slots: SlotIds) -> NDArray[np.bool_]:
        """`is_held` for many. [n]"""
        states = self.state[slots]
        live = (self.holds[slots] > 0) | (self.transfers[slots] > 0)
        return np.where(states == SlotState.LIVE, live, _BUSY[states])

    def bytes_of(self, slots: SlotIds) -> NDArray[np.int64]:
        """The size of each slot. [n]"""
        if self.only_slot_units:
            return np.full(len(slots), self.only_slot_units * UNIT_BYTES, np.int64)
        return self.extent_slot_units[self.units[slots] // self.extent_units].astype(np.int64) * UNIT_BYTES

    def hold_many(self, slots: SlotIds, change: int | SlotIds) -> None:
        """`hold` for many distinct slots."""
        before = self.holds[slots]
        after = before + change
        self.holds[slots] = after
        turned = ((before > 0) != (after > 0)) & (self.state[slots] == SlotState.LIVE) & (self.transfers[slots] == 0)
        if turned.any():
            self.held_bytes += int(np.where(after[turned] > 0, 1, -1) @ self.bytes_of(slots[turned]))

    def become(self, slot: int, state: SlotState) -> None:
        """Move a slot from its state to another; a FREE one goes back on the stack."""
        before = self.state_at[slot]
        was_held = self.is_held(slot)
        self.state_at[slot] = state
        slot_bytes = self.slot_units_of(slot) * UNIT_BYTES
        self._move_bytes(before, state, slot_bytes)
        self.held_bytes += (self.is_held(slot) - was_held) * slot_bytes
        self.blocks += (state == SlotState.LIVE) - (before == SlotState.LIVE)
        if before == SlotState.FREE:
            self.use_extents(self.extent_of(slot), 1)
        if state == SlotState.FREE:
            self.use_extents(self.extent_of(slot), -1)
            self.free[self.slot_units_of(slot)].append(slot)

    def use_extents(self, extent: int, change: int) -> None:
        """Book used slots of an extent, and whether it is spare."""
        before = self.extent_used_at[extent]
        self.extent_used_at[extent] = before + change
        self.spare_extents += (not before + change) - (not before)

    def is_held(self, slot: int) -> bool:
        """Whether eviction may not touch it: busy, or live with a lease or transfer on it."""
        state = self.state_at[slot]
        if state == SlotState.LIVE:
            return self.holds_at[slot] > 0 or self.transfers_at[slot] > 0
        return state not in _IDLE

    def hold(self, slot: int, change: int) -> None:
        """Add to (or take from) the leases on a slot."""
        self._count(self.holds_at, slot, change)

    def busy(self, slot: int, change: int) -> None:
        """Add to (or take from) the transfers on a slot."""
        self._count(self.transfers_at, slot, change)

    def _count(self, counts: memoryview[int], slot: int, change: int) -> None:
        was_held = self.is_held(slot)
        counts[slot] += change
        if self.is_held(slot) != was_held:
            self.held_bytes += (-1 if was_held else 1) * self.slot_units_of(slot) * UNIT_BYTES

    def _move_bytes(self, source: int, target: int, size_bytes: int) -> None:
        self.bytes_in[source] -= size_bytes
        self.bytes_in[target] += size_bytes


def _counted(extents: NDArray[np.uint32]) -> list[tuple[int, int]]:
    """How often each is named: (extent, times). Mostly it is one."""
    if len(extents) and (extents == extents[0]).all():
        return [(int(extents[0]), len(extents))]
    return list(zip(*(column.tolist() for column in np.unique(extents, return_counts=True)), strict=True))
