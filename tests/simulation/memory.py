"""Simulated shared memory: the arena, which outlives the daemon, the session files beside it with their locks, and clients' maps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.cache.messages import Units
from kvstore.errors import ResourceExhausted, Unavailable
from kvstore.tiers.base import Health, HealthState
from kvstore.tiers.dram import DramOptions
from tests.simulation.machine import Machine, Process

UNIT_BYTES = 4096


@dataclass
class ArenaFile:
    """One file of units. Whoever has it mapped keeps it, also when it is no longer there."""

    identity: str
    extent_units: int
    units: NDArray[np.uint8]
    table: NDArray[np.int32]


@dataclass
class Notes:
    """What a session's file holds, and who has it locked."""

    path: str
    session: int
    arena: str
    marked: set[int] = field(default_factory=set)
    locked_by: Process | None = None


@dataclass
class Memory:
    """The machine's tmpfs. Lost in a power failure."""

    machine: Machine
    arena: ArenaFile | None = None
    notes: dict[str, Notes] = field(default_factory=dict)
    touch_s: float = 0.0  # seconds until a new arena is touched to its end
    full: bool = False  # no room for the bits of a session file
    made: int = 0

    def marked_for(self, process: Process) -> set[int]:
        """First units of all slots that a later daemon would leave to this process."""
        return set().union(*(notes.marked for notes in self.notes.values() if notes.locked_by is process))

    def lose(self) -> None:
        """The power fails."""
        self.arena = None
        self.notes.clear()


class SessionFile:
    """The daemon's side of one session's file."""

    def __init__(self, memory: Memory, notes: Notes) -> None:
        self._memory, self._notes = memory, notes
        self.path, self.session, self.arena = notes.path, notes.session, notes.arena

    def mark(self, granted: Units, withdrawn: Units) -> None:
        if self._memory.full and len(granted):
            raise ResourceExhausted(f"{self.path}: no room")
        if self._memory.machine.running.effect(f"marks for session {self.session}: +{granted.tolist()} -{withdrawn.tolist()}"):
            self._notes.marked |= set(granted.tolist())
            self._notes.marked -= set(withdrawn.tolist())

    def marked_units(self) -> Units:
        return np.array(sorted(self._notes.marked), np.uint32)

    def process_gone(self) -> bool:
        return self._notes.locked_by is None

    def remove(self) -> None:
        if self._memory.machine.running.effect(f"removes the file of session {self.session}"):
            self._memory.notes.pop(self.path, None)

    def close(self) -> None:
        pass


class Dram:
    """In the place of `DramTier`."""

    name = "dram"
    notes: tuple[str, ...] = ()
    prefault_failure = ""
    header_bytes = 2 << 20
    path = "arena"

    def __init__(self, memory: Memory, options: DramOptions) -> None:
        self._memory = memory
        self._machine = memory.machine
        extents = options.capacity_bytes // UNIT_BYTES // options.extent_units
        self.reused = memory.arena is not None
        if memory.arena is None:
            memory.made += 1
            units = np.zeros(extents * options.extent_units * UNIT_BYTES, np.uint8)
            memory.arena = ArenaFile(f"arena {memory.made}", options.extent_units, units, np.zeros(extents, np.int32))
        self._file = memory.arena
        self._began_at = self._machine.now
        self.left_slot_units = self._file.table.copy()
        self.memory = self._file.units.data
        self.capacity_bytes = len(self._file.units)
        self.extent_units = self._file.extent_units

    @property
    def touched_units(self) -> int:
        whole = self.capacity_bytes // UNIT_BYTES
        passed_s = self._machine.now - self._began_at
        return whole if passed_s >= self._memory.touch_s else int(whole * passed_s / self._memory.touch_s)

    def extent_assigned(self, extent: int, slot_units: int) -> None:
        if self._machine.running.effect(f"dram extent {extent} has slots of {slot_units}"):
            self._file.table[extent] = slot_units

    def create_session(self, session: int) -> SessionFile:
        self._machine.running.must(f"makes the file of session {session}")
        self._memory.made += 1
        path = f"sessions/{session}-{self._memory.made:06}"
        self._memory.notes[path] = Notes(path, session, self._file.identity)
        return SessionFile(self._memory, self._memory.notes[path])

    def surviving_sessions(self) -> list[SessionFile]:
        """As `session_files.surviving`."""
        found = []
        for file in [SessionFile(self._memory, notes) for _, notes in sorted(self._memory.notes.items())]:
            if file.arena != self._file.identity or file.process_gone():
                file.remove()
            else:
                found.append(file)
        return found

    def health(self) -> Health:
        return Health(HealthState.OK)

    def close(self) -> None:
        pass

    def remove(self) -> None:
        if self._machine.running.effect("removes the arena"):
            self._memory.arena = None


# ---------------------------------------------------------------- in a client


class Lock:
    """In the place of `SessionLock`: goes with its process, whatever ends that."""

    def __init__(self, notes: Notes, process: Process) -> None:
        self._notes, self._process = notes, process
        notes.locked_by = process
        process.on_death.append(self.release)

    def release(self) -> None:
        if self._notes.locked_by is self._process:
            self._notes.locked_by = None


class Map:
    """In the place of the client's `Arena`."""

    def __init__(self, file: ArenaFile) -> None:
        self.file = file
        self.inode = file.identity
        self.writable = file.units
        self.readable = file.units[:]
        self.readable.flags.writeable = False

    def view(self, units: int, size_bytes: int) -> NDArray[np.uint8]:
        return self.readable[int(units) * UNIT_BYTES :][:size_bytes]

    def writable_view(self, units: int, size_bytes: int) -> NDArray[np.uint8]:
        return self.writable[int(units) * UNIT_BYTES :][:size_bytes]

    def warm(self, units: int, start: int, stop: int, *, write: bool) -> None:
        """Pages are no matter here."""


def map_arena(memory: Memory, welcome: Any, previous: Map | None) -> tuple[Map, Lock]:
    """In the place of `link.map_arena`."""
    process = memory.machine.running
    notes = memory.notes.get(welcome.session_path)
    if process.name.startswith("remote"):
        raise Unavailable("no shared memory: another machine")
    if memory.arena is None or notes is None:
        raise Unavailable("the arena, or the session's file, is no longer there")
    if notes.locked_by is not None:
        raise Unavailable("the session's file is locked")
    process.must("locks " + notes.path)
    same = previous is not None and previous.inode == memory.arena.identity
    return previous if previous is not None and same else Map(memory.arena), Lock(notes, process)
