"""Least recently used: the rank of a block is the number of the operation that last used it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.cache.eviction.base import FIRST_IN_LINE, Namespaces, Policy
from kvstore.cache.index import Index
from kvstore.cache.slots import SlotIds, SlotTable


class Lru(Policy):
    """One stamp a slot. All blocks of one operation share a stamp: among them the leaf rule alone decides."""

    follows_chains = True

    def __init__(self, index: Index, table: SlotTable, namespaces: Namespaces) -> None:
        self._stamp = np.zeros(table.max_slots + 1, np.int64)
        self._stamp_at = self._stamp.data
        self._now = FIRST_IN_LINE + 1

    def used(self, slot: int) -> None:
        self._stamp_at[slot] = self._now

    def used_many(self, slots: NDArray[np.int32]) -> None:
        self._stamp[slots] = self._now

    inserted, inserted_many = used, used_many

    def first_in_line(self, slot: int) -> None:
        self._stamp_at[slot] = FIRST_IN_LINE

    def advance(self) -> None:
        self._now += 1

    def rank(self, slot: int) -> int:
        return self._stamp_at[slot]

    def ranks(self, slots: SlotIds | slice) -> NDArray[np.int64]:
        return self._stamp[slots]
