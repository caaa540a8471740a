"""Finds the compiled library that the installation may have built beside this file."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.kernels.cpu.structs import Decode, Layout, Prefill, Rows, Write
from kvstore.native.library import SWITCH

VERSION = 3  # of attention.h: rises whenever something there changes
ISAS = {"": 0, "plain": 1, "avx2": 2, "avx512": 3, "avx512_bf16": 4}  # instruction sets as attention.h numbers them; "" is the best
NAME = "_native*.so"


def load(path: Path) -> ctypes.CDLL:
    """A library by its path. Raises ConfigError where it is of another platform or version."""
    try:
        found = ctypes.CDLL(str(path))
        version = found.kv_cpu_version()
    except (OSError, AttributeError) as error:
        raise ConfigError(f"{path.name} cannot be loaded: {error}; install kvstore anew on this machine") from error
    if version != VERSION:
        raise ConfigError(f"{path.name} is of version {version}, needed is {VERSION}; install kvstore anew")
    sizes = (ctypes.c_int32 * 5)()
    found.kv_cpu_sizes(sizes)
    if list(sizes) != [ctypes.sizeof(each) for each in (Layout, Rows, Decode, Write, Prefill)]:
        raise ConfigError(f"{path.name} lays out its arguments otherwise; install kvstore anew on this machine")
    found.kv_cpu_scratch.restype = ctypes.c_int64
    for function in (found.kv_cpu_decode, found.kv_cpu_write, found.kv_cpu_scratch):
        function.argtypes = [ctypes.c_void_p] * (2 if function is not found.kv_cpu_decode else 3)
    found.kv_cpu_prefill.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32]
    return found


@functools.cache
def find() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None and why there is none."""
    if os.environ.get(SWITCH, "") == "off":
        return None, f"{SWITCH}=off leaves it unused"
    reason = "it was not built: install kvstore where a C compiler is at hand"
    for path in sorted(Path(__file__).parent.glob(NAME)):
        try:
            return load(path), ""
        except ConfigError as error:
            reason = str(error)
    return None, reason


def available() -> str:
    """Why the CPU kernels cannot be used; empty where they can."""
    return find()[1]


def instruction_sets(library: ctypes.CDLL) -> list[str]:
    """Those that this processor has, the best last."""
    return [name for name, number in ISAS.items() if name and library.kv_cpu_has(number)]
