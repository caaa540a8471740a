"""The arena's file: a header that outlives the daemon, then the units. An old file of the same shape is used again.

    byte 0                 Header (below): magic, sizes, identity of the file, epoch of the daemon that has it
    byte 4096              int32 per extent: how many units its slots have, 0 where it is not assigned
    byte `header_bytes`    unit 0

A daemon that starts again and finds the file of the last one goes on with it, so that what processes of that time still
have mapped stays theirs. A file of another shape is unlinked (who has it mapped keeps it) and a new one made.
"""

from __future__ import annotations

import mmap
import os
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.geometry import UNIT_BYTES
from kvstore.tiers import memory as system
from kvstore.tiers.room import Request, allocate, memory_free, missing, require, require_disk

MAGIC = b"kvstore arena 1\n"  # the number rises when the layout changes
TABLE_OFFSET_BYTES = 4096  # one page for the header proper
HEADER_ALIGN_BYTES = 2 << 20  # a huge page, so that unit 0 begins one
FILE_MODE = 0o660  # the trust domain's group maps it
ADVICE = "set --dram-bytes or mount a larger tmpfs"

HEADER = np.dtype(
    [
        ("magic", "S16"),
        ("header_bytes", "<u8"),
        ("capacity_bytes", "<u8"),
        ("extent_units", "<u8"),
        ("identity", "S32"),  # hex
        ("epoch", "S64"),
    ]
)


@dataclass(frozen=True)
class Shape:
    """What an arena must agree in to be used again."""

    capacity_bytes: int
    extent_units: int
    huge_pages: bool = True  # ask for them; the file is the same

    @property
    def extents(self) -> int:
        """How many there are."""
        return self.capacity_bytes // (self.extent_units * UNIT_BYTES)

    @property
    def header_bytes(self) -> int:
        """Where unit 0 begins."""
        table_end = TABLE_OFFSET_BYTES + 4 * self.extents
        return -(-table_end // HEADER_ALIGN_BYTES) * HEADER_ALIGN_BYTES


class ArenaFile:
    """The mapped file. `reused` says that it is an earlier daemon's, whose extent table is still in `table`."""

    def __init__(self, path: Path, shape: Shape, epoch: str) -> None:
        """Uses the file again or makes a new one. Raises ConfigError where there is less memory than asked for."""
        self.shape = shape
        self.reused = _reusable(path, shape)
        self.notes: tuple[str, ...] = ()
        self.table: NDArray[np.int32]
        self.units: NDArray[np.uint8]
        self._header: np.void
        if not self.reused:
            path.unlink(missing_ok=True)  # its memory is free for the new one, unless somebody still has it mapped
        place = path if self.reused else path.with_name(f"{path.name}.new")
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (0 if self.reused else os.O_CREAT | os.O_TRUNC)
        fd = os.open(place, flags, FILE_MODE)
        try:
            self._inode = os.fstat(fd).st_ino
            self._map(fd, path.parent.parent)
            if not self.reused:
                self._header["magic"], self._header["header_bytes"] = MAGIC, shape.header_bytes
                self._header["capacity_bytes"], self._header["extent_units"] = shape.capacity_bytes, shape.extent_units
                self._header["identity"] = uuid.uuid4().hex.encode()
            self._header["epoch"] = epoch.encode()
        except BaseException:
            if not self.reused:
                place.unlink()
            raise
        finally:
            os.close(fd)
        if not self.reused:
            os.replace(place, path)

    @property
    def identity(self) -> str:
        """Of this file: differs from that of any other arena there was."""
        return bytes(self._header["identity"]).decode()

    def in_place(self, path: Path) -> bool:
        """Whether `path` is still this file, so that others can map it."""
        try:
            return os.stat(path).st_ino == self._inode
        except OSError:
            return False

    def close(self) -> None:
        """Unmap, as soon as nobody has a view any more."""
        self._header = np.zeros(1, HEADER)[0]
        self.table, self.units = np.zeros(0, np.int32), np.zeros(0, np.uint8)
        try:
            self._map_object.close()
        except BufferError:
            return  # a view is still out: the mapping goes with it

    def _map(self, fd: int, tmpfs: Path) -> None:
        total_bytes = self.shape.header_bytes + self.shape.capacity_bytes
        request = Request("dram arena", total_bytes, ADVICE)
        require_disk(fd, tmpfs, request)
        free_bytes, limited_by = memory_free()
        require(request, missing(fd, total_bytes), free_bytes, limited_by)
        os.fchmod(fd, FILE_MODE)
        if not self.reused:
            os.ftruncate(fd, total_bytes)
        self._map_object = mmap.mmap(fd, total_bytes)
        whole = np.frombuffer(self._map_object, dtype=np.uint8)
        table_end = TABLE_OFFSET_BYTES + 4 * self.shape.extents
        self._header = whole[: HEADER.itemsize].view(HEADER)[0]
        self.table = whole[TABLE_OFFSET_BYTES:table_end].view(np.int32)
        self.units = whole[self.shape.header_bytes :]
        pages = system.ask_huge_pages(self.units) if self.shape.huge_pages else ""
        self.notes = tuple(note for note in (system.interleave(self.units), pages) if note)
        allocate(fd, tmpfs, request)  # after the policy is set: pages are taken here


def _reusable(path: Path, shape: Shape) -> bool:
    """Whether the file there is an arena of this layout and shape, and this user's."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        stat = os.fstat(fd)
        head = os.pread(fd, HEADER.itemsize, 0)
    finally:
        os.close(fd)
    if len(head) < HEADER.itemsize or stat.st_uid != os.geteuid():
        return False
    found = np.frombuffer(head, HEADER)[0]
    sizes = (int(found["header_bytes"]), int(found["capacity_bytes"]), int(found["extent_units"]))
    same = found["magic"] == MAGIC and sizes == (shape.header_bytes, shape.capacity_bytes, shape.extent_units)
    return bool(same) and stat.st_size == shape.header_bytes + shape.capacity_bytes
