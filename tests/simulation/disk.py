"""The simulated disk, and the system calls by which the daemon reaches it: the place of `os` in the modules of the nvme tier."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvstore.errors import ResourceExhausted, Unavailable
from tests.simulation.machine import Machine
from tests.simulation.medium import SECTOR_BYTES, Medium
from tests.simulation.strands import Killed

UNIT_BYTES = 4096
RECORD_BYTES = 128
CALL_S = (2e-5, 2e-3)  # seconds that a call takes on a healthy disk


@dataclass
class Trouble:
    """What is wrong with the disk now: chances of a call, and states. All zero: a healthy disk."""

    error: float = 0.0  # a call is refused with EIO; a write may have been done in part
    full: float = 0.0  # a write is refused with ENOSPC, or cut short
    short: float = 0.0  # a call does less than asked, as it may
    sync_error: float = 0.0
    lost: float = 0.0  # a write is acknowledged and not done
    misdirected: float = 0.0  # a write is done elsewhere
    flipped: float = 0.0  # a bit of a write, or of a read, is wrong
    read_only: bool = False
    slow_s: float = 0.0  # seconds: a call may take so long


@dataclass
class Disk:
    """Outlives the daemon; and, as far as it was synced, a power failure."""

    machine: Machine
    files: dict[str, Medium] = field(default_factory=dict)
    small: dict[str, str] = field(default_factory=dict)  # the small files, each replaced whole and synced at once
    trouble: Trouble = field(default_factory=Trouble)
    lied: bool = False  # it has acknowledged what it did not do: some promises are void

    def lose_power(self) -> None:
        for name in sorted(self.files):
            self.files[name].lose_power(self.machine.chance)


class SystemCalls:
    """`os`, as the nvme tier uses it. A thread's call takes time, and the process may be killed in the middle of it."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._machine = disk.machine
        self._chance = disk.machine.fate
        self._open: dict[int, str] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("O_") or name in ("strerror", "fspath"):
            return getattr(os, name)
        raise AttributeError(f"os.{name}: not simulated")

    # ---- files

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        name = path.name
        if name not in self._disk.files:
            if not flags & os.O_CREAT:
                raise FileNotFoundError(errno.ENOENT, "No such file", name)
            self._must("create " + name)
            self._disk.files[name] = Medium()
        fd = 3 + len(self._open)
        self._open[fd] = name
        return fd

    def close(self, fd: int) -> None:
        pass  # numbers are not used again: a late call by an old one would show

    def fstat(self, fd: int) -> SimpleNamespace:
        return SimpleNamespace(st_size=len(self._medium(fd).bytes), st_nlink=1)

    def ftruncate(self, fd: int, size_bytes: int) -> None:
        self._must("resize")
        self._medium(fd).resize(size_bytes)

    def posix_fallocate(self, fd: int, offset: int, size_bytes: int) -> None:
        self._must("allocate")
        medium = self._medium(fd)
        medium.resize(max(len(medium.bytes), offset + size_bytes))

    def urandom(self, count: int) -> bytes:
        return self._chance.randbytes(count)

    def allocate(self, fd: int, directory: Any, request: Any) -> None:
        """In the place of `room.allocate`."""
        self.posix_fallocate(fd, 0, request.total_bytes)

    # ---- reading

    def preadv(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        if not self._machine.pause(self._takes_s()):
            raise Killed
        trouble = self._disk.trouble
        if self._happens(trouble.error):
            self._fail(errno.EIO, f"read {self._open[fd]} at {offset}")
        content = self._medium(fd).bytes
        done = 0
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            part = content[offset + done : offset + done + len(view)]
            if part and self._happens(trouble.flipped):
                self._lie(f"a bit of {self._open[fd]} at {offset + done} is read wrong")
                part[self._chance.randrange(len(part))] ^= 1 << self._chance.randrange(8)
            view[: len(part)] = part
            done += len(part)
            if len(part) < len(view) or (len(buffers) > 1 and self._happens(trouble.short)):
                break
        return done

    # ---- writing

    def pwritev(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        return self._write(fd, list(buffers), offset, UNIT_BYTES)

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        return self._write(fd, [data], offset, RECORD_BYTES)

    def fdatasync(self, fd: int) -> None:
        if not self._machine.pause(self._takes_s()):
            raise Killed
        self._must("sync " + self._open[fd])
        if self._disk.trouble.read_only or self._happens(self._disk.trouble.sync_error):
            self._medium(fd).fail_sync()
            self._fail(errno.EIO, "sync " + self._open[fd])
        self._medium(fd).sync()

    def _write(self, fd: int, buffers: list[Any], offset: int, step_bytes: int) -> int:
        """The bytes are taken from memory when the call is done, as a device does."""
        name, trouble = self._open[fd], self._disk.trouble
        alive = self._machine.pause(self._takes_s())
        data = b"".join(bytes(buffer) for buffer in buffers)
        if not alive or not self._machine.running.effect(f"write {name} at {offset}, {len(data)} bytes"):
            if self._chance.random() < 0.7:
                self._put_part(fd, offset, data)
            raise Killed
        if trouble.read_only:
            self._fail(errno.EROFS, f"write {name}")
        if self._happens(trouble.error):
            self._put_part(fd, offset, data)
            self._fail(errno.EIO, f"write {name} at {offset}")
        if self._happens(trouble.full):
            self._fail(errno.ENOSPC, f"write {name} at {offset}")
        if len(data) > step_bytes and self._happens(trouble.short):
            data = data[: self._chance.randrange(1, len(data) // step_bytes + 1) * step_bytes]
        self._put(fd, offset, data, step_bytes)
        return len(data)

    def _put(self, fd: int, offset: int, data: bytes, step_bytes: int) -> None:
        """Do it, or something else that is acknowledged all the same."""
        trouble, name, medium = self._disk.trouble, self._open[fd], self._medium(fd)
        if self._happens(trouble.lost):
            self._lie(f"the write to {name} at {offset} is lost")
            return
        if self._happens(trouble.misdirected):
            place = self._chance.randrange(max(1, (len(medium.bytes) - len(data)) // step_bytes)) * step_bytes
            self._lie(f"the write to {name} at {offset} goes to {place}")
            offset = place
        if self._happens(trouble.flipped):
            self._lie(f"a bit of the write to {name} at {offset} is wrong")
            wrong = bytearray(data)
            wrong[self._chance.randrange(len(wrong))] ^= 1 << self._chance.randrange(8)
            data = bytes(wrong)
        medium.put(offset, data)

    def _put_part(self, fd: int, offset: int, data: bytes) -> None:
        """Some of it, or all: sectors of a block, pieces of a record."""
        step_bytes = SECTOR_BYTES if len(data) % SECTOR_BYTES == 0 else RECORD_BYTES // 2
        for start in range(0, len(data), step_bytes):
            if self._chance.random() < 0.6:
                self._medium(fd).put(offset + start, data[start : start + step_bytes])

    # ----

    def _medium(self, fd: int) -> Medium:
        return self._disk.files[self._open[fd]]

    def _takes_s(self) -> float:
        if self._machine.strand is None and not self._machine.running.alive:
            raise Killed
        slow_s = self._disk.trouble.slow_s
        return self._chance.uniform(*CALL_S) + (self._chance.uniform(0, slow_s) if slow_s and self._chance.random() < 0.3 else 0.0)

    def _happens(self, chance: float) -> bool:
        return chance > 0 and self._chance.random() < chance

    def _must(self, what: str) -> None:
        self._machine.running.must(what)

    def _fail(self, number: int, what: str) -> None:
        self._machine.note(f"{what}: {errno.errorcode[number]}")
        raise OSError(number, os.strerror(number))

    def _lie(self, what: str) -> None:
        self._machine.note(f"the disk lies: {what}")
        self._disk.lied = True


class Place:
    """A path on the simulated disk, as far as the nvme tier uses paths."""

    def __init__(self, disk: Disk, name: str = "") -> None:
        self._disk, self.name = disk, name

    def __truediv__(self, name: str) -> Place:
        return Place(self._disk, name)

    def __str__(self) -> str:
        return f"(disk)/{self.name}"

    @property
    def parent(self) -> Place:
        return Place(self._disk)

    def exists(self) -> bool:
        return self.name in self._disk.files or self.name in self._disk.small

    def is_file(self) -> bool:
        return self.exists()

    def stat(self) -> SimpleNamespace:
        return SimpleNamespace(st_size=len(self._disk.files[self.name].bytes))

    def mkdir(self, **_: Any) -> None:
        pass

    def unlink(self, missing_ok: bool = False) -> None:
        self._disk.machine.running.must("unlink " + self.name)
        self._disk.files.pop(self.name, None)


class SmallFiles:
    """In the place of the module `small_files`: each file is replaced whole, or not, also when the process dies or the power fails."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    async def read_json(self, path: Place) -> Any:
        if path.name not in self._disk.small:
            raise FileNotFoundError(path.name)
        return json.loads(self._disk.small[path.name])

    async def replace_json(self, path: Place, value: object) -> None:
        await asyncio.sleep(self._disk.machine.chance.uniform(*CALL_S))
        trouble = self._disk.trouble
        if trouble.read_only or self._disk.machine.chance.random() < trouble.error + trouble.full:
            raise (ResourceExhausted if trouble.full and not trouble.read_only else Unavailable)(f"{path}: refused")
        self._disk.machine.running.must("replace " + path.name)
        self._disk.small[path.name] = json.dumps(value)
        await asyncio.sleep(self._disk.machine.chance.uniform(*CALL_S))

    async def remove(self, path: Place) -> None:
        await asyncio.sleep(self._disk.machine.chance.uniform(*CALL_S))
        self._disk.machine.running.must("remove " + path.name)
        self._disk.small.pop(path.name, None)

    def sync_directory(self, path: Place) -> None:
        pass
