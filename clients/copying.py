"""Copies of many blocks at once, by a few threads: one core alone does not fill the memory bus. No Python object is made a block."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, cast

import numpy as np

from kvstore import errors
from kvstore.clients.arena import Bytes
from kvstore.native.copy import copier

PIECE_BYTES = 4 << 20  # bytes that a thread takes at a time
ALONE_BYTES = 2 << 20  # bytes: less is copied before another thread has woken up
CACHED_BYTES = 4 << 20  # bytes: more would not be found in the caches anyway, so it is copied past them
MOST_THREADS = 4  # copying at once, the caller among them: more do not go faster on the machines that were measured


class DeviceArray(Protocol):
    """An array in a GPU's memory, of CuPy or torch: only where a call names a pool."""

    @property
    def __cuda_array_interface__(self) -> Any: ...


Buffer = bytes | bytearray | memoryview | Bytes | DeviceArray
Warm = Callable[[int, int, int], None]  # (which block, from byte, to byte): have this memory mapped

_guard = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def address(memory: Bytes) -> int:
    """Where an array's memory begins."""
    where: int = memory.__array_interface__["data"][0]
    return where


def checked(buffer: Buffer, size_bytes: int, what: str, *, writable: bool) -> Bytes:
    """A caller's buffer as an array. Raises InvalidArgument where it is none, of another size, or may not be written."""
    try:
        data = np.frombuffer(cast(Any, buffer), np.uint8)
    except (TypeError, ValueError) as error:
        raise errors.InvalidArgument(f"{what} is no buffer in one piece ({error}); give bytes, or a contiguous array of them") from None
    if len(data) != size_bytes:
        raise errors.InvalidArgument(f"{what} has {len(data)} bytes, a block {size_bytes}; give one of the same size")
    if writable and not data.flags.writeable:
        raise errors.InvalidArgument(f"{what} is read-only; give a bytearray, a writable memoryview or array")
    return data


def copy_blocks(targets: Sequence[int], sources: Sequence[int], size_bytes: int, warm: Warm) -> None:
    """Copy `size_bytes` from each source to its target, all by their addresses, and wait. The caller keeps the memory alive.

    `warm` is called for each part just before it is copied, in the thread that copies.
    """
    pieces = list(_pieces(len(targets), size_bytes))
    turn = itertools.count()

    def work() -> None:
        while (mine := next(turn)) < len(pieces):
            for which, start, stop in pieces[mine]:
                warm(which, start, stop)
                copy(targets[which] + start, sources[which] + start, stop - start)  # lets other threads run

    total_bytes = size_bytes * len(targets)
    copy = copier() if total_bytes > CACHED_BYTES else ctypes.memmove
    helpers = min(len(pieces), MOST_THREADS, len(os.sched_getaffinity(0))) - 1 if total_bytes > ALONE_BYTES else 0
    waiting = _also(work, helpers)
    try:
        work()
    finally:
        _end(waiting)


def _also(work: Callable[[], None], helpers: int) -> list[Future[None]]:
    """So many threads at the same work; none once the interpreter has begun to end, when threads of the program may still copy."""
    begun: list[Future[None]] = []
    with contextlib.suppress(RuntimeError):
        begun.extend(_threads().submit(work) for _ in range(helpers))
    return begun


def _end(helpers: list[Future[None]]) -> None:
    """Wait until none of them writes any more, also when interrupted: the caller gives the memory back afterwards."""
    interrupt: BaseException | None = None
    for each in helpers:
        while not (each.cancel() or each.done()):
            try:
                each.exception()
            except BaseException as error:  # noqa: BLE001 — raised below, when it is safe
                interrupt = error
    if interrupt is not None:
        raise interrupt
    for each in helpers:
        if not each.cancelled():
            each.result()


def _pieces(count: int, size_bytes: int) -> Iterator[list[tuple[int, int, int]]]:
    """Shares of about PIECE_BYTES: several small blocks, or a part of a large one. Each is a list of (which, start, stop)."""
    if size_bytes >= PIECE_BYTES:
        for which in range(count):
            for start in range(0, size_bytes, PIECE_BYTES):
                yield [(which, start, min(start + PIECE_BYTES, size_bytes))]
        return
    step = PIECE_BYTES // max(size_bytes, 1)
    for first in range(0, count, step):
        yield [(which, 0, size_bytes) for which in range(first, min(first + step, count))]


def _threads() -> ThreadPoolExecutor:
    global _pool
    with _guard:
        if _pool is None:
            _pool = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="kvstore-copy")
        return _pool


def _forget_in_child() -> None:
    """A forked child has none of the threads."""
    global _pool, _guard
    _pool, _guard = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)
