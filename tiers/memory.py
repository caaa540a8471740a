"""What the system is told about the arena's memory: huge pages, spreading over NUMA nodes, taking pages ahead of use.

Through libc, since Python's mmap knows neither mbind nor the newer advice, and holds the interpreter's lock while it waits.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_MADV_HUGEPAGE = 14  # from Linux's uapi/asm-generic/mman-common.h
_MADV_POPULATE_WRITE = 23  # Linux 5.14 and newer
_MPOL_INTERLEAVE = 3  # uapi/linux/mempolicy.h
_MBIND_CALL = {"x86_64": 237, "aarch64": 235}  # system call numbers

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def ask_huge_pages(memory: NDArray[np.uint8]) -> str:
    """Ask for huge pages; "" or why there are none."""
    failed = _madvise(memory, _MADV_HUGEPAGE)
    return f"no huge pages: {os.strerror(failed)}" if failed else ""


def interleave(memory: NDArray[np.uint8], root: Path = Path("/")) -> str:
    """Spread pages that are not yet taken over all NUMA nodes; "" or what kept it from being done. One node: nothing to do."""
    nodes = online_nodes(root)
    if len(nodes) < 2:
        return ""
    call = _MBIND_CALL.get(platform.machine())
    if call is None:
        return f"memory is not spread over {len(nodes)} NUMA nodes: not known how on {platform.machine()}"
    mask = (ctypes.c_ulong * (max(nodes) // 64 + 1))()
    for node in nodes:
        mask[node // 64] |= 1 << (node % 64)
    bits = ctypes.c_ulong(len(mask) * 64 + 1)  # the kernel counts one less than it is told
    where = (ctypes.c_void_p(memory.ctypes.data), ctypes.c_ulong(memory.nbytes))
    if _libc.syscall(ctypes.c_long(call), *where, ctypes.c_int(_MPOL_INTERLEAVE), mask, bits, ctypes.c_uint(0)):
        return f"memory is not spread over {len(nodes)} NUMA nodes: {os.strerror(ctypes.get_errno())}"
    return ""


def online_nodes(root: Path = Path("/")) -> list[int]:
    """The NUMA nodes of this machine; empty where the system does not say."""
    try:
        text = (root / "sys/devices/system/node/online").read_text().strip()
    except OSError:
        return []
    nodes: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        nodes += range(int(first), int(last or first) + 1)
    return nodes


def touch(memory: NDArray[np.uint8]) -> str:
    """Take and map every page without changing a byte; "" or why it failed. Other threads run meanwhile."""
    failed = _madvise(memory, _MADV_POPULATE_WRITE)
    if failed == errno.EINVAL:  # an older kernel
        np.add.reduce(memory[:: os.sysconf("SC_PAGESIZE")], dtype=np.uint64)
        return ""
    return os.strerror(failed) if failed else ""


def _madvise(memory: NDArray[np.uint8], advice: int) -> int:
    """0, or the error's number."""
    return ctypes.get_errno() if _libc.madvise(memory.ctypes.data, memory.nbytes, advice) else 0
