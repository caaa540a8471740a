"""Loops over many records of a disk in C; see records.c. Their twins in numpy are here, and in tiers/record_codec.py."""

from __future__ import annotations

import ctypes
import secrets
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.native.library import address, library

RECORD_WORDS = 16  # words of 8 bytes: as in records.c

Words = NDArray[np.uint64]


def record_checks(words: Words) -> Words | None:
    """What the last word of each record [n, 16] must be, [n]; None without the library. `words` is contiguous."""
    found = library()
    if found is None or words.shape[1] != RECORD_WORDS:
        return None
    checks = np.empty(len(words), np.uint64)
    found.kvstore_record_checks.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
    found.kvstore_record_checks.restype = None
    found.kvstore_record_checks(address(words), len(words), address(checks))
    return checks


def take_fields(records: NDArray[np.void], order: NDArray[np.int64], fields: tuple[str, ...]) -> list[NDArray[Any]]:
    """These fields of the records that `order` names, each as an array. `fields` are as in records.c: all that say what a block is."""
    found = library()
    if found is None:
        return [records[field][order] for field in fields]
    kinds = [records.dtype[field] for field in fields]
    taken = [np.empty((len(order), *kind.shape), kind.base) for kind in kinds]
    found.kvstore_take_records.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_void_p] * len(fields))
    found.kvstore_take_records.restype = None
    found.kvstore_take_records(address(records), address(order), len(order), *map(address, taken))
    return taken


class WordSet:
    """Words seen so far."""

    def __init__(self, room: int) -> None:
        """For `room` words at most."""
        self._library = library()
        self._seen = np.zeros(0 if self._library is None else 1 << max(4, (2 * room - 1).bit_length()), np.uint64)
        self._seed = secrets.randbits(64) | 1

    def note(self, words: Words) -> NDArray[np.bool_]:
        """Which words were not there before; they are now. [n]"""
        words = np.ascontiguousarray(words)
        first = np.zeros(len(words), np.bool_)
        if self._library is None:
            first[np.unique(words, return_index=True)[1]] = True
            first &= ~np.isin(words, self._seen)
            self._seen = np.concatenate([self._seen, words[first]])
            return first
        pointer, number = ctypes.c_void_p, ctypes.c_uint64
        self._library.kvstore_note_words.argtypes = (pointer, ctypes.c_int64, pointer, number, number, pointer)
        self._library.kvstore_note_words.restype = ctypes.c_int64
        self._library.kvstore_note_words(address(words), len(words), address(self._seen), len(self._seen) - 1, self._seed, address(first))
        return first
