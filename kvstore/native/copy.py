"""Copies past the processor's caches in C; see copy.c. Their twin is the C library's memmove."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from kvstore.native.library import unlocked_library

Copy = Callable[[int, int, int], object]  # (target, source, bytes): addresses of memory that does not overlap


@functools.cache
def copier() -> Copy:
    """What copies much memory fastest, and lets other threads run meanwhile."""
    found = unlocked_library()
    if found is None:
        return ctypes.memmove
    copy: Copy = found.kvstore_copy
    found.kvstore_copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)
    found.kvstore_copy.restype = None
    return copy
