"""The coldest evictable slots of one size class of one tier, in order, without a structure that every use must update.

A survey of the class finds the lowest ranks; the rest lies beyond the `horizon`. A slot that becomes evictable later is pushed only if its
rank is within the horizon, and a use, which raises a rank beyond it, costs nothing here. Entries are checked when popped: stale ones are
dropped. While a list is used up, the next survey goes on step by step. Each line of the policy has a list and a horizon of its own.
"""

from __future__ import annotations

import bisect
import heapq

import numpy as np
from numpy.typing import NDArray

from kvstore.cache.eviction.base import LINE_BITS, Policy
from kvstore.cache.eviction.survey import EVERY_RANK, Ranks, Survey
from kvstore.cache.index import PINNED, Index
from kvstore.cache.slots import SlotState, SlotTable

MIN_KEPT = 256  # candidates: fewer would make a survey too frequent
MAX_KEPT = 65_536  # candidates: 2.5 MB of heap
KEPT_SHARE = 16  # one in so many slots is kept, so that a survey is paid back by as many evictions
_PINNED_RANK = 1 << 60  # pinned blocks come after all others
_LIVE = int(SlotState.LIVE)  # state: a plain number, for the loop that passes thousands of slots
_SLOT_BITS = 32  # an entry is rank << 32 | slot


class _Line:
    """The coldest slots of one line."""

    __slots__ = ("barren", "heap", "horizon", "pace", "pops", "survey")

    def __init__(self) -> None:
        self.heap: list[int] = []
        self.horizon = -1  # the heap lists every evictable slot of this rank or a lower one
        self.barren = False  # there was nothing to list, and nothing has become evictable since
        self.survey: Survey | None = None  # of what lies beyond the horizon
        self.pops = 0  # entries popped since the survey began
        self.pace = 0  # pops a step of the survey: it is done before the heap is empty


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

    def _evictable_of(self, slots: NDArray[np.int32] | slice) -> NDArray[np.int32]:
        """Those of the slots, or of a slice of all, that are evictable. [n]"""
        table = self._table
        free = (table.state[slots] == SlotState.LIVE) & (table.holds[slots] == 0) & (table.transfers[slots] == 0)
        found = np.flatnonzero(free).astype(np.int32) + np.int32(slots.start) if isinstance(slots, slice) else slots[free]
        leaves: NDArray[np.int32] = found[self._index.children[table.tier][table.row[found]] == 0]
        return leaves

    def all_evictable(self) -> NDArray[np.int32]:
        """Every evictable slot of the class, by a scan."""
        return self._evictable_of(self._table.slots_of_class(self._slot_units))

    def rank(self, slot: int) -> int:
        pinned = self._index.flags_at[self._table.row_at[slot]] & PINNED
        return self._policy.rank(slot) + (_PINNED_RANK if pinned else 0)

    def ranks(self, slots: NDArray[np.int32] | slice) -> NDArray[np.int64]:
        pinned = (self._index.flags[self._table.row[slots]] & PINNED) > 0
        return self._policy.ranks(slots) + np.where(pinned, _PINNED_RANK, 0)

    def _line(self, rank: int) -> _Line:
        return self._lines[min(rank >> LINE_BITS, self._last)]

    def _concerns(self, ranks: Ranks) -> NDArray[np.bool_]:
        """Which ranks lie within the horizon of their line, or of its survey; all where it is barren: another line's slot ends that."""
        limits = [EVERY_RANK if line.barren else line.horizon if line.survey is None else line.survey.limit for line in self._lines]
        return ranks <= (np.array(limits)[self._line_of(ranks)] if self._last else limits[0])

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
                self._shorten(line)
        elif line.survey is not None:
            line.survey.note(slot, rank)

    def _shorten(self, line: _Line) -> None:
        """Keep the coldest of a list that has become too long. What the survey has found begins beyond the old horizon: it starts anew."""
        line.heap.sort()
        line.horizon = (line.heap[MAX_KEPT] >> _SLOT_BITS) - 1
        line.heap = line.heap[: bisect.bisect_left(line.heap, (line.horizon + 1) << _SLOT_BITS)]
        self._begin_survey(self._lines.index(line))

    def used(self, slot: int) -> None:
        """The slot's rank rose; mostly beyond the horizon."""
        rank = self.rank(slot)
        line = self._line(rank)
        if (rank <= line.horizon or line.barren or line.survey is not None) and self.evictable(slot):
            self.expose(slot)

    def expose_many(self, slots: NDArray[np.int32]) -> None:
        """`expose` for those of the slots that are evictable."""
        slots = self._evictable_of(slots)
        if not slots.size:
            return
        ranks = self.ranks(slots)
        for line in np.unique(self._line_of(ranks)).tolist() if self._last else (0,):
            self._lines[line].barren = False
        for slot in slots[self._concerns(ranks)].tolist():
            self.expose(slot)

    def used_many(self, slots: NDArray[np.int32]) -> None:
        """`used` for many."""
        # Where there is one line, what being pinned adds to a rank can only make it concern less.
        concerned = slots[self._concerns(self.ranks(slots) if self._last else self._policy.ranks(slots))]
        if concerned.size:
            self.expose_many(concerned)

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
                if line.survey is not None:
                    self._go_on(number, line.survey)
                slot = entry & ((1 << _SLOT_BITS) - 1)
                # Its number may be another size's by now, and its rank the same: all that nobody can reach share one.
                if self.evictable(slot) and self.rank(slot) == entry >> _SLOT_BITS and self._table.slot_units_of(slot) == self._slot_units:
                    return slot
            self._refill(number)
        return 0

    def refill(self) -> None:
        """Survey every line from its coldest slot on, and list what was found."""
        for number, line in enumerate(self._lines):
            line.heap, line.horizon, line.survey = [], -1, None
            self._refill(number)

    def look_ahead(self, wanted: int, free: int) -> None:
        """The class has only `free` more slots, of which `wanted` are being taken: be done with the first survey before they are gone."""
        for number, line in enumerate(self._lines):
            if line.heap or line.barren:
                continue
            survey = line.survey or self._begin_survey(number)
            steps = 1 + survey.steps * wanted // max(1, free) if survey.steps > 1 else 0
            while steps and not survey.done:
                survey.step()
                steps -= 1

    def _begin_survey(self, number: int) -> Survey:
        table, line = self._table, self._lines[number]
        extents = np.flatnonzero(table.extent_slot_units == self._slot_units)
        each = table.extent_units // self._slot_units
        keep = min(MAX_KEPT, max(MIN_KEPT, len(extents) * each // KEPT_SHARE))
        ranges = ((int(table.extent_first[extent]), each) for extent in extents.tolist())
        survey = Survey(ranges, lambda slots: self._in_line(slots, number), line.horizon, keep)
        line.survey, line.pops, line.pace = survey, 0, max(1, len(line.heap) // (survey.steps + 1))
        return survey

    def _in_line(self, slots: NDArray[np.int32] | slice, number: int) -> tuple[NDArray[np.int32], Ranks]:
        """Which of the slots are evictable, of this class and in this line; and their ranks."""
        leaves = self._evictable_of(slots)
        leaves = leaves[self._table.extent_slot_units[self._table.units[leaves] // self._table.extent_units] == self._slot_units]
        ranks = self.ranks(leaves)
        if not self._last:
            return leaves, ranks
        mine = self._line_of(ranks) == number
        return leaves[mine], ranks[mine]

    def _go_on(self, number: int, survey: Survey) -> None:
        """A pop's share of the survey of a large class."""
        line = self._lines[number]
        line.pops += 1
        if line.pops % line.pace:
            return
        if survey.done:
            self._take_over(number, survey)
        else:
            survey.step()

    def _refill(self, number: int) -> None:
        """The list is used up: do what is left of the survey at once."""
        survey = self._lines[number].survey or self._begin_survey(number)
        while not survey.done:
            survey.step()
        self._take_over(number, survey)

    def _take_over(self, number: int, survey: Survey) -> None:
        """List what a survey found. Later uses rank beyond it."""
        self._policy.advance()
        line = self._lines[number]
        slots, ranks = survey.finish()
        line.heap = sorted(line.heap + _entries(slots, ranks))
        if survey.limit < EVERY_RANK:
            line.horizon = survey.limit
        elif len(ranks):
            line.horizon = max(line.horizon, int(ranks.max()))
        line.survey = None
        line.barren = not line.heap and survey.limit == EVERY_RANK
        if line.barren:
            line.horizon = -1
        elif survey.steps > 1:
            self._begin_survey(number)

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


def _entries(slots: NDArray[np.int32], ranks: Ranks) -> list[int]:
    """Rank and slot as one number each, in order where they are small."""
    if not len(ranks) or ranks.max() >> (63 - _SLOT_BITS):
        return [rank << _SLOT_BITS | slot for rank, slot in zip(ranks.tolist(), slots.tolist(), strict=True)]
    entries: list[int] = np.sort(ranks << _SLOT_BITS | slots).tolist()
    return entries
