"""The coldest evictable slots of one size class of one tier, in order, without a structure that every use must update.

A refill scans the class once and keeps the lowest ranks; the rest lies beyond the `horizon`. A slot that becomes evictable later is pushed
only if its rank is within the horizon, and a use, which raises a rank beyond it, costs nothing here. Entries are checked when popped:
stale ones are dropped. Each line of the policy has a list and a horizon of its own.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from kvstore.cache.eviction.base import LINE_BITS, Policy
from kvstore.cache.index import PINNED, Index
from kvstore.cache.slots import SlotState, SlotTable

MIN_KEPT = 256  # candidates: fewer would make a refill's scan too frequent
MAX_KEPT = 65_536  # candidates: 2.5 MB of heap
KEPT_SHARE = 16  # one in so many slots is kept, so that a scan is paid back by as many evictions
_PINNED_RANK = 1 << 60  # pinned blocks come after all others
_EVERY_RANK = (1 << 62) - 1  # a horizon beyond all ranks
_LIVE = int(SlotState.LIVE)  # state: a plain number, for the loop that passes thousands of slots
_SLOT_BITS = 32  # an entry is rank << 32 | slot


class _Line:
    """The coldest slots of one line."""

    __slots__ = ("barren", "heap", "horizon")

    def __init__(self) -> None:
        self.heap: list[int] = []
        self.horizon = -1  # the heap lists every evictable slot of this rank or a lower one
        self.barren = False  # the last scan found nothing, and nothing has become evictable since


class Candidates:
    """`pop` gives the coldest evictable slot; `expose` tells of one that has just become evictable."""

    def __init__(self, index: Index, table: SlotTable, policy: Policy, slot_units: int) -> None:
        self._index, self._table, self._policy, self._slot_units = index, table, policy, slot_units
        self._last = policy.lines if policy.lines > 1 else 0  # beside several lines, pinned slots have one of their own
        self._lines = [_Line() for _ in range(self._last + 1)]
        self.evictions_until_look = 0  # until it is worth to look whether another size's blocks are colder

    def evictable(self, slot: int) -> bool:
        """Rule leaves-first: live, unheld, and without children in this tier."""
        table = self._table
        return (
            table.state_at[slot] == SlotState.LIVE
            and not table.holds_at[slot]
            and not table.transfers_at[slot]
            and not self._index.children_at[table.tier][table.row_at[slot]]
        )

    def _evictable_of(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        table = self._table
        slots = slots[(table.state[slots] == SlotState.LIVE) & (table.holds[slots] == 0) & (table.transfers[slots] == 0)]
        leaves: NDArray[np.int32] = slots[self._index.children[table.tier][table.row[slots]] == 0]
        return leaves

    def all_evictable(self) -> NDArray[np.int32]:
        """Every evictable slot of the class, by a scan."""
        return self._evictable_of(self._table.slots_of_class(self._slot_units))

    def rank(self, slot: int) -> int:
        pinned = self._index.flags_at[self._table.row_at[slot]] & PINNED
        return self._policy.rank(slot) + (_PINNED_RANK if pinned else 0)

    def ranks(self, slots: NDArray[np.int32]) -> NDArray[np.int64]:
        pinned = (self._index.flags[self._table.row[slots]] & PINNED) > 0
        return self._policy.ranks(slots) + np.where(pinned, _PINNED_RANK, 0)

    def _line(self, rank: int) -> _Line:
        return self._lines[min(rank >> LINE_BITS, self._last)]

    def _within(self, ranks: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which ranks lie within the horizon of their line; all do where it is barren, which a slot from another line ends. [n]"""
        if not self._last:
            return ranks <= self._lines[0].horizon
        return ranks <= np.array([_EVERY_RANK if line.barren else line.horizon for line in self._lines])[self._line_of(ranks)]

    def _line_of(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        lines: NDArray[np.int64] = np.minimum(ranks >> LINE_BITS, self._last)
        return lines

    def expose(self, slot: int) -> None:
        """The slot has become evictable, or its rank fell."""
        rank = self.rank(slot)
        line = self._line(rank)
        line.barren = False
        if rank <= line.horizon:
            heapq.heappush(line.heap, rank << _SLOT_BITS | slot)
            if len(line.heap) > 2 * MAX_KEPT:
                line.heap, line.horizon = [], -1

    def used(self, slot: int) -> None:
        """The slot's rank rose; mostly beyond the horizon."""
        rank = self._policy.rank(slot)
        line = self._line(rank)
        if (rank <= line.horizon or line.barren) and self.evictable(slot):
            self.expose(slot)

    def expose_many(self, slots: NDArray[np.int32]) -> None:
        """`expose` for those of the slots that are evictable."""
        slots = self._evictable_of(slots)
        if not slots.size:
            return
        ranks = self.ranks(slots)
        for line in np.unique(self._line_of(ranks)).tolist() if self._last else (0,):
            self._lines[line].barren = False
        for slot in slots[self._within(ranks)].tolist():
            self.expose(slot)

    def used_many(self, slots: NDArray[np.int32]) -> None:
        """`used` for many."""
        for slot in slots[self._within(self._policy.ranks(slots))].tolist():
            self.used(slot)

    def pop(self) -> int:
        """The coldest evictable slot, no longer listed; 0 when there is none."""
        while True:
            slot = self._coldest()
            if not slot or not self._policy.spares(slot):
                return slot
            self.expose(slot)

    def chain_above(self, slot: int, most: int) -> list[int]:
        """The slot that was just popped, and its ancestors as far as they are the next to go, each when the one before it has gone."""
        chain = [slot]
        if not self._policy.follows_chains:
            return chain
        line, table, index, rank = self._lines[0], self._table, self._index, self._policy.rank
        limit = min(line.horizon, line.heap[0] >> _SLOT_BITS) if line.heap else line.horizon
        slot_at, children_at = index.slot_at[table.tier], index.children_at[table.tier]
        parent_at, flags_at = index.parent_at, index.flags_at
        state_at, holds_at, transfers_at = table.state_at, table.holds_at, table.transfers_at
        row = table.row_at[slot]
        while len(chain) < most:
            row = parent_at[row]
            above = slot_at[row]
            if not above or children_at[row] != 1 or state_at[above] != _LIVE or holds_at[above] or transfers_at[above]:
                break
            if flags_at[row] & PINNED or rank(above) > limit:
                break
            chain.append(above)
        return chain

    def _coldest(self) -> int:
        for number in self._policy.order():
            if slot := self._pop_line(number):
                return slot
        return self._pop_line(self._last) if self._last else 0

    def _pop_line(self, number: int) -> int:
        line = self._lines[number]
        while not line.barren:
            while line.heap:
                entry = heapq.heappop(line.heap)
                slot = entry & ((1 << _SLOT_BITS) - 1)
                if self.evictable(slot) and self.rank(slot) == entry >> _SLOT_BITS:
                    return slot
            self._refill(number)
        return 0

    def refill(self) -> None:
        """List the coldest of every line again, by a scan each."""
        for number in range(len(self._lines)):
            self._refill(number)

    def _refill(self, number: int) -> None:
        """List the coldest of a line again, by a scan. Later uses rank beyond it."""
        self._policy.advance()
        line, slots = self._lines[number], self.all_evictable()
        ranks = self.ranks(slots)
        if self._last:
            mine = self._line_of(ranks) == number
            slots, ranks = slots[mine], ranks[mine]
        keep = min(MAX_KEPT, max(MIN_KEPT, len(slots) // KEPT_SHARE))
        line.barren = not len(slots)
        line.horizon = -1 if line.barren else int(np.partition(ranks, keep)[keep] if len(slots) > keep else ranks.max())
        within = np.flatnonzero(ranks <= line.horizon)
        if len(within) > 2 * keep:  # very many share the last rank: leave them for the next scan, unless there is no other
            lower = np.flatnonzero(ranks < line.horizon)
            within, line.horizon = (lower, line.horizon - 1) if lower.size else (within, line.horizon)
        slots, ranks = slots[within], ranks[within]
        line.heap = sorted((int(rank) << _SLOT_BITS) | int(slot) for rank, slot in zip(ranks, slots, strict=True))

    def missing(self) -> NDArray[np.int32]:
        """Evictable slots that a heap should list and does not (rule: progress). For the invariants."""
        slots = self.all_evictable()
        listed = {entry for line in self._lines for entry in line.heap}
        gone = []
        for slot in slots.tolist():
            rank = self.rank(slot)
            line = self._line(rank)
            if (line.barren or rank <= line.horizon) and (rank << _SLOT_BITS | slot) not in listed:
                gone.append(slot)
        return np.array(gone, np.int32)
