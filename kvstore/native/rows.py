"""The index's inner loops in C, on the index's own arrays; see core.c."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.native.library import address, library

MAX_TIERS = 4  # as in core.c

Rows = NDArray[np.int32]
NATIVE_ARRAYS = ("table", "hash", "namespace", "parent", "first_child", "next_sibling", "previous_sibling", "flags")


class _Arrays(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in NATIVE_ARRAYS),
        ("slot", ctypes.c_void_p * MAX_TIERS),
        ("freed", ctypes.c_void_p),
        ("mix", ctypes.c_uint64),
        ("mask", ctypes.c_uint64),
        ("shift", ctypes.c_int32),
        ("tiers", ctypes.c_int32),
        ("in_flight", ctypes.c_uint8),
    ]


class NativeRows:
    """Made by `native_rows`. Holds pointers: the arrays must stay as long as it, and be replaced never."""

    def __init__(self, found: ctypes.PyDLL, arrays: _Arrays) -> None:
        self._arrays = arrays
        self._at = ctypes.addressof(arrays)
        self._find, self._enter, self._drop = found.kvstore_find, found.kvstore_enter, found.kvstore_drop_empty
        pointer, many, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        self._find.argtypes, self._find.restype = (pointer, number, pointer, many, pointer), None
        self._enter.argtypes, self._enter.restype = (pointer, pointer, many), None
        self._drop.argtypes, self._drop.restype = (pointer, pointer, many, number), number

    def find(self, namespace: int, hashes: NDArray[np.uint64]) -> Rows:
        """The row of each hash [n, 4], 0 where unknown. [n]"""
        keys = np.ascontiguousarray(hashes)
        found = np.empty(len(keys), np.int32)
        self._find(self._at, namespace, address(keys), len(keys), address(found))
        return found

    def enter(self, rows: Rows) -> None:
        """Put rows into the table, whose hash and namespace are set."""
        self._enter(self._at, address(rows), len(rows))

    def drop_empty(self, rows: Rows, freed_count: int) -> int:
        """Forget those of the rows that hold nothing, in this order, and their parents likewise; the new length of `freed`."""
        rows = np.ascontiguousarray(rows, np.int32)
        dropped: int = self._drop(self._at, address(rows), len(rows), freed_count)
        return dropped


def native_rows(
    arrays: dict[str, NDArray[Any]], slots: Sequence[NDArray[np.int32]], freed: NDArray[np.int32], mix: int, shift: int, in_flight: int
) -> NativeRows | None:
    """The loops over these arrays, by the names in `NATIVE_ARRAYS`; None without the library."""
    found = library()
    if found is None or len(slots) > MAX_TIERS:
        return None
    own = _Arrays(**{name: address(arrays[name]) for name in NATIVE_ARRAYS})
    own.slot = (ctypes.c_void_p * MAX_TIERS)(*(address(slot) for slot in slots))
    own.freed, own.mix, own.shift, own.tiers, own.in_flight = address(freed), mix, shift, len(slots), in_flight
    own.mask = len(arrays["table"]) - 1
    return NativeRows(found, own)
