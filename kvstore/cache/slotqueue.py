"""Which blocks wait for work in the background: to be copied down, or for their first checksum."""

from __future__ import annotations

import numpy as np

from kvstore.cache.slots import SlotIds, SlotTable


class SlotQueue:
    """Slots whose blocks wait, oldest first: a ring with a place for each slot, so it never overflows."""

    def __init__(self, table: SlotTable, waits: int, queued: int) -> None:
        """The two flags of a slot that are this queue's: its block still waits; it has a place in the ring."""
        self._table = table
        self._waits, self._queued = waits, queued
        self._ring = np.zeros(table.max_slots + 1, np.int32)
        self._first = self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, slot: int) -> None:
        """Have a slot's block wait. A slot that is queued already (perhaps for an earlier block) is not queued twice."""
        flags = self._table.flags_at
        if not flags[slot] & self._queued:
            self._ring[(self._first + self._count) % len(self._ring)] = slot
            self._count += 1
        flags[slot] |= self._waits | self._queued

    def add_many(self, slots: SlotIds) -> None:
        """`add` for distinct slots."""
        flags = self._table.flags
        fresh = slots[(flags[slots] & self._queued) == 0]
        self._ring[(self._first + self._count + np.arange(len(fresh))) % len(self._ring)] = fresh
        self._count += len(fresh)
        flags[slots] |= self._waits | self._queued

    def peek(self) -> int:
        """The oldest slot whose block still waits; 0 when there is none."""
        flags = self._table.flags_at
        while self._count:
            slot = int(self._ring[self._first])
            if flags[slot] & self._waits:
                return slot
            self.pop()
        return 0

    def pop(self) -> None:
        """Drop the oldest; its block waits no more, or is gone."""
        self._table.flags_at[int(self._ring[self._first])] &= ~(self._waits | self._queued)
        self._first = (self._first + 1) % len(self._ring)
        self._count -= 1
