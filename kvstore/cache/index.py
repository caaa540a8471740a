"""The index: which keys are known, and in which slot of each tier their bytes are.

A key is (namespace, block hash). Rows are numbers in preallocated arrays; row 0 and slot 0 mean "none", so fresh memory is empty memory.
Keys are found through an open-addressed table (linear probing, at most half full) whose home positions are mixed with a secret seed: hashes
come from clients. A row without bytes in any tier is a *ghost*: it stays while it has children, so that a parent that was dropped and comes
back finds them again, and so that a child's record can name its parent. The first block's parent, the fingerprint, is such a ghost too.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.cache.messages import Hashes, Tier
from kvstore.cache.tokens import TokenTable
from kvstore.native.rows import NATIVE_ARRAYS, native_rows

Rows = NDArray[np.int32]

IN_FLIGHT = 1  # flag: a named reservation holds this key
PINNED = 2  # flag: an operator wants it kept
HAS_CHECKSUM = 4  # flag: `checksum` is known
GIVEN = 8  # flag: it is a client's word, with which the bytes have not been compared yet
CHECKSUM_FLAGS = HAS_CHECKSUM | GIVEN  # flags: those of a checksum that came with a commit

_MASK64 = (1 << 64) - 1  # bits: arithmetic of C's uint64 in Python's integers


class Index:
    """Rows, their links, and the table that finds them. Nothing here grows after construction."""

    def __init__(self, capacity: int, tiers: tuple[Tier, ...], seed: int) -> None:
        self.capacity = capacity
        bits = max(4, (2 * capacity - 1).bit_length())
        self._shift = 64 - bits
        self._position_mask = (1 << bits) - 1
        self._mix = (seed << 1 | 1) & _MASK64
        rows = capacity + 1
        self.table = np.empty(1 << bits, np.int32)
        self.table.fill(0)  # takes its memory now: keys fall anywhere, and the first thousands would each wait for a page
        self.hash = np.zeros((rows, 4), np.uint64)
        self.checksum = np.zeros((rows, 2), np.uint64)
        self.namespace = np.zeros(rows, np.int32)
        self.parent = np.zeros(rows, np.int32)
        self.first_child = np.zeros(rows, np.int32)
        self.next_sibling = np.zeros(rows, np.int32)
        self.previous_sibling = np.zeros(rows, np.int32)
        self.flags = np.zeros(rows, np.uint8)
        self.slot = {tier: np.zeros(rows, np.int32) for tier in tiers}
        self.children = {tier: np.zeros(rows, np.int32) for tier in tiers}
        self.tiers = tiers
        self.tokens: TokenTable | None = None  # where a namespace has tails
        self._freed = np.zeros(rows, np.int32)
        self._freed_count = 0
        self._fresh = 1  # rows from here on were never used
        self._view_scalars()
        arrays = {name: getattr(self, name) for name in NATIVE_ARRAYS}
        by_speed = {int(tier): self.slot[tier] for tier in sorted(tiers)}
        self.native = native_rows(arrays, by_speed, self._freed, self._mix, self._shift, IN_FLIGHT)

    def _view_scalars(self) -> None:
        # Indexing a memoryview yields a plain int in a third of the time that indexing an array takes.
        self._table_at = self.table.data
        self._word_at = self.hash[:, 0].data
        self._bytes_at = self.hash.data.cast("B")
        self.namespace_at = self.namespace.data
        self.parent_at = self.parent.data
        self.first_child_at = self.first_child.data
        self.next_at = self.next_sibling.data
        self.previous_at = self.previous_sibling.data
        self.flags_at = self.flags.data
        self.slot_at = {tier: array.data for tier, array in self.slot.items()}
        self.children_at = {tier: array.data for tier, array in self.children.items()}

    # ---- finding

    @property
    def used(self) -> int:
        """Rows in use, ghosts included."""
        return self._fresh - 1 - self._freed_count

    @property
    def room(self) -> int:
        return self.capacity - self.used

    def find(self, namespace: int, hashes: Hashes) -> Rows:
        """The row of each hash, 0 where unknown. [n]"""
        if self.native is not None:
            return self.native.find(namespace, hashes)
        found = np.zeros(len(hashes), np.int32)
        left = np.arange(len(hashes))
        position = self._homes(namespace, hashes[:, 0])
        while left.size:
            row = self.table[position]
            hit = (self.namespace[row] == namespace) & (self.hash[row] == hashes[left]).all(axis=1)
            found[left[hit]] = row[hit]
            probe = ~hit & (row != 0)
            left = left[probe]
            position = (position[probe] + 1) & self._position_mask
        return found

    def find_one(self, namespace: int, key: bytes) -> int:
        """The row of one hash, 0 where unknown."""
        word = int.from_bytes(key[:8], "little")
        position = self._home_of(namespace, word)
        while row := self._table_at[position]:
            if self._word_at[row] == word and self.namespace_at[row] == namespace and self._bytes_at[32 * row : 32 * row + 32] == key:
                return row
            position = (position + 1) & self._position_mask
        return 0

    def find_each(self, namespaces: Rows, hashes: Hashes) -> Rows:
        """`find` where every key has a namespace of its own. [n]"""
        named = np.flatnonzero(np.bincount(namespaces)).tolist()
        if len(named) == 1:
            return self.find(named[0], hashes)
        found = np.zeros(len(hashes), np.int32)
        for namespace in named:
            mine = np.flatnonzero(namespaces == namespace)
            found[mine] = self.find(namespace, hashes[mine])
        return found

    def _homes(self, namespace: int, words: NDArray[np.uint64]) -> NDArray[np.int64]:
        spread = np.uint64((namespace * 0x9E3779B97F4A7C15) & _MASK64)  # Fibonacci hashing's constant, 2^64 / golden ratio
        return ((words ^ spread) * np.uint64(self._mix) >> np.uint64(self._shift)).astype(np.int64)

    def _home_of(self, namespace: int, word: int) -> int:
        spread = (namespace * 0x9E3779B97F4A7C15) & _MASK64
        return (((word ^ spread) * self._mix) & _MASK64) >> self._shift

    def scrambled(self, namespaces: Rows, hashes: Hashes) -> NDArray[np.uint64]:
        """One word a key, the same for the same key; of different ones nearly never, whoever chose them: the factors are secret.

        Each factor takes 32 bits: a difference of those is hidden by one in 2^33 factors at most, whatever the other halves are.
        """
        factors = [np.uint64(_splitmix((self._mix + place) & _MASK64)) for place in range(9)]
        words = namespaces.astype(np.uint64) * factors[8]
        for place in range(4):
            word = hashes[:, place]
            words += (word >> np.uint64(32)) * factors[2 * place]
            words += (word & np.uint64(0xFFFFFFFF)) * factors[2 * place + 1]
        return words ^ (words >> np.uint64(29))

    # ---- adding and dropping rows

    def add(self, namespace: int, hashes: Hashes) -> Rows:
        """New rows for keys that are distinct and not yet known; the caller has seen to `room`. [n]"""
        rows = self.take_rows(len(hashes))
        self.hash[rows] = hashes
        self.namespace[rows] = namespace
        if self.native is not None:
            self.native.enter(rows)
            return rows
        pending, position = rows, self._homes(namespace, hashes[:, 0])
        while pending.size:
            empty = self.table[position] == 0
            self.table[position[empty]] = pending[empty]  # of several rows at one position the last is left standing
            lost = self.table[position] != pending
            pending = pending[lost]
            position = (position[lost] + 1) & self._position_mask
        return rows

    def add_one(self, namespace: int, key: bytes) -> int:
        """`add` for one key."""
        row = int(self.take_rows(1)[0])
        self._bytes_at[32 * row : 32 * row + 32] = key
        self.namespace_at[row] = namespace
        position = self._home_of(namespace, self._word_at[row])
        while self._table_at[position]:
            position = (position + 1) & self._position_mask
        self._table_at[position] = row
        return row

    def take_rows(self, count: int) -> Rows:
        """Rows that nothing uses; they are the caller's to fill. [n]"""
        again = min(count, self._freed_count)
        self._freed_count -= again
        reused = self._freed[self._freed_count : self._freed_count + again].copy()
        fresh = np.arange(self._fresh, self._fresh + count - again, dtype=np.int32)
        self._fresh += count - again
        return np.concatenate([reused, fresh])

    def drop_if_empty(self, row: int) -> None:
        """Forget a row that has no bytes anywhere, no writer and no children; then its parent likewise."""
        if self.tokens is not None and not self.stored(row):
            self.tokens.forget(row)
        while row and not self.first_child_at[row] and not self.flags_at[row] & IN_FLIGHT and not self.stored(row):
            parent = self.parent_at[row]
            if parent:
                self.unlink(row)
            self._remove_from_table(row)
            self.namespace_at[row] = 0
            self.flags_at[row] = 0
            self._freed[self._freed_count] = row
            self._freed_count += 1
            row = parent

    def drop_empty(self, rows: Rows) -> None:
        """`drop_if_empty` for many, in this order; one that is gone by then, being another's parent, is passed over."""
        if self.tokens is not None:
            stored = np.zeros(len(rows), bool)
            for tier in self.tiers:
                stored |= self.slot[tier][rows] > 0
            self.tokens.forget_many(rows[~stored])
        if self.native is not None:
            self._freed_count = self.native.drop_empty(rows, self._freed_count)
            return
        for row in rows.tolist():
            if self.namespace_at[row]:
                self.drop_if_empty(row)

    def stored(self, row: int) -> bool:
        """Whether any tier has the block."""
        return any(self.slot_at[tier][row] for tier in self.tiers)

    def _remove_from_table(self, row: int) -> None:
        table, mask = self._table_at, self._position_mask
        gap = self._home_of(self.namespace_at[row], self._word_at[row])
        while table[gap] != row:
            gap = (gap + 1) & mask
        at = gap
        while True:
            at = (at + 1) & mask
            other = table[at]
            if not other:
                break
            # A row may move back into the gap if its home is not between the gap and where it is.
            home = self._home_of(self.namespace_at[other], self._word_at[other])
            if (at - home) & mask >= (at - gap) & mask:
                table[gap] = other
                gap = at
        table[gap] = 0

    def keep_tokens(self) -> None:
        """From now on blocks may have token ids."""
        self.tokens = self.tokens or TokenTable(self.capacity + 1)

    # ---- links

    def link(self, row: int, parent: int) -> None:
        """Make `row` a child of `parent`; it has none yet."""
        head = self.first_child_at[parent]
        self.parent_at[row] = parent
        self.next_at[row] = head
        self.previous_at[row] = 0
        if head:
            self.previous_at[head] = row
        self.first_child_at[parent] = row

    def unlink(self, row: int) -> None:
        parent, after, before = self.parent_at[row], self.next_at[row], self.previous_at[row]
        if before:
            self.next_at[before] = after
        else:
            self.first_child_at[parent] = after
        if after:
            self.previous_at[after] = before
        self.parent_at[row] = 0

    def link_all(self, rows: Rows, parents: Rows) -> None:
        """`link` for many fresh rows at once, of parents none of which has children yet."""
        order = np.argsort(parents, kind="stable")
        rows, parents = rows[order], parents[order]
        self.parent[rows] = parents
        same = parents[1:] == parents[:-1]
        self.next_sibling[rows] = 0
        self.previous_sibling[rows] = 0
        self.next_sibling[rows[:-1][same]] = rows[1:][same]
        self.previous_sibling[rows[1:][same]] = rows[:-1][same]
        first = np.concatenate([[True], ~same])
        self.first_child[parents[first]] = rows[first]

    def place(self, tier: Tier, row: int, slot: int) -> None:
        """The block's bytes are now in this slot of the tier."""
        self.slot_at[tier][row] = slot
        self.children_at[tier][self.parent_at[row]] += 1

    def displace(self, tier: Tier, row: int) -> None:
        """The tier no longer has the block."""
        self.slot_at[tier][row] = 0
        self.children_at[tier][self.parent_at[row]] -= 1

    def children_of(self, row: int) -> list[int]:
        found = []
        child = self.first_child_at[row]
        while child:
            found.append(child)
            child = self.next_at[child]
        return found

    def children_of_many(self, rows: Rows) -> Rows:
        """`children_of` for distinct rows, all together, in no order."""
        child = self.first_child[rows]
        found = [child := child[child > 0]]
        while child.size:
            child = self.next_sibling[child]
            found.append(child := child[child > 0])
        return np.concatenate(found)

    def hash_bytes(self, row: int) -> bytes:
        return bytes(self._bytes_at[32 * row : 32 * row + 32])

    def word(self, row: int) -> int:
        """The hash's first eight bytes, by which the story knows a block."""
        return self._word_at[row]

    def rows(self, start: int = 0, end: int | None = None) -> Rows:
        """All rows in use, ghosts included, that are numbered from `start` up to `end`."""
        last = self._fresh if end is None else min(end, self._fresh)
        return np.flatnonzero(self.namespace[start:last]).astype(np.int32) + np.int32(start)

    def next_rows(self, start: int) -> int:
        """`start`; 0 where no row from there on was ever used."""
        return start if start < self._fresh else 0


def _splitmix(word: int) -> int:
    """SplitMix64's finaliser: every bit of the answer hangs on every bit of the word."""
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & _MASK64
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & _MASK64
    return word ^ word >> 31
