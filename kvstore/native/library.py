"""Finds the compiled library that the installation may have built beside this file."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

SWITCH = "KVSTORE_NATIVE"  # environment: "off" leaves it unused


@functools.cache
def library() -> ctypes.PyDLL | None:
    """The library; None where it was not built, cannot be loaded, or is switched off. Its calls keep the interpreter's lock."""
    if os.environ.get(SWITCH, "") == "off":
        return None
    for path in sorted(Path(__file__).parent.glob("_core*.so")):
        try:
            return ctypes.PyDLL(str(path))
        except OSError:
            continue  # of another platform
    return None
