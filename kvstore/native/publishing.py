"""Publishing and leasing many blocks at once in C, on the arrays of the index and of one tier's slots; see core.c. The twins in numpy and
Python are in kvstore/cache/singles.py, kvstore/cache/fresh.py and kvstore/cache/reading.py.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.native.library import address, library
from kvstore.native.rows import NativeRows

Ids = NDArray[np.int32]
Words = NDArray[np.uint32]
Keys = NDArray[np.uint64]
Counts = NDArray[np.uint16]  # holds of one session on each slot
Counted = tuple[int, ...]  # where they are, in a call that takes them
TIER_ARRAYS = ("slot_of", "children", "row", "holds", "generation", "state", "transfers", "extent_slot_units", "extent_first")


class _Tier(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in TIER_ARRAYS),
        ("extent_units", ctypes.c_uint32),
        ("extent_count", ctypes.c_uint32),
        ("reserved", ctypes.c_uint8),
        ("live", ctypes.c_uint8),
    ]


class NativePublishing:
    """Holds pointers: the arrays must stay as long as it, and be replaced never. `NativeRows` has those of the index."""

    def __init__(self, arrays: dict[str, NDArray[Any]], extent_units: int, reserved: int, live: int) -> None:
        """`arrays`: by the names in `TIER_ARRAYS`. Needs the library."""
        found = library()
        if found is None:
            raise RuntimeError("the compiled library is not there")
        self._arrays = arrays
        self._tier = _Tier(**{name: address(arrays[name]) for name in TIER_ARRAYS})
        self._tier.extent_units, self._tier.extent_count = extent_units, len(arrays["extent_first"])
        self._tier.reserved, self._tier.live = reserved, live
        self._at = ctypes.addressof(self._tier)
        pointer, many, number, size = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_uint32
        look = (pointer, pointer, number, size, pointer, pointer, pointer, pointer)
        self._look_each, self._look_chain, self._look_ready = found.kvstore_look_each, found.kvstore_look_chain, found.kvstore_look_ready
        self._look_each.argtypes, self._look_chain.argtypes = (*look, many, pointer, pointer), (*look, pointer, many, pointer, pointer)
        self._look_ready.argtypes = (pointer, pointer, number, pointer, pointer, number, many, pointer, pointer, pointer)
        self._look_each.restype = self._look_chain.restype = self._look_ready.restype = number
        self._hold = found.kvstore_hold
        self._hold.argtypes, self._hold.restype = (pointer, pointer, pointer, many, pointer, pointer), many
        self._publish_each, self._publish_chain = found.kvstore_publish_each, found.kvstore_publish_chain
        self._publish_each.argtypes = (pointer, pointer, number, pointer, many, pointer, pointer, pointer)
        self._publish_chain.argtypes = (pointer, pointer, ctypes.c_uint8, many, pointer, pointer, number)
        self._publish_each.restype = self._publish_chain.restype = None

    def look_each(
        self, rows: NativeRows, namespace: int, slot_units: int, keys: Keys, parents: Keys, where: tuple[Words, Words]
    ) -> tuple[Ids, Ids] | None:
        """The slots at `where` (units, generations) and the rows of the parents; None unless all blocks are new, and all of it is right."""
        return self._look(self._look_each, rows, (namespace, slot_units), keys, parents, where, ())

    def look_chain(
        self, rows: NativeRows, facts: tuple[int, int], keys: Keys, before: Keys, where: tuple[Words, Words], counts: Counts
    ) -> tuple[Ids, Ids] | None:
        """The slots at `where` and the rows of a chain's blocks; None unless they were reserved for just these, by one session.

        facts   the namespace, and its slots' units;  before  [1, 4];  counts  how often the session holds each slot
        """
        return self._look(self._look_chain, rows, facts, keys, before, where, (address(counts),))

    def _look(
        self, look: Any, rows: NativeRows, facts: tuple[int, int], keys: Keys, others: Keys, where: tuple[Words, Words], more: Counted
    ) -> tuple[Ids, Ids] | None:
        keys, others = np.ascontiguousarray(keys), np.ascontiguousarray(others)
        units, generations = (np.ascontiguousarray(words, np.uint32) for words in where)
        count = len(keys)
        found = np.empty((2, count), np.int32)
        first = address(found)
        arguments = address(keys), address(others), address(units), address(generations), *more, count, first, first + 4 * count
        return (found[0], found[1]) if look(rows.at, self._at, *facts, *arguments) else None

    def look_ready(self, rows: NativeRows, namespace: int, keys: Keys, counts: Counts, most: int) -> tuple[Ids, Ids, int, int] | None:
        """The slots and rows of a chain's blocks, how many of them the session (`counts`) does not hold yet, and how many nobody does.

        None unless all of them are in the tier, each is named once, and the session holds none `most` times.
        """
        keys, count = np.ascontiguousarray(keys), len(keys)
        found, sums = np.empty((2, count), np.int32), np.empty(2, np.int64)
        first = address(found)
        arguments = address(keys), address(counts), most, count, first, first + 4 * count, address(sums)
        if not self._look_ready(rows.at, self._at, namespace, *arguments):
            return None
        return found[0], found[1], int(sums[0]), int(sums[1])

    def hold(self, slots: Ids, counts: Counts) -> tuple[Words, Ids]:
        """The session holds these slots once more: their generations, and those that it did not hold before."""
        count = len(slots)
        found = np.empty((2, count), np.int32)
        first = address(found)
        turned: int = self._hold(self._at, address(counts), address(slots), count, first, first + 4 * count)
        return found[0].view(np.uint32), found[1, :turned]

    def publish_each(self, index: NativeRows, namespace: int, keys: Keys, rows: Ids, slots: Ids, above: Ids) -> None:
        """Blocks are there from now on, in rows that nothing uses: all arrays are parallel, and contiguous."""
        keys = np.ascontiguousarray(keys)
        self._publish_each(index.at, self._at, namespace, address(keys), len(rows), address(rows), address(slots), address(above))

    def publish_chain(self, index: NativeRows, rows: Ids, slots: Ids, above: int, clears: int) -> None:
        """The blocks of a chain are there from now on. `clears`: flags that their rows lose."""
        self._publish_chain(index.at, self._at, clears, len(rows), address(rows), address(slots), above)
