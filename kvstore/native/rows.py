"""The index's inner loops in C, on the index's own arrays; see core.c."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.native.library import address, library

MAX_TIERS = 4  # as in core.c
MAX_LEADING_BLOCKS = 8192  # blocks of one `leading`: a batch's
HASH_BYTES = 32  # bytes of a key

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
        ("codes", ctypes.c_uint8 * MAX_TIERS),
    ]


class NativeRows:
    """Made by `native_rows`. Holds pointers: the arrays must stay as long as it, and be replaced never."""

    def __init__(self, found: ctypes.PyDLL, arrays: _Arrays) -> None:
        self._arrays = arrays
        self.at = ctypes.addressof(arrays)  # of the struct, for other calls of the library
        self._find, self._enter, self._drop = found.kvstore_find, found.kvstore_enter, found.kvstore_drop_empty
        pointer, many, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        self._leading = found.kvstore_leading
        self._codes = np.empty(MAX_LEADING_BLOCKS, np.uint8)
        self._codes_at = address(self._codes)
        self._leading.argtypes, self._leading.restype = (pointer, number, ctypes.c_char_p, many, pointer), many
        self._find.argtypes, self._find.restype = (pointer, number, pointer, many, pointer), None
        self._enter.argtypes, self._enter.restype = (pointer, pointer, many), None
        self._drop.argtypes, self._drop.restype = (pointer, pointer, many, number), number

    def find(self, namespace: int, hashes: NDArray[np.uint64]) -> Rows:
        """The row of each hash [n, 4], 0 where unknown. [n]"""
        keys = np.ascontiguousarray(hashes)
        found = np.empty(len(keys), np.int32)
        self._find(self.at, namespace, address(keys), len(keys), address(found))
        return found

    def leading(self, namespace: int, hashes: bytes) -> bytes:
        """The code of the fastest tier of each leading block that is in one. `hashes`: packed, of `MAX_LEADING_BLOCKS` at most."""
        count = min(len(hashes) // HASH_BYTES, MAX_LEADING_BLOCKS)
        blocks: int = self._leading(self.at, namespace, hashes, count, self._codes_at)
        return self._codes[:blocks].tobytes()

    def enter(self, rows: Rows) -> None:
        """Put rows into the table, whose hash and namespace are set."""
        self._enter(self.at, address(rows), len(rows))

    def drop_empty(self, rows: Rows, freed_count: int) -> int:
        """Forget those of the rows that hold nothing, in this order, and their parents likewise; the new length of `freed`."""
        rows = np.ascontiguousarray(rows, np.int32)
        dropped: int = self._drop(self.at, address(rows), len(rows), freed_count)
        return dropped


def native_rows(
    arrays: dict[str, NDArray[Any]], slots: Mapping[int, NDArray[np.int32]], freed: NDArray[np.int32], mix: int, shift: int, in_flight: int
) -> NativeRows | None:
    """The loops over these arrays, by the names in `NATIVE_ARRAYS`, and `slots` by tier, the fastest first; None without the library."""
    found = library()
    if found is None or len(slots) > MAX_TIERS:
        return None
    own = _Arrays(**{name: address(arrays[name]) for name in NATIVE_ARRAYS})
    own.slot = (ctypes.c_void_p * MAX_TIERS)(*(address(slot) for slot in slots.values()))
    own.codes = (ctypes.c_uint8 * MAX_TIERS)(*slots)
    own.freed, own.mix, own.shift, own.tiers, own.in_flight = address(freed), mix, shift, len(slots), in_flight
    own.mask = len(arrays["table"]) - 1
    return NativeRows(found, own)
