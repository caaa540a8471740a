"""S3-FIFO: a small queue that new blocks must prove themselves in, a main queue with second chances, and a memory of who was let go.

Yang, Zhang, Qiu, Yue, Vigfusson: "FIFO queues are all you need for cache eviction", SOSP 2023. What differs here: only leaves can be
evicted, so a block whose turn comes while it has children keeps its place and is asked again when it has none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.cache.eviction.base import FIRST_IN_LINE, LINE_BITS, Namespaces, Policy
from kvstore.cache.index import Index
from kvstore.cache.slots import SlotIds, SlotTable

SMALL_SHARE = 10  # the small queue is held to one in so many of the bytes, as in the paper
MAX_USES = 3  # uses that are counted: two bits, as in the paper
PROVEN_USES = 2  # uses in the small queue that earn a place in the main one: "more than once" in the paper
_WORTHLESS, _SMALL, _MAIN = range(3)
_SMALL_FIRST, _MAIN_FIRST = (_WORTHLESS, _SMALL, _MAIN), (_WORTHLESS, _MAIN, _SMALL)


class S3Fifo(Policy):
    """A slot's rank is its queue and its number in it; its uses are counted apart, and looked at when its turn comes."""

    lines = 3

    def __init__(self, index: Index, table: SlotTable, namespaces: Namespaces) -> None:
        self._index, self._table = index, table
        self._rank = np.zeros(table.max_slots + 1, np.int64)
        self._uses = np.zeros(table.max_slots + 1, np.uint8)
        self._rank_at, self._uses_at = self._rank.data, self._uses.data
        self._number = FIRST_IN_LINE  # of the last slot that entered a queue
        self._units = [0, 0, 0]  # by line
        self._ghosts = _Ghosts(table.max_slots)

    def inserted(self, slot: int) -> None:
        known = self._ghosts.has(self._index.word(self._table.row_at[slot]), self._table.blocks)
        self._enter(slot, _MAIN if known else _SMALL)

    def inserted_many(self, slots: NDArray[np.int32]) -> None:
        for slot in slots.tolist():
            self.inserted(slot)

    def used(self, slot: int) -> None:
        self._uses_at[slot] = min(self._uses_at[slot] + 1, MAX_USES)
        if self._rank_at[slot] >> LINE_BITS == _WORTHLESS:  # it can be reached again
            self._move(slot, _SMALL)

    def used_many(self, slots: NDArray[np.int32]) -> None:
        self._uses[slots] = np.minimum(self._uses[slots] + 1, MAX_USES)
        for slot in slots[self._rank[slots] >> LINE_BITS == _WORTHLESS].tolist():
            self._move(slot, _SMALL)

    def left(self, slot: int) -> None:
        line = self._rank_at[slot] >> LINE_BITS
        self._units[line] -= self._table.slot_units_of(slot)
        if line == _SMALL:
            self._ghosts.add(self._index.word(self._table.row_at[slot]))

    def first_in_line(self, slot: int) -> None:
        self._move(slot, _WORTHLESS)

    def advance(self) -> None:
        """Order of insertion is all the time that this policy knows."""

    def order(self) -> Sequence[int]:
        return _SMALL_FIRST if self._units[_SMALL] * SMALL_SHARE >= sum(self._units) else _MAIN_FIRST

    def spares(self, slot: int) -> bool:
        line, uses = self._rank_at[slot] >> LINE_BITS, self._uses_at[slot]
        if line == _SMALL and uses >= PROVEN_USES:
            self._move(slot, _MAIN)
            self._uses_at[slot] = 0
            return True
        if line == _MAIN and uses:
            self._move(slot, _MAIN)
            self._uses_at[slot] = uses - 1
            return True
        return False

    def rank(self, slot: int) -> int:
        return self._rank_at[slot]

    def ranks(self, slots: SlotIds | slice) -> NDArray[np.int64]:
        return self._rank[slots]

    def _enter(self, slot: int, line: int) -> None:
        self._number += 1
        self._rank_at[slot] = line << LINE_BITS | self._number
        self._uses_at[slot] = 0
        self._units[line] += self._table.slot_units_of(slot)

    def _move(self, slot: int, line: int) -> None:
        uses, before = self._uses_at[slot], self._rank_at[slot] >> LINE_BITS
        self._units[before] -= self._table.slot_units_of(slot)
        self._enter(slot, line)
        self._uses_at[slot] = uses


class _Ghosts:
    """The last blocks that left the small queue, as many as the tier holds: fingerprints in a table of fixed size.

    Two blocks may fall on one place; then the older is forgotten early.
    """

    def __init__(self, max_slots: int) -> None:
        places = 1 << max_slots.bit_length()
        self._mask = places - 1
        self._fingerprint = np.zeros(places, np.uint32)
        self._at = np.zeros(places, np.uint32)
        self._fingerprint_of, self._at_of = self._fingerprint.data, self._at.data
        self._count = 0

    def add(self, word: int) -> None:
        """Remember a block by the first word of its hash."""
        place = word & self._mask
        self._count = self._count % 0xFFFFFFFF + 1  # 0 marks an empty place
        self._fingerprint_of[place], self._at_of[place] = word >> 32, self._count

    def has(self, word: int, blocks: int) -> bool:
        """Whether it is among the last `blocks` that were added."""
        place = word & self._mask
        at = self._at_of[place]
        return bool(at) and self._fingerprint_of[place] == word >> 32 and self._count - at < blocks
