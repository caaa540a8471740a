"""The coldest evictable slots of one size class of one tier, in order, without a structure that every use must update.

A refill scans the class once and keeps the lowest ranks; the rest lies beyond the `horizon`. A slot that becomes evictable later is pushed
only if its rank is within the horizon, and a use, which raises a rank beyond it, costs nothing here. Entries are checked when popped:
stale ones are dropped.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from kvstore.cache.eviction.base import Policy
from kvstore.cache.index import PINNED, Index
from kvstore.cache.slots import SlotState, SlotTable

MIN_KEPT = 256  # candidates: fewer would make a refill's scan too frequent
MAX_KEPT = 65_536  # candidates: 2.5 MB of heap
KEPT_SHARE = 16  # one in so many slots is kept, so that a scan is paid back by as many evictions
_PINNED_RANK = 1 << 60  # pinned blocks come after all others
_SLOT_BITS = 32  # an entry is rank << 32 | slot


class Candidates:
    """`pop` gives the coldest evictable slot; `expose` tells of one that has just become evictable."""

    def __init__(self, index: Index, table: SlotTable, policy: Policy, slot_units: int) -> None:
        self._index, self._table, self._policy, self._slot_units = index, table, policy, slot_units
        self._heap: list[int] = []
        self._horizon = -1  # the heap lists every evictable slot of this rank or a lower one
        self._barren = False  # the last scan found nothing, and nothing has become evictable since

    def evictable(self, slot: int) -> bool:
        """Rule leaves-first: live, unheld, and without children in this tier."""
        table = self._table
        return (
            table.state_at[slot] == SlotState.LIVE
            and not table.holds_at[slot]
            and not table.transfers_at[slot]
            and not self._index.children_at[table.tier][table.row_at[slot]]
        )

    def all_evictable(self) -> NDArray[np.int32]:
        """Every evictable slot of the class, by a scan."""
        table = self._table
        slots = table.slots_of_class(self._slot_units)
        slots = slots[(table.state[slots] == SlotState.LIVE) & (table.holds[slots] == 0) & (table.transfers[slots] == 0)]
        leaves: NDArray[np.int32] = slots[self._index.children[table.tier][table.row[slots]] == 0]
        return leaves

    def rank(self, slot: int) -> int:
        pinned = self._index.flags_at[self._table.row_at[slot]] & PINNED
        return self._policy.rank(slot) + (_PINNED_RANK if pinned else 0)

    def ranks(self, slots: NDArray[np.int32]) -> NDArray[np.int64]:
        pinned = (self._index.flags[self._table.row[slots]] & PINNED) > 0
        return self._policy.ranks(slots) + np.where(pinned, _PINNED_RANK, 0)

    def expose(self, slot: int) -> None:
        """The slot has become evictable, or its rank fell."""
        self._barren = False
        rank = self.rank(slot)
        if rank <= self._horizon:
            heapq.heappush(self._heap, rank << _SLOT_BITS | slot)
            if len(self._heap) > 2 * MAX_KEPT:
                self._heap, self._horizon = [], -1

    def used(self, slot: int) -> None:
        """The slot's rank rose; mostly beyond the horizon."""
        if self._policy.rank(slot) <= self._horizon and self.evictable(slot):
            self.expose(slot)

    def expose_many(self, slots: NDArray[np.int32]) -> None:
        """`expose` for those of the slots that are evictable."""
        table = self._table
        slots = slots[(table.state[slots] == SlotState.LIVE) & (table.holds[slots] == 0) & (table.transfers[slots] == 0)]
        slots = slots[self._index.children[table.tier][table.row[slots]] == 0]
        if slots.size:
            self._barren = False
            for slot in slots[self.ranks(slots) <= self._horizon].tolist():
                self.expose(slot)

    def used_many(self, slots: NDArray[np.int32]) -> None:
        """`used` for many."""
        for slot in slots[self._policy.ranks(slots) <= self._horizon].tolist():
            self.used(slot)

    def pop(self) -> int:
        """The coldest evictable slot, no longer listed; 0 when there is none."""
        while not self._barren:
            while self._heap:
                entry = heapq.heappop(self._heap)
                slot = entry & ((1 << _SLOT_BITS) - 1)
                if self.evictable(slot) and self.rank(slot) == entry >> _SLOT_BITS:
                    return slot
            self.refill()
        return 0

    def refill(self) -> None:
        """List the coldest again, by a scan. Later uses rank beyond it."""
        self._policy.advance()
        slots = self.all_evictable()
        ranks = self.ranks(slots)
        keep = min(MAX_KEPT, max(MIN_KEPT, len(slots) // KEPT_SHARE))
        self._barren = not len(slots)
        self._horizon = -1 if self._barren else int(np.partition(ranks, keep)[keep] if len(slots) > keep else ranks.max())
        within = np.flatnonzero(ranks <= self._horizon)
        if len(within) > 2 * keep:  # very many share the last rank: leave them for the next scan, unless there is no other
            lower = np.flatnonzero(ranks < self._horizon)
            within, self._horizon = (lower, self._horizon - 1) if lower.size else (within, self._horizon)
        slots, ranks = slots[within], ranks[within]
        self._heap = sorted((int(rank) << _SLOT_BITS) | int(slot) for rank, slot in zip(ranks, slots, strict=True))

    def missing(self) -> NDArray[np.int32]:
        """Evictable slots that the heap should list and does not (rule: progress). For the invariants."""
        slots = self.all_evictable()
        listed = set(self._heap)
        covered = slots if self._barren else slots[self.ranks(slots) <= self._horizon]
        gone = [slot for slot in covered.tolist() if (self.rank(slot) << _SLOT_BITS | slot) not in listed]
        return np.array(gone, np.int32)
