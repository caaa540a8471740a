"""Finds the compiled library that the installation may have built beside this file."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

VERSION = 8  # of core.c and its neighbours: rises whenever something there changes
SWITCH = "KVSTORE_NATIVE"  # environment: "off" leaves it unused


@functools.cache
def library() -> ctypes.PyDLL | None:
    """The library; None where it was not built, cannot be loaded, is of another version, or is switched off.

    Its calls keep the interpreter's lock.
    """
    if os.environ.get(SWITCH, "") == "off":
        return None
    for path in sorted(Path(__file__).parent.glob("_core*.so")):
        try:
            found = ctypes.PyDLL(str(path))
            if found.kvstore_version() == VERSION:
                return found
        except (OSError, AttributeError):
            continue  # of another platform, or not ours
    return None


@functools.cache
def unlocked_library() -> ctypes.CDLL | None:
    """The same library; its calls let other threads of Python run. For what takes long and touches nothing of Python's."""
    found = library()
    return None if found is None else ctypes.CDLL(found._name)


def address(array: NDArray[Any]) -> int:
    """Where an array's memory begins."""
    where: int = array.__array_interface__["data"][0]
    return where
