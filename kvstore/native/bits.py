"""Many bits set or cleared in C; see core.c. The twin in numpy is here too."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvstore.native.library import address, library

Bits = NDArray[np.uint8]
Numbers = NDArray[np.uint32]
Mark = Callable[[Bits, Numbers, bool], None]


def marker() -> Mark:
    """What sets (or, with False, clears) the bits of some numbers: bit n is bit n % 8 of byte n // 8."""
    found = library()
    if found is None:
        return _mark
    mark = found.kvstore_mark
    mark.argtypes, mark.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32), None

    def compiled(bits: Bits, numbers: Numbers, on: bool) -> None:
        numbers = np.ascontiguousarray(numbers, np.uint32)
        if len(numbers) and int(numbers.max()) >> 3 >= len(bits):
            raise IndexError(f"bit {int(numbers.max())} of {8 * len(bits)}")
        mark(address(bits), address(numbers), len(numbers), on)

    return compiled


def _mark(bits: Bits, numbers: Numbers, on: bool) -> None:
    each = np.left_shift(np.uint8(1), (numbers & 7).astype(np.uint8))
    if on:
        np.bitwise_or.at(bits, numbers >> 3, each)
    else:
        np.bitwise_and.at(bits, numbers >> 3, ~each)
