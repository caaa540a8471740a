"""One small file per session beside the arena: the session's process holds a lock on it, and the daemon notes in it which slots
the process may touch. Kernel locks end with the process, whatever ended it, and the notes outlive the daemon.

    byte 0       Header: magic, session, the arena's identity, its units
    byte 4096    one bit per 4 KiB unit of the arena, set for the first unit of a slot that the process may touch
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import ResourceExhausted
from kvstore.native.bits import marker

Units = NDArray[np.uint32]

MAGIC = b"kvstore session1"  # the number rises when the layout changes
BITS_OFFSET_BYTES = 4096  # one page for the header, so that the bits begin one
FEW_SLOTS = 64  # slots: up to so many a loop is faster than a few array operations
PAGE_BYTES = 4096  # bytes: what a tmpfs takes memory by
FILE_MODE = 0o660  # the client locks it
DIRECTORY_MODE = 0o750  # the trust domain's group looks things up; only the daemon makes them
HEADER = np.dtype([("magic", "S16"), ("session", "<u8"), ("units", "<u8"), ("arena", "S32")])


class SessionFile:
    """The daemon's side. The client opens `path`, takes an exclusive flock with retries (a probe here may hold it for a moment),
    and keeps it for as long as it has the arena mapped."""

    def __init__(self, path: Path, fd: int) -> None:
        """Use `create` or `surviving`. `fd` becomes the file's."""
        header = np.frombuffer(os.pread(fd, HEADER.itemsize, 0), HEADER)[0]
        self.path = path
        self.session = int(header["session"])
        self.arena = bytes(header["arena"]).decode()
        self._fd = fd
        self._map = mmap.mmap(fd, _file_bytes(int(header["units"])))
        self._bits = np.frombuffer(self._map, dtype=np.uint8, offset=BITS_OFFSET_BYTES)
        self._mark = marker()
        self._taken = np.zeros(len(self._bits) // PAGE_BYTES, dtype=np.bool_)  # pages of bits that have memory

    @classmethod
    def create(cls, directory: Path, session: int, arena_identity: str, arena_units: int) -> SessionFile:
        """A new file; nothing is marked, nobody has locked it. Its name is unique among all runs of the daemon.

        Raises ResourceExhausted where there is no room for it, or no descriptor.
        """
        path = directory / f"{session}-{os.urandom(6).hex()}"
        header = np.zeros(1, HEADER)
        header[0] = (MAGIC, session, arena_units, arena_identity.encode())
        fd = -1
        try:
            fd = _made(path)
            os.posix_fallocate(fd, 0, BITS_OFFSET_BYTES)
            os.ftruncate(fd, _file_bytes(arena_units))
            os.pwrite(fd, header.tobytes(), 0)
            return cls(path, fd)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
                path.unlink(missing_ok=True)
            raise ResourceExhausted(f"session file {path}: {error.strerror}; free some room, or raise the limit on open files") from error

    def mark(self, granted: Units, withdrawn: Units) -> None:
        """Slots, by their first unit, that the process may touch from now on, or no more. Raises ResourceExhausted, with nothing marked."""
        self._take_pages(granted)
        if len(granted) + len(withdrawn) <= FEW_SLOTS:
            bits = self._bits.data
            for unit in granted.tolist():
                bits[unit >> 3] |= 1 << (unit & 7)
            for unit in withdrawn.tolist():
                bits[unit >> 3] &= ~(1 << (unit & 7))
            return
        self._mark(self._bits, granted, True)
        self._mark(self._bits, withdrawn, False)

    def marked_units(self) -> Units:
        """First units of all slots marked, rising."""
        groups = np.flatnonzero(self._bits)
        bits = np.unpackbits(self._bits[groups], bitorder="little").reshape(-1, 8)
        rows, columns = np.nonzero(bits)
        return (groups[rows] * 8 + columns).astype(np.uint32)

    def process_gone(self) -> bool:
        """Whether nobody holds the lock: the process ended, or it never took it."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return True

    def remove(self) -> None:
        """Delete the file and close it; for when the process is gone or has unmapped the arena."""
        self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Close the file and leave it for the next daemon. Idempotent."""
        if self._fd >= 0:
            self._bits = np.zeros(0, np.uint8)
            self._map.close()
            os.close(self._fd)
            self._fd = -1

    def _take_pages(self, units: Units) -> None:
        """Give memory to the bits of these units now: where the file system is full, a store to them would kill the daemon."""
        pages = units // (8 * PAGE_BYTES)
        missing = pages[~self._taken[pages]]
        for page in np.unique(missing).tolist() if missing.size else ():
            try:
                os.posix_fallocate(self._fd, BITS_OFFSET_BYTES + page * PAGE_BYTES, PAGE_BYTES)
            except OSError as error:
                raise ResourceExhausted(f"{self.path}: {error.strerror}; make the arena smaller than its file system") from error
            self._taken[page] = True


def _made(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, FILE_MODE)
    except FileNotFoundError:  # somebody has deleted the directory: what is mapped works on, and sessions can still begin
        for folder in (path.parent.parent, path.parent):
            folder.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        fd = os.open(path, flags, FILE_MODE)
    os.fchmod(fd, FILE_MODE)
    return fd


def surviving(directory: Path, arena_identity: str) -> list[SessionFile]:
    """The files of an earlier daemon's sessions whose processes still live and have this arena mapped; all others are removed."""
    found: list[SessionFile] = []
    for path in sorted(directory.iterdir()):
        file = _opened(path)
        if file is None:
            path.unlink(missing_ok=True)
        elif file.arena != arena_identity or file.process_gone():
            file.remove()
        else:
            found.append(file)
    return found


def _opened(path: Path) -> SessionFile | None:
    """None where it is no session's file, or not a whole one."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    head = os.pread(fd, HEADER.itemsize, 0)
    header = np.frombuffer(head.ljust(HEADER.itemsize, b"\0"), HEADER)[0]
    if header["magic"] != MAGIC or os.fstat(fd).st_size != _file_bytes(int(header["units"])):
        os.close(fd)
        return None
    return SessionFile(path, fd)


def _file_bytes(units: int) -> int:
    """Whole pages: memory for the bits is taken by the page."""
    return BITS_OFFSET_BYTES + -(-units // (8 * PAGE_BYTES)) * PAGE_BYTES
