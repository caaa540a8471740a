"""Keep what is dear to recompute for the bytes it takes: GreedyDual-Size with frequency, and a cost that grows with the position.

A block is worth  uses · tokens · (1 + position / QUADRATIC_TOKENS) / bytes : to compute it again, each of its tokens attends to all tokens
before it. Worth is added to an age that rises to the rank of each block whose turn comes, so that what is not used is overtaken at last.
A block is worth nothing without its ancestors; that they go after it is the leaf rule, which holds for every policy.

Cao and Irani: "Cost-aware WWW proxy caching algorithms", USITS 1997. Cherkasova: "Improving WWW proxies performance with
greedy-dual-size-frequency caching policy", HP Laboratories 1998.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.cache.eviction.base import FIRST_IN_LINE, Namespaces, Policy
from kvstore.cache.index import Index, Rows
from kvstore.cache.messages import UNIT_BYTES
from kvstore.cache.slots import SlotIds, SlotTable

QUADRATIC_TOKENS = 30_000  # tokens of context at which attention costs as much as the rest: 15,000 to 53,000 in models of 8B to 671B
MAX_USES = 4  # uses that are counted: more would keep what was popular once for very long
_ONE = 1 << 12  # the worth of the first namespace's first block: fine enough for every position, coarse enough for years of ageing
_ORDER_BITS = 24  # below a rank's worth: the number of the operation, so that equals go by age
_MAX_WORTH = (1 << 59 - _ORDER_BITS) - 1  # keeps ranks below 2^59; reached after millions of turnovers, and from then on only age counts


class Cost(Policy):
    """A slot's rank is the age when it was last used plus its worth."""

    def __init__(self, index: Index, table: SlotTable, namespaces: Namespaces) -> None:
        self._index, self._table, self._namespaces = index, table, namespaces
        self._rank = np.zeros(table.max_slots + 1, np.int64)
        self._rank_at = self._rank.data
        self._worth = np.zeros(table.max_slots + 1, np.int64)  # of one use, in units of 1 / _ONE
        self._uses = np.zeros(table.max_slots + 1, np.uint8)
        self._worth_at, self._uses_at = self._worth.data, self._uses.data
        self._depth = np.zeros(index.capacity + 1, np.int32)  # by row: blocks before it
        self._depth_at = self._depth.data
        self._age = 0
        self._order = 0
        self._first_density = 0.0  # tokens per byte of the first namespace that stored a block: worth is relative to it

    def inserted(self, slot: int) -> None:
        row = self._table.row_at[slot]
        self._depth_at[row] = depth = self._below(self._index.parent_at[row])
        base, growth = self._terms(self._index.namespace_at[row])
        self._worth_at[slot] = int(base + depth * growth)
        self._uses_at[slot] = 1
        self._place(slot)

    def inserted_many(self, slots: NDArray[np.int32]) -> None:
        if not slots.size:
            return
        rows = self._table.row[slots]
        self._measure(rows)
        owner = self._index.namespace[rows]
        for namespace in np.unique(owner).tolist():
            mine = owner == namespace
            base, growth = self._terms(namespace)
            self._worth[slots[mine]] = base + self._depth[rows[mine]] * growth
        self._uses[slots] = 1
        self._place_many(slots)

    def used(self, slot: int) -> None:
        self._uses_at[slot] = min(self._uses_at[slot] + 1, MAX_USES)
        self._place(slot)

    def used_many(self, slots: NDArray[np.int32]) -> None:
        self._uses[slots] = np.minimum(self._uses[slots] + 1, MAX_USES)
        self._place_many(slots)

    def first_in_line(self, slot: int) -> None:
        self._rank_at[slot] = FIRST_IN_LINE

    def advance(self) -> None:
        self._order = (self._order + 1) % (1 << _ORDER_BITS)

    def spares(self, slot: int) -> bool:
        self._age = max(self._age, self._rank_at[slot] >> _ORDER_BITS)
        return False

    def rank(self, slot: int) -> int:
        return self._rank_at[slot]

    def ranks(self, slots: SlotIds | slice) -> NDArray[np.int64]:
        return self._rank[slots]

    def _place(self, slot: int) -> None:
        worth = self._age + self._uses_at[slot] * self._worth_at[slot] + 1
        self._rank_at[slot] = min(worth, _MAX_WORTH) << _ORDER_BITS | self._order

    def _place_many(self, slots: NDArray[np.int32]) -> None:
        worth = self._age + self._uses[slots] * self._worth[slots] + 1
        self._rank[slots] = np.minimum(worth, _MAX_WORTH) << _ORDER_BITS | self._order

    def _measure(self, rows: Rows) -> None:
        """Note how deep each block lies. A parent without a parent is the fingerprint, or as good as one."""
        parents = self._index.parent[rows]
        if (parents[1:] == rows[:-1]).all():
            self._depth[rows] = self._below(int(parents[0])) + np.arange(len(rows))
            return
        for row, parent in zip(rows.tolist(), parents.tolist(), strict=True):
            self._depth_at[row] = self._below(parent)

    def _below(self, parent: int) -> int:
        return self._depth_at[parent] + 1 if self._index.parent_at[parent] else 0

    def _terms(self, namespace: int) -> tuple[float, float]:
        """What the worth of a namespace's blocks is made of: the first block's, and what each further one adds."""
        spec = self._namespaces[namespace]
        tokens = (spec.block_tokens if spec else 0) or 1
        density = tokens / ((spec.slot_units if spec else 1) * UNIT_BYTES)
        self._first_density = self._first_density or density
        base = _ONE * density / self._first_density
        return base, base * tokens / QUADRATIC_TOKENS
