"""Blocks in host memory: one arena, a file in shared memory that clients map too.

    <dir>/kvstore-<name>/arena         the memory
                        /sessions/     one file per attached process
                        /owner         locked by the daemon
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.config import format_bytes
from kvstore.errors import ConfigError, Unavailable
from kvstore.geometry import UNIT_BYTES
from kvstore.tiers.arena_file import ArenaFile, Shape
from kvstore.tiers.base import Health
from kvstore.tiers.direct_io import check_range
from kvstore.tiers.health import HealthRecord
from kvstore.tiers.leftovers import left_behind
from kvstore.tiers.owner_lock import OwnerLock
from kvstore.tiers.prefault import Prefault
from kvstore.tiers.session_files import DIRECTORY_MODE, SessionFile, surviving


@dataclass(frozen=True)
class DramOptions:
    directory: Path  # a tmpfs; the arena gets a directory of its own in it
    name: str  # tells the arenas of several daemons apart
    capacity_bytes: int  # rounded down to whole extents
    extent_units: int
    epoch: str
    prefault: bool = True
    huge_pages: bool = True  # asked for; that there are none is a note, not a fault


class DramTier:
    """A `ByteTier`. `memory` is the whole range, `path` and `header_bytes` are what a client needs to map it."""

    name = "dram"

    def __init__(self, options: DramOptions) -> None:
        """Takes all the memory, and begins to touch it in the background. Raises ConfigError where there is less than asked for."""
        shape = Shape(_whole_extents(options), options.extent_units, options.huge_pages)
        folder = options.directory / f"kvstore-{options.name}"
        self.sessions_directory = folder / "sessions"
        self._owner = _own(folder, self.sessions_directory)
        self.path = folder / "arena"
        try:
            self._file = ArenaFile(self.path, shape, options.epoch)
        except OSError as error:
            self._owner.release()
            raise ConfigError(f"dram arena {self.path}: {error.strerror}; check --dram-dir") from error
        except ConfigError as error:
            self._owner.release()
            raise ConfigError("; ".join(filter(None, (str(error), left_behind(folder))))) from error
        except BaseException:
            self._owner.release()
            raise
        self._units = self._file.units
        self.memory = self._units.data
        self.notes = tuple(filter(None, (*self._file.notes, left_behind(folder))))
        self.left_slot_units: NDArray[np.int32] = self._file.table.copy()  # the extent table as an earlier daemon left it
        self._health = HealthRecord()
        self._prefault = Prefault(self._file.units)
        if options.prefault:
            self._prefault.start()
        else:
            self._prefault.skip()
        self._open = True

    @property
    def capacity_bytes(self) -> int:
        """Size of the range."""
        return self._file.shape.capacity_bytes

    @property
    def extent_units(self) -> int:
        """Size of an extent."""
        return self._file.shape.extent_units

    @property
    def header_bytes(self) -> int:
        """Where unit 0 begins in the file."""
        return self._file.shape.header_bytes

    @property
    def reused(self) -> bool:
        """Whether this is the file of an earlier daemon, so that its processes may still have it mapped."""
        return self._file.reused

    @property
    def touched_units(self) -> int:
        """Units from the start that are in memory; only slots below are to be granted. Only grows."""
        return self._prefault.touched_bytes // UNIT_BYTES

    @property
    def prefault_failure(self) -> str:
        """Why the rest will not be touched; empty where it will."""
        return self._prefault.failure

    def extent_assigned(self, extent: int, slot_units: int) -> None:
        """Note in the file, for the next daemon, that the extent holds slots of this size; 0: none."""
        self._file.table[extent] = slot_units

    def create_session(self, session: int) -> SessionFile:
        """The file that this session's process is to lock. Raises ResourceExhausted."""
        return SessionFile.create(self.sessions_directory, session, self._file.identity, self.capacity_bytes // UNIT_BYTES)

    def surviving_sessions(self) -> list[SessionFile]:
        """Sessions of earlier daemons whose processes still have this arena mapped: what they have marked must not be reused yet.

        Call once, before the first `create_session`.
        """
        return surviving(self.sessions_directory, self._file.identity)

    def read(self, offset_bytes: int, targets: Sequence[memoryview]) -> None:
        """See `ByteTier.read`."""
        for units, target in self._pieces(offset_bytes, targets):
            np.copyto(np.frombuffer(target, np.uint8), units)

    def write(self, offset_bytes: int, sources: Sequence[memoryview]) -> None:
        """See `ByteTier.write`."""
        for units, source in self._pieces(offset_bytes, sources):
            np.copyto(units, np.frombuffer(source, np.uint8))

    def health(self) -> Health:
        """See `ByteTier.health`."""
        if self._prefault.failure:
            self._health.failed("prefault", f"dram arena: {self._prefault.failure} while taking memory; set a smaller --dram-bytes")
        if self._open and not self._file.in_place(self.path):
            self._health.failed("file", f"{self.path}: deleted; whoever has mapped it goes on, others read over gRPC until a restart")
        return self._health.health()

    def close(self) -> None:
        """Unmap the arena, once nobody has a view of it, and leave its file for the next daemon. Idempotent."""
        if self._open:
            self._unmap()
            self._owner.release()

    def remove(self) -> None:
        """Close, and give the memory back; what clients have mapped stays theirs. For an orderly stop with no process attached."""
        if self._open:
            self._unmap()
            self.path.unlink(missing_ok=True)
            self._owner.remove()
            with contextlib.suppress(OSError):  # not empty: somebody else's files, or the next daemon's
                self.sessions_directory.rmdir()
                self.path.parent.rmdir()

    def _unmap(self) -> None:
        self._open = False
        self._health.close()
        self._prefault.stop()
        self._units, self.memory = np.zeros(0, np.uint8), memoryview(b"")
        self._file.close()

    def _pieces(self, offset_bytes: int, buffers: Sequence[memoryview]) -> list[tuple[NDArray[np.uint8], memoryview]]:
        """Each buffer with its part of the arena, which stays mapped while somebody has it."""
        units = self._units
        if not self._open:
            raise Unavailable("dram: closed")
        check_range(self.name, self.capacity_bytes, offset_bytes, buffers)
        starts = itertools.accumulate((buffer.nbytes for buffer in buffers), initial=offset_bytes)
        return [(units[start : start + buffer.nbytes], buffer) for start, buffer in zip(starts, buffers, strict=False)]


def _whole_extents(options: DramOptions) -> int:
    extent_bytes = options.extent_units * UNIT_BYTES
    if options.capacity_bytes < extent_bytes:
        asked, least = format_bytes(options.capacity_bytes), format_bytes(extent_bytes)
        raise ConfigError(f"dram arena: {asked} asked, one extent is {least}; set a larger --dram-bytes")
    return options.capacity_bytes // extent_bytes * extent_bytes


def _own(folder: Path, sessions: Path) -> OwnerLock:
    """The arena's directory, made where it is missing, and locked. One that another user made is refused: /dev/shm is everybody's."""
    try:
        folder.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        stat = os.stat(folder, follow_symlinks=False)
        if stat.st_uid != os.geteuid() or stat.st_mode & 0o022:
            raise ConfigError(f"{folder}: another user may write there; remove it, or give this daemon another name or --dram-dir")
        sessions.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        return OwnerLock(folder / "owner", "stop that daemon, or give this one another --dram-dir")
    except OSError as error:
        raise ConfigError(f"dram arena {folder}: {error.strerror}; check --dram-dir") from error
