"""Which blocks wait to be copied down."""

from __future__ import annotations

import numpy as np

from kvstore.cache.slots import DIRTY, QUEUED, SlotIds, SlotTable


class WriteQueue:
    """Dram slots whose blocks are to be written to nvme, oldest first: a ring with a place for each slot, so it never overflows."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._ring = np.zeros(table.max_slots + 1, np.int32)
        self._first = self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, slot: int) -> None:
        """Mark a slot dirty. One that is queued already (perhaps for an earlier block) is not queued twice."""
        flags = self._table.flags_at
        if not flags[slot] & QUEUED:
            self._ring[(self._first + self._count) % len(self._ring)] = slot
            self._count += 1
        flags[slot] |= DIRTY | QUEUED

    def add_many(self, slots: SlotIds) -> None:
        """`add` for distinct slots."""
        flags = self._table.flags
        fresh = slots[(flags[slots] & QUEUED) == 0]
        self._ring[(self._first + self._count + np.arange(len(fresh))) % len(self._ring)] = fresh
        self._count += len(fresh)
        flags[slots] |= DIRTY | QUEUED

    def peek(self) -> int:
        """The oldest slot that is still dirty; 0 when there is none."""
        flags = self._table.flags_at
        while self._count:
            slot = int(self._ring[self._first])
            if flags[slot] & DIRTY:
                return slot
            self.pop()
        return 0

    def pop(self) -> None:
        """Drop the oldest; its block is clean, or gone."""
        self._table.flags_at[int(self._ring[self._first])] &= ~(DIRTY | QUEUED)
        self._first = (self._first + 1) % len(self._ring)
        self._count -= 1
