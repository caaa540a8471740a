"""A preallocated file, read and written past the page cache where the file system allows it."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvstore.errors import InvalidArgument, KVStoreError, ResourceExhausted, Unavailable
from kvstore.geometry import UNIT_BYTES

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SharedFd:
    """A file descriptor that several threads use; it is closed when the last of them is done, so it never names another file.

    `failed_syncs` counts. What was written before one may be lost though a later sync works: the system reports it once, to one thread,
    and does not write it again. Whoever wrote before it has to write anew.
    """

    def __init__(self, fd: int, path: Path) -> None:
        self.path = path
        self.failed_syncs = 0
        self._fd = fd
        self._users = 1  # the owner counts as one
        self._closed = False
        self._lock = threading.Lock()
        self._syncing = threading.Lock()  # one at a time, so that a failed one is counted before another works

    @contextmanager
    def use(self) -> Iterator[int]:
        """The descriptor, valid inside. Raises Unavailable after `close`."""
        with self._lock:
            if self._closed:
                raise Unavailable(f"{self.path}: closed")
            self._users += 1
        try:
            yield self._fd
        finally:
            self._leave()

    def sync(self) -> None:
        """Return when everything written is on the medium. Raises Unavailable, ResourceExhausted."""
        with self.use() as fd, self._syncing:
            try:
                os.fdatasync(fd)
            except OSError as error:
                self.failed_syncs += 1
                raise os_fault(self.path, "sync", 0, error) from error

    def deleted(self) -> bool:
        """Whether the file has no name any more, so that it ends with the process. Asks no disk. Raises Unavailable after `close`."""
        with self.use() as fd:
            return os.fstat(fd).st_nlink == 0

    def close(self) -> None:
        """Refuse new users; the descriptor goes with the last one. Idempotent, does not wait."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            os.close(self._fd)


class DirectFile:
    """`direct` says whether O_DIRECT is in use; if not, `refusal` says why. Threads may read and write disjoint ranges at once."""

    def __init__(self, path: Path) -> None:
        """Opens an existing file; its size is the caller's business."""
        fd, self.refusal = _open_direct(path)
        self.direct = not self.refusal
        if fd < 0:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._fd = SharedFd(fd, path)

    def read(self, offset_bytes: int, targets: Sequence[memoryview]) -> None:
        """Fill the targets in order. Raises Unavailable on a fault or where the file ends too early."""
        with self._fd.use() as fd:
            at, rest = offset_bytes, list(targets)
            while rest:
                try:
                    got = os.preadv(fd, rest, at)
                except OSError as error:
                    raise os_fault(self._fd.path, "read", at, error) from error
                if got == 0 or got % UNIT_BYTES:
                    raise Unavailable(f"{self._fd.path}: ends before byte {at + 1}; somebody has truncated it")
                at, rest = at + got, _after(rest, got)

    def write(self, offset_bytes: int, sources: Sequence[memoryview]) -> None:
        """Write the sources in order. Raises ResourceExhausted where the disk is full, Unavailable on other faults."""
        with self._fd.use() as fd:
            at, rest = offset_bytes, list(sources)
            while rest:
                try:
                    put = os.pwritev(fd, rest, at)
                except OSError as error:
                    raise os_fault(self._fd.path, "write", at, error) from error
                if put == 0 or put % UNIT_BYTES:
                    raise ResourceExhausted(f"{self._fd.path}: a write at byte {at} was cut short; free some room on the disk")
                at, rest = at + put, _after(rest, put)

    def sync(self) -> None:
        """See `SharedFd.sync`."""
        self._fd.sync()

    @property
    def failed_syncs(self) -> int:
        """See `SharedFd`."""
        return self._fd.failed_syncs

    def deleted(self) -> bool:
        """See `SharedFd.deleted`."""
        return self._fd.deleted()

    def close(self) -> None:
        """Refuse further calls; those in progress end by themselves."""
        self._fd.close()


def write_and_read_back(path: Path) -> None:
    """Write one page to a file, made where it is missing, and read it back from the medium. Raises OSError and what DirectFile raises."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, UNIT_BYTES)
    finally:
        os.close(fd)
    written, found = mmap.mmap(-1, UNIT_BYTES), mmap.mmap(-1, UNIT_BYTES)
    written[:] = os.urandom(UNIT_BYTES)
    file = DirectFile(path)
    try:
        file.write(0, [memoryview(written)])
        file.sync()
        file.read(0, [memoryview(found)])
    finally:
        file.close()
    if found[:] != written[:]:
        raise Unavailable(f"{path}: reads back other bytes than were written; replace the disk")


def os_fault(path: Path, verb: str, at: int, error: OSError) -> KVStoreError:
    """The store's own error for what the system answered."""
    text = f"{path}: {verb} at byte {at}: {error.strerror}"
    if error.errno in _FULL:
        return ResourceExhausted(f"{text}; free some room on the disk")
    if error.errno in (errno.EINVAL, errno.EFAULT):
        return InvalidArgument(f"{text}; offset, length and memory must be multiples of {UNIT_BYTES} bytes")
    return Unavailable(f"{text}; check the disk and the system's log")


def _open_direct(path: Path) -> tuple[int, str]:
    """A descriptor that passes the page cache by, or -1 and why there is none: some file systems refuse at open, some at the first read."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return -1, _refusal(path, error)
    page = mmap.mmap(-1, UNIT_BYTES)
    try:
        os.preadv(fd, [page], 0)
    except OSError as error:
        os.close(fd)
        if error.errno != errno.EINVAL:
            raise
        return -1, _refusal(path, error)
    return fd, ""


def _refusal(path: Path, error: OSError) -> str:
    return f"{path.parent}: O_DIRECT is refused ({error.strerror}), so reads and writes go through the page cache; use ext4 or xfs"


def check_range(name: str, capacity_bytes: int, offset_bytes: int, buffers: Sequence[memoryview]) -> None:
    """Raises InvalidArgument unless the buffers fit into the tier from this offset, all in multiples of 4 KiB."""
    total_bytes = sum(buffer.nbytes for buffer in buffers)
    if offset_bytes % UNIT_BYTES or any(buffer.nbytes % UNIT_BYTES for buffer in buffers):
        raise InvalidArgument(f"{name}: {total_bytes} bytes at byte {offset_bytes}: offset and lengths must be multiples of {UNIT_BYTES}")
    if offset_bytes < 0 or offset_bytes + total_bytes > capacity_bytes:
        raise InvalidArgument(f"{name}: {total_bytes} bytes at byte {offset_bytes}: outside the {capacity_bytes} bytes of the tier")


def _after(buffers: list[memoryview], done_bytes: int) -> list[memoryview]:
    """What is left of the buffers after their first `done_bytes`."""
    for index, buffer in enumerate(buffers):
        if done_bytes < buffer.nbytes:
            return [buffer.cast("B")[done_bytes:], *buffers[index + 1 :]]
        done_bytes -= buffer.nbytes
    return []
