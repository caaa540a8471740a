"""Beginnings and endings of whole sets of blocks: what was found on disk, what survivors of an earlier daemon hold, clear."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.cache.finding import present_in
from kvstore.cache.holders import Transfer, TransferKind
from kvstore.cache.index import HAS_CHECKSUM, Rows
from kvstore.cache.leaving import take_out_many
from kvstore.cache.messages import UNIT_BYTES, ClearFinished, Hashes, NoticeKind, Recovered, Tier, Units
from kvstore.cache.slots import SUSPECT, SlotIds, SlotState, SlotTable
from kvstore.cache.state import State
from kvstore.cache.story import NO_BLOCK
from kvstore.native.records import WordSet

CLEAR_ROWS = 8192  # rows that a piece of a clear goes over: some 8 ms where all are blocks
AGES = 256  # steps of recency that recovered blocks are told apart by

Elsewhere = Callable[[int, Hashes], NDArray[np.bool_]]  # (namespace, hashes) -> which of them


@dataclass(frozen=True)
class Cleared:
    """What a Clear removed. `held_blocks` are no longer findable but still held by a session; they are freed with its leases."""

    blocks: int
    dram_bytes: int
    nvme_bytes: int
    held_blocks: int

    def and_also(self, other: Cleared) -> Cleared:
        """Both together."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Cleared(*(one + more for one, more in pairs))


def recover(state: State, found: Recovered) -> int:
    """Put the blocks of an nvme directory into an empty index. Answers how many; the records of the others are deleted."""
    nvme, index = state.tables[Tier.NVME], state.index
    slot_units = np.array([0] + [state.spec(i).slot_units for i in range(1, len(state.namespaces))], np.int32)[found.namespaces]
    slots = _assign_extents(nvme, found.units, slot_units)
    kept = np.flatnonzero(_usable(state, found, slots))
    mine = slice(None) if len(kept) == len(slots) else kept  # mostly all: no copies, then
    slots, namespaces, hashes, parents = slots[mine], found.namespaces[mine], found.hashes[mine], found.parents[mine]
    _take_slots(nvme, slots, SlotState.LIVE)
    nvme.generation[slots] = found.generations[mine]
    rows = _add(state, namespaces, hashes)
    index.checksum[rows] = found.checksums[mine]
    index.flags[rows] |= HAS_CHECKSUM
    index.slot[Tier.NVME][rows] = slots
    nvme.row[slots] = rows
    nvme.flags[slots] = SUSPECT if found.suspect else 0
    above = _parents(state, namespaces, parents)
    if len(rows):
        index.link_all(rows, above)
        index.children[Tier.NVME] += np.bincount(above, minlength=index.capacity + 1).astype(np.int32)
    for piece in np.array_split(slots, AGES):  # they came oldest first
        state.policies[Tier.NVME].inserted_many(piece)
        state.policies[Tier.NVME].advance()
    _quarantine(nvme, found.quarantined_units, found.extent_slot_units)
    _delete_the_rest(state, found, kept)
    state.counters["recovered"] += len(kept)
    return len(kept)


def _add(state: State, namespaces: NDArray[np.int32], hashes: Hashes) -> NDArray[np.int32]:
    """New rows for distinct keys. [n]"""
    named = np.flatnonzero(np.bincount(namespaces)).tolist()
    if len(named) == 1:
        return state.index.add(named[0], hashes)
    rows = np.zeros(len(hashes), np.int32)
    for namespace in named:
        mine = np.flatnonzero(namespaces == namespace)
        rows[mine] = state.index.add(namespace, hashes[mine])
    return rows


def _assign_extents(nvme: SlotTable, units: Units, slot_units: NDArray[np.int32]) -> SlotIds:
    """Cut each extent into the size of the first block found in it; blocks of another size there get slot 0."""
    extents = units // nvme.extent_units
    inside = (extents < nvme.extent_count) & (slot_units > 0)
    size_of = np.zeros(nvme.extent_count, np.int32)
    size_of[extents[inside][::-1]] = slot_units[inside][::-1]  # of several values the last one stays
    for extent in np.flatnonzero(size_of).tolist():
        nvme.assign(extent, int(size_of[extent]))
    slots = np.where(inside, nvme.locate_all(units), 0)
    size_there = nvme.extent_slot_units[np.where(inside, extents, 0)]
    return np.where(size_there == slot_units, slots, 0).astype(np.int32)


def _usable(state: State, found: Recovered, slots: SlotIds) -> NDArray[np.bool_]:
    """Blocks with a slot of their own and a key of their own, as many as the index holds (with room for their parents' ghosts)."""
    good = slots > 0
    seen = WordSet(2 * len(slots))
    first = seen.note(state.index.scrambled(found.namespaces, found.hashes))
    good &= _first_of_each(first, lambda: _packed(found.namespaces, found.hashes))
    good &= _first_of_each(np.bincount(slots)[slots] == 1, lambda: slots)
    ghosts = int(np.count_nonzero(seen.note(state.index.scrambled(found.namespaces, found.parents))))
    room = state.index.room - ghosts
    if room < np.count_nonzero(good):  # then a block left out may be a parent: at most every second row is a ghost
        room = min(max(room, 0), state.index.room // 2)
    return good & (np.cumsum(good[::-1])[::-1] <= room)  # the newest ones


def _first_of_each(once: NDArray[np.bool_], exactly: Callable[[], NDArray[Any]]) -> NDArray[np.bool_]:
    """Where a value comes for the first time. [n] `once`: what surely does, mostly all; `exactly` gives the values."""
    if once.all():
        return once
    first = np.zeros(len(once), bool)
    first[np.unique(exactly(), return_index=True)[1]] = True
    return first


def _packed(namespaces: NDArray[np.int32], hashes: Hashes) -> NDArray[np.void]:
    """Keys as values that can be sorted and compared. [n]"""
    keys = np.concatenate([namespaces[:, None].astype("<u8"), hashes], axis=1)
    return np.ascontiguousarray(keys).view(np.dtype((np.void, 40))).ravel()


def _take_slots(table: SlotTable, slots: SlotIds, state: SlotState) -> None:
    """Move many free slots into a state at once."""
    table.move_many(slots, SlotState.FREE, state)
    for size, stack in table.free.items():
        left = np.frombuffer(stack, np.int32)
        table.free[size] = type(stack)("i", left[table.state[left] == SlotState.FREE].tobytes())


def _parents(state: State, namespaces: NDArray[np.int32], parents: Hashes) -> NDArray[np.int32]:
    """The row of each block's parent; ghosts are made for those that are not there."""
    rows = state.index.find_each(namespaces, parents)
    for namespace in np.unique(namespaces[rows == 0]):
        missing = np.flatnonzero((namespaces == namespace) & (rows == 0))
        packed = np.ascontiguousarray(parents[missing]).view(np.dtype((np.void, 32))).ravel()
        distinct, which = np.unique(packed, return_inverse=True)
        ghosts = state.index.add(int(namespace), distinct.view("<u8").reshape(-1, 4))
        rows[missing] = ghosts[which]
    return rows


def _quarantine(nvme: SlotTable, units: Units, extent_slot_units: NDArray[np.int32]) -> None:
    for extent in np.unique(units // nvme.extent_units).tolist():
        if extent < min(nvme.extent_count, len(extent_slot_units)) and extent_slot_units[extent] and not nvme.extent_slot_units[extent]:
            nvme.assign(extent, int(extent_slot_units[extent]))
    slots = nvme.locate_all(units)
    slots = slots[(slots > 0) & (nvme.state[slots] == SlotState.FREE)]
    _take_slots(nvme, np.unique(slots), SlotState.QUARANTINED)


def _delete_the_rest(state: State, found: Recovered, kept: NDArray[np.int64]) -> None:
    nvme = state.tables[Tier.NVME]
    rest = np.ones(len(found.units), bool)
    rest[kept] = False
    slots = np.unique(nvme.locate_all(found.units[rest]))
    for slot in slots[(slots > 0) & (nvme.state[slots] == SlotState.FREE)].tolist():
        nvme.free[nvme.slot_units_of(slot)].remove(slot)
        nvme.become(slot, SlotState.DOOMED)
        state.delete_record(slot)


# ---- survivors of an earlier daemon


def survivors(state: State, units: Units, extent_slot_units: NDArray[np.int32]) -> int:
    """Keep out of use what processes that outlived the last daemon may still touch. Call before anything else is in dram."""
    dram = state.dram
    for extent in np.unique(units // dram.extent_units).tolist():
        if extent < len(extent_slot_units) and extent < dram.extent_count and extent_slot_units[extent] > 0:
            dram.assign(extent, int(extent_slot_units[extent]))
    slots = dram.locate_all(units)
    slots = np.unique(slots[slots > 0])
    _take_slots(dram, slots, SlotState.ORPHANED)
    dram.held_bytes += sum(dram.slot_units_of(slot) for slot in slots.tolist()) * UNIT_BYTES
    return len(slots)


def survivors_gone(state: State, units: Units) -> None:
    """Those processes are gone."""
    for slot in np.unique(state.dram.locate_all(units)).tolist():
        if slot and state.dram.state_at[slot] == SlotState.ORPHANED:
            state.dram.become(slot, SlotState.FREE)


# ---- clear


def clear(state: State, clear_id: int, namespaces: tuple[int, ...], elsewhere: Elsewhere | None = None) -> Cleared:
    """Remove every block of these namespaces from every tier. `ClearFinished` follows when that is on disk.

    `elsewhere` says which blocks of a namespace are in another core too: they are not counted here.
    """
    waits = {transfer.id for transfer in state.transfers.values() if _may_leave_a_record(state, transfer, namespaces)}
    cleared = _clear_rows(state, state.index.rows(), namespaces, elsewhere)
    waits |= state.flush_deletes()
    if waits:
        state.clears[clear_id] = waits
    else:
        state.decide(ClearFinished(clear_id))
    for namespace in namespaces:
        state.story.tell(namespace, NO_BLOCK, "clear", cleared.blocks)
        state.notice(NoticeKind.CLEARED, None, 0, namespace)
    return cleared


def clear_piece(
    state: State, namespaces: tuple[int, ...], start: int, elsewhere: Elsewhere | None = None, most: int = 0
) -> tuple[Cleared, int]:
    """`clear` of the next rows from `start` (at first 1), `most` or CLEAR_ROWS of them: what went, and where to go on, 0 at the end.

    The cache may go on between two pieces. `clear` must follow: it takes what has come meanwhile, and says when all is gone.
    """
    index, most = state.index, most or CLEAR_ROWS
    rows = index.rows(start, start + most)
    return _clear_rows(state, rows, namespaces, elsewhere), index.next_rows(start + most)


def _clear_rows(state: State, rows: Rows, namespaces: tuple[int, ...], elsewhere: Elsewhere | None) -> Cleared:
    index, removed = state.index, Cleared(0, 0, 0, 0)
    rows = rows[present_in(state, rows)]
    for namespace in np.unique(index.namespace[rows]).tolist():
        if namespace not in namespaces:
            continue
        mine = rows[index.namespace[rows] == namespace]
        slots = {tier: here[here > 0] for tier, slot in index.slot.items() for here in [slot[mine]]}
        bytes_in = {tier: int(state.tables[tier].bytes_of(here).sum()) for tier, here in slots.items()}
        held = int(np.count_nonzero(state.dram.holds[slots[Tier.DRAM]]))
        counted = len(mine) - (int(np.count_nonzero(elsewhere(namespace, index.hash[mine]))) if elsewhere is not None else 0)
        removed = removed.and_also(Cleared(counted, bytes_in[Tier.DRAM], bytes_in.get(Tier.NVME, 0), held))
        take_out_many(state, mine)
        state.counters["cleared"] += len(mine)
    return removed


def _may_leave_a_record(state: State, transfer: Transfer, namespaces: tuple[int, ...]) -> bool:
    """Whether, until this transfer has ended, a record of one of these namespaces may be there. Of one that is gone nobody knows whose."""
    if transfer.row:
        return state.index.namespace_at[transfer.row] in namespaces
    return transfer.kind in (TransferKind.DELETE, TransferKind.WRITE)
