"""The yardstick: of the leaves, evict the one whose next use lies farthest ahead. Only a replay knows when that is.

Belady, "A study of replacement algorithms for a virtual-storage computer", 1966. A block's ancestors are used whenever it is, so the one
whose use is farthest is always a leaf or ties with one: over leaves the rule is still the optimum of block hits for one tier.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.bench.replay_trace import NEVER, Trace
from kvstore.cache.eviction.base import FIRST_IN_LINE, Namespaces, Policy
from kvstore.cache.index import Index
from kvstore.cache.slots import SlotIds, SlotTable


class Foresight:
    """When each block of a trace is used next, as of the request that arrived last."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._number = {word: number for number, word in enumerate(trace.hashes[:, 0].tolist())}
        self.next_use = np.full(trace.distinct_blocks, NEVER, np.int64)

    def arrives(self, request: int) -> None:
        """A request's own use of its blocks is past; what counts is the next."""
        self.next_use[self._trace.requests[request].blocks] = self._trace.next_uses[request]

    def numbers(self, words: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Block numbers by the first word of their hashes. [n]"""
        return np.array([self._number[word] for word in words.tolist()], np.int64)

    def policy(self, index: Index, table: SlotTable, namespaces: Namespaces) -> Policy:
        """The policy of one tier."""
        return Optimum(self, index, table)


class Optimum(Policy):
    """The rank of a block is how far its next use is from never, as it was when the block was last used or put here."""

    def __init__(self, foresight: Foresight, index: Index, table: SlotTable) -> None:
        self._foresight, self._index, self._table = foresight, index, table
        self._rank = np.zeros(table.max_slots + 1, np.int64)

    def used(self, slot: int) -> None:
        self.used_many(np.array([slot], np.int32))

    def used_many(self, slots: NDArray[np.int32]) -> None:
        numbers = self._foresight.numbers(self._index.hash[self._table.row[slots], 0])
        self._rank[slots] = FIRST_IN_LINE + 1 + NEVER - self._foresight.next_use[numbers]

    inserted, inserted_many = used, used_many

    def first_in_line(self, slot: int) -> None:
        self._rank[slot] = FIRST_IN_LINE

    def advance(self) -> None:
        """Ranks tell of the future alone."""

    def rank(self, slot: int) -> int:
        return int(self._rank[slot])

    def ranks(self, slots: SlotIds | slice) -> NDArray[np.int64]:
        return self._rank[slots]
