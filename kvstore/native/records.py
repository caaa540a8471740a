"""The checks of many records in C; see core.c. Their twin in numpy is in tiers/record_codec.py."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from kvstore.native.library import address, library

RECORD_WORDS = 16  # words of 8 bytes: as in core.c


def record_checks(words: NDArray[np.uint64]) -> NDArray[np.uint64] | None:
    """What the last word of each record [n, 16] must be, [n]; None without the library. `words` is contiguous."""
    found = library()
    if found is None or words.shape[1] != RECORD_WORDS:
        return None
    checks = np.empty(len(words), np.uint64)
    found.kvstore_record_checks.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
    found.kvstore_record_checks.restype = None
    found.kvstore_record_checks(address(words), len(words), address(checks))
    return checks
