"""How blocks leave a tier: evicted as the coldest leaves, or taken out by force.

A dram victim with a copy on nvme is just dropped. Of the coldest few, one with a copy below goes before one without; when none of them
has one, the coldest is dropped all the same and counted.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from kvstore.cache import leases
from kvstore.cache.eviction.candidates import Candidates
from kvstore.cache.index import CHECKSUM_FLAGS, Rows
from kvstore.cache.messages import EndReason, NoticeKind, Tier
from kvstore.cache.slots import DIRTY, GONE_BELOW, UNSUMMED, WRONG, SlotIds, SlotState
from kvstore.cache.state import State

CLEAN_RESERVE = 64  # dram slots: how many of the coldest are looked at for one with a copy below
DESCENDANTS_FIRST = 16_384  # blocks put first in line when an ancestor goes by force: 10 ms of work at most


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
        chain = [slot] if passed else candidates.chain_above(slot, wanted - evicted)
        if writes and len(chain) > 1:
            chain = chain[: _leading_clean(state, chain)]
        if len(chain) > 1:
            evict_chain(state, tier, np.array(chain, np.int32))
        else:
            evict(state, tier, slot)
        evicted += max(1, len(chain))
    for _, slot in passed:
        if candidates.evictable(slot):
            candidates.expose(slot)
    candidates.evictions_until_look -= evicted
    return evicted


def _leading_clean(state: State, chain: list[int]) -> int:
    """How many of the first of these dram slots have a copy below."""
    dirty = state.index.slot[Tier.NVME][state.dram.row[chain]] == 0
    return int(np.argmax(dirty)) if dirty.any() else len(chain)


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
    state.story.tell(state.index.namespace_at[row], state.index.word(row), "evict", slot, tier)
    if tier is Tier.NVME and (above := state.index.slot_at[Tier.DRAM][row]):
        state.dram.flags_at[above] |= GONE_BELOW
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


def evict_chain(state: State, tier: Tier, slots: SlotIds) -> None:
    """`evict` for a block and its ancestors, deepest first, each the only child of the next one in this tier."""
    table, index = state.tables[tier], state.index
    if (table.flags[slots] & WRONG).any():
        for slot in slots.tolist():
            evict(state, tier, slot)
        return
    rows = table.row[slots]
    _count_evicted(state, tier, rows)
    state.notice_many(NoticeKind.REMOVED, int(index.namespace[rows[0]]), tier, index.hash[rows])
    index.slot[tier][rows] = 0
    index.children[tier][index.parent[rows]] -= 1
    table.row[slots] = 0
    table.flags[slots] &= ~np.uint8(DIRTY | UNSUMMED)
    last = index.parent_at[rows[-1]]
    if tier is Tier.NVME:
        state.doom_records(slots)
    else:
        table.free_many(slots, SlotState.LIVE)
    if above := index.slot_at[tier][last]:
        state.expose(tier, above)
    index.drop_empty(rows)


def evict_all(state: State, tier: Tier, slots: SlotIds) -> None:
    """`evict` for unheld blocks with all that hangs below them in this tier, in any order."""
    table, index = state.tables[tier], state.index
    rows = table.row[slots]
    if rows.size:
        _count_evicted(state, tier, rows)
    for namespace in np.unique(index.namespace[rows]).tolist():
        mine = index.namespace[rows] == namespace
        _leave_tier_many(state, tier, rows[mine], slots[mine])
    index.drop_empty(rows)


def _count_evicted(state: State, tier: Tier, rows: Rows) -> None:
    """The blocks in these rows are about to be evicted from the tier."""
    index = state.index
    state.counters[f"evicted_{tier.name.lower()}"] += len(rows)
    for end in {0, len(rows) - 1}:  # of a chain its deepest block, and the one that a lookup misses first
        row = int(rows[end])
        state.story.tell(index.namespace_at[row], index.word(row), "evict", index.slot_at[tier][row], len(rows))
    if tier is Tier.NVME:
        in_dram = index.slot[Tier.DRAM][rows]
        state.dram.flags[in_dram[in_dram > 0]] |= GONE_BELOW
    elif writes_down(state):
        state.counters["dropped_before_written"] += int(np.count_nonzero(index.slot[Tier.NVME][rows] == 0))


def remove(state: State, row: int) -> None:
    """Take a block out of every tier by force; held slots become doomed. Its descendants, which nobody can reach now, go first in line."""
    take_out(state, row)
    _descendants_first(state, row)


def take_out(state: State, row: int) -> None:
    """`remove` where the descendants go too."""
    index = state.index
    state.story.tell(index.namespace_at[row], index.word(row), "remove")
    for transfers in (state.reading, state.writing, state.verifying):
        if transfer := transfers.pop(row, None):
            transfer.row = 0
            leases.fail_waiters(state, transfer, EndReason.FAILED)
    for tier in index.tiers:
        if slot := index.slot_at[tier][row]:
            _leave_tier(state, tier, row, slot)
    index.flags_at[row] &= ~CHECKSUM_FLAGS
    index.drop_if_empty(row)


def take_out_many(state: State, rows: Rows) -> None:
    """`take_out` for distinct blocks of one namespace."""
    index = state.index
    apart = _are_intricate(state, rows)
    for row in rows[apart].tolist():
        take_out(state, row)
    rows = rows[~apart]
    for tier in index.tiers:
        here = rows[index.slot[tier][rows] > 0]
        if here.size:
            _leave_tier_many(state, tier, here, index.slot[tier][here])
    index.flags[rows] &= ~np.uint8(CHECKSUM_FLAGS)
    index.drop_empty(rows)


def _are_intricate(state: State, rows: Rows) -> NDArray[np.bool_]:
    """Whether a transfer is about a block, or one of its slots is to go into quarantine. [n]"""
    busy = [*state.reading, *state.writing, *state.verifying]
    found: NDArray[np.bool_] = np.isin(rows, busy) if busy else np.zeros(len(rows), bool)
    for tier, slot_of in state.index.slot.items():
        found |= (state.tables[tier].flags[slot_of[rows]] & WRONG) > 0
    return found


def _leave_tier_many(state: State, tier: Tier, rows: Rows, slots: SlotIds) -> None:
    """`_leave_tier` for many blocks of one namespace that no transfer is about, none of them in a slot with wrong bytes."""
    table, index = state.tables[tier], state.index
    state.notice_many(NoticeKind.REMOVED, int(index.namespace[rows[0]]), tier, index.hash[rows])
    for slot in slots.tolist():
        state.policies[tier].left(slot)
    above = index.parent[rows]
    index.slot[tier][rows] = 0
    np.subtract.at(index.children[tier], above, 1)
    table.row[slots] = 0
    table.flags[slots] &= ~np.uint8(DIRTY | UNSUMMED)
    for _, mine in state.by_size(tier, slots):
        held = table.held_many(mine)
        if tier is Tier.NVME:
            state.doom_records(mine)
        elif held.any():
            table.move_many(mine[held], SlotState.LIVE, SlotState.DOOMED)
        if tier is not Tier.NVME and not held.all():
            table.free_many(mine[~held], SlotState.LIVE)
    leaves = np.unique(index.slot[tier][above])
    state.expose_many(tier, leaves[leaves > 0])


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
