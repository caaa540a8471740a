"""The client's maps of the DRAM arena, and the lock that says its process still has them.

The arena is mapped twice: read-only for everything that reads, writable for the slots of reservations. Neither map, nor the lock's
descriptor, passes to a forked child. Any thread may call; nothing here waits for more than milliseconds.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import time
import warnings
import weakref
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import FormatError, GeometryError, Unavailable

if TYPE_CHECKING:
    import torch

    from kvstore.geometry import Geometry

UNIT_BYTES = 4096  # slots start and end on 4 KiB
STRETCH_BYTES = 2 << 20  # bytes whose pages are entered together: what one page of the kernel's tables covers
LOCK_PAUSES_S = (0.0005, 0.001, 0.002, 0.004, 0.008)  # seconds between tries: the daemon's probe holds the lock for microseconds
_MADV_POPULATE_READ = 22  # advice number, from Linux's uapi/asm-generic/mman-common.h
Bytes = NDArray[np.uint8]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Arena:
    """The file mapped. Views keep the memory mapped for as long as they live, also past the daemon's end."""

    def __init__(self, path: str, header_bytes: int, arena_bytes: int) -> None:
        """Raises Unavailable where the file cannot be opened or mapped here, FormatError where it is shorter than the daemon says."""
        self.path = path
        total_bytes = header_bytes + arena_bytes
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise Unavailable(f"arena {path}: {error.strerror}; run on the daemon's machine, with its shared memory mounted") from error
        try:
            status = os.fstat(descriptor)
            if status.st_size < total_bytes:
                raise FormatError(f"arena {path}: {status.st_size} bytes, the daemon says {total_bytes}; it is another daemon's file")
            self.inode = (status.st_dev, status.st_ino, total_bytes)
            self._readable = _mapped(descriptor, total_bytes, mmap.PROT_READ, path)[header_bytes:]
            self._writable = _mapped(descriptor, total_bytes, mmap.PROT_READ | mmap.PROT_WRITE, path)[header_bytes:]
            self._warmed = [bytearray(arena_bytes // STRETCH_BYTES + 1) for _ in range(2)]  # read-only, writable; by stretch; 1: entered
        finally:
            os.close(descriptor)

    @property
    def writable(self) -> Bytes:
        """The whole arena, writable. Write only into slots of your own reservations."""
        return self._writable

    @property
    def readable(self) -> Bytes:
        """The whole arena, read-only."""
        return self._readable

    def view(self, units: int, size_bytes: int) -> Bytes:
        """The first bytes of the slot at `units`, read-only."""
        return _part(self._readable, units, size_bytes)

    def writable_view(self, units: int, size_bytes: int) -> Bytes:
        """The first bytes of a reserved slot, to be filled."""
        return _part(self._writable, units, size_bytes)

    def addresses(self, units: NDArray[np.uint32], size_bytes: int, *, write: bool) -> list[int]:
        """Where the slots begin in this process's memory. Raises FormatError where one is past the arena."""
        memory = self._writable if write else self._readable
        starts = units.astype(np.int64) * UNIT_BYTES
        if len(starts) and int(starts.max()) + size_bytes > len(memory):
            raise FormatError(f"a slot at {int(starts.max())} with {size_bytes} bytes is past the arena's {len(memory)}; attach again")
        found: list[int] = (starts + memory.ctypes.data).tolist()
        return found

    def warm(self, units: int, start: int, stop: int, *, write: bool) -> None:
        """Have the kernel enter these bytes of a slot into this process's tables at once: a fault a page costs several times as much.

        Only for slots that were granted, whose memory the daemon has taken already. Does a stretch once. Where the kernel cannot
        (before 5.14), the faults come. Any thread may call.
        """
        known = self._warmed[write]
        first, last = ((units * UNIT_BYTES + start) // STRETCH_BYTES, (units * UNIT_BYTES + stop - 1) // STRETCH_BYTES)
        if 0 not in known[first : last + 1]:
            return
        memory = (self._writable if write else self._readable)[first * STRETCH_BYTES : (last + 1) * STRETCH_BYTES]
        # Reading enters several pages a fault, and of shared memory they are writable then too.
        _libc.madvise(memory.ctypes.data, len(memory), _MADV_POPULATE_READ)
        known[first : last + 1] = bytes([1]) * (last + 1 - first)


class SessionLock:
    """The exclusive lock on a session's file: while it is held, the daemon keeps the session's slots."""

    def __init__(self, path: str) -> None:
        """Take it. Raises Unavailable where the file is not here or somebody else holds it."""
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise Unavailable(f"session file {path}: {error.strerror}; run on the daemon's machine, its shared memory mounted") from error
        for pause_s in LOCK_PAUSES_S:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(pause_s)
        else:
            self.release()
            raise Unavailable(f"session file {path} is locked by another process; attach again")
        _held.add(self)

    def release(self) -> None:
        """Let it go: the process has no use for the session's slots any more. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


_held: weakref.WeakSet[SessionLock] = weakref.WeakSet()


def _release_in_child() -> None:
    for lock in list(_held):
        lock.release()  # closes the child's copy of the descriptor; the parent's keeps the lock


os.register_at_fork(after_in_child=_release_in_child)


def block_tensors(block: Bytes, geometry: Geometry) -> tuple[dict[str, torch.Tensor], ...]:
    """The tensors of each layer of one block, by name (see Geometry.tensor_views), without a copy.

    block   [geometry.block_bytes] or longer, as a lease or a reservation gives it
    Tensors of a read-only block must not be written: the memory is protected, and a write ends the process.
    Raises GeometryError for an opaque format, and for a block that is too short. Needs torch.
    """
    import torch

    if len(block) < geometry.block_bytes:
        raise GeometryError(f"the block has {len(block)} bytes, its geometry {geometry.block_bytes}; give the geometry it was stored with")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)
        whole = torch.from_numpy(block[: geometry.block_bytes])
    layers = []
    for views in geometry.tensor_views():
        tensors = {}
        for name, view in views.items():
            dtype = getattr(torch, view.dtype)
            item_bytes = dtype.itemsize
            typed = whole[: len(whole) // item_bytes * item_bytes].view(dtype)
            strides = [stride // item_bytes for stride in view.strides_bytes]
            tensors[name] = typed.as_strided(view.shape, strides, view.offset_bytes // item_bytes)
        layers.append(tensors)
    return tuple(layers)


def _mapped(descriptor: int, size_bytes: int, protection: int, path: str) -> Bytes:
    try:
        memory = mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED, protection)
    except (OSError, ValueError) as error:
        raise Unavailable(f"arena {path}: cannot map {size_bytes} bytes ({error}); raise the limit on address space (ulimit -v)") from error
    memory.madvise(mmap.MADV_DONTFORK)
    return np.frombuffer(memory, np.uint8)


def _part(memory: Bytes, units: int, size_bytes: int) -> Bytes:
    start = int(units) * UNIT_BYTES
    if start + size_bytes > len(memory):
        raise FormatError(f"slot at {start} with {size_bytes} bytes is past the arena's {len(memory)}; attach again")
    return memory[start : start + size_bytes]
