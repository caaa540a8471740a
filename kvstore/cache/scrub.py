"""Where the background check stands: it walks the slots of every tier, lowest first, again and again, a few blocks at a time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvstore.cache.index import HAS_CHECKSUM, Index
from kvstore.cache.slots import SlotIds, SlotState, SlotTable
from kvstore.cache.vocabulary import Tier

SLOTS_LOOKED_AT = 16_384  # slots: what one call scans, some 100 us where all are in use

_NONE = np.zeros(0, np.int32)


class Scrub:
    """`take` gives the next blocks. A pass ends when every slot was come by; the next begins `rest_s` after its start or later."""

    def __init__(self, index: Index, tables: Mapping[Tier, SlotTable], rest_s: float) -> None:
        self.passes = 0
        self.last_pass_s = 0.0  # what the last whole pass took; 0.0 before that
        self._index = index
        self._tables = [tables[tier] for tier in sorted(tables, reverse=True)]
        self._rest_s = rest_s
        self._rests_until = float("-inf")
        self._began_at: float | None = None  # None: this pass has met no block yet
        self._tier = 0
        self._slot = 1

    def take(self, now: float, limit_bytes: int) -> tuple[SlotTable, SlotIds]:
        """Slots of one tier with blocks that have a checksum: the next one at least, of more no more than `limit_bytes`.

        None at the end of a pass, while it rests, and in a long stretch without such blocks.
        """
        table = self._tables[self._tier]
        if now < self._rests_until or not any(each.blocks for each in self._tables):
            return table, _NONE
        if self._slot > table.max_slots:
            self._slot, self._tier = 1, self._tier + 1
            if self._tier == len(self._tables):
                self._end_pass(now)
                return table, _NONE
            table = self._tables[self._tier]
        slots = self._next_slots(table, limit_bytes)
        if slots.size and self._began_at is None:
            self._began_at = now
        return table, slots

    def _next_slots(self, table: SlotTable, limit_bytes: int) -> SlotIds:
        end = min(self._slot + SLOTS_LOOKED_AT, table.max_slots + 1)
        live = np.int32(self._slot) + np.flatnonzero(table.state[self._slot : end] == SlotState.LIVE).astype(np.int32)
        live = live[(self._index.flags[table.row[live]] & HAS_CHECKSUM) > 0]
        sizes = table.bytes_of(live)
        slots: SlotIds = live[np.cumsum(sizes) <= max(limit_bytes, int(sizes[:1].sum()))]
        self._slot = int(slots[-1]) + 1 if len(slots) < len(live) else end
        return slots

    def _end_pass(self, now: float) -> None:
        self._tier = 0
        if self._began_at is not None:
            self.passes += 1
            self.last_pass_s = now - self._began_at
            self._rests_until = self._began_at + self._rest_s
        self._began_at = None
