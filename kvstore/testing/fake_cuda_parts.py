"""The inside of `fake_cuda`: what is mapped where, what is queued, and which rules were broken."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvstore.kernels.driver import OUT_OF_MEMORY, CudaError

POISON = 0xDB  # bytes of a target whose copy has not run
INVALID = 1  # status: CUDA_ERROR_INVALID_VALUE

Kind = Literal["map", "plain", "ipc"]


class Violation(AssertionError):
    """A rule of the driver's API was broken."""


class Rules:
    """The rules that were broken so far."""

    def __init__(self) -> None:
        self.broken: list[str] = []

    def violation(self, what: str) -> Violation:
        """To be raised; kept too, since who calls may swallow it."""
        self.broken.append(what)
        return Violation(what)


@dataclass
class Memory:
    """Physical memory, by its inode: it goes when no handle and no mapping is left."""

    descriptor: int
    size_bytes: int
    device: int
    handles: int = 0
    maps: int = 0
    freed: bool = False


@dataclass
class Range:
    """An address range that something is, or was, mapped to. It stays readable, so that use after the end is told and does not crash."""

    address: int
    size_bytes: int
    inode: int
    kind: Kind
    keep: mmap.mmap
    live: bool = True


class Mappings:
    """Memory of all devices, handles for it, and where it is mapped."""

    def __init__(self, rules: Rules, memory_bytes: int) -> None:
        self._rules, self._memory_bytes = rules, memory_bytes
        self.memory: dict[int, Memory] = {}
        self.handles: dict[int, int] = {}  # → inode
        self.ranges: list[Range] = []
        self._numbers = itertools.count(0x1000)

    def free_bytes(self, device: int) -> int:
        """What is left of a device's memory."""
        return self._memory_bytes - sum(memory.size_bytes for memory in self.memory.values() if memory.device == device)

    def take(self, device: int, size_bytes: int) -> int:
        """New memory; its inode."""
        if size_bytes > self.free_bytes(device):
            raise CudaError("create", OUT_OF_MEMORY, "out of memory")
        descriptor = os.memfd_create("fake-gpu")
        os.ftruncate(descriptor, size_bytes)
        return self.know(descriptor, device)

    def know(self, descriptor: int, device: int) -> int:
        """The inode of a descriptor that is ours now; memory that another process made becomes known here."""
        stat = os.fstat(descriptor)
        if stat.st_ino in self.memory:
            os.close(descriptor)
        else:
            self.memory[stat.st_ino] = Memory(descriptor, stat.st_size, device)
        return stat.st_ino

    def handle(self, inode: int) -> int:
        """A new handle for memory."""
        self.memory[inode].handles += 1
        number = next(self._numbers)
        self.handles[number] = inode
        return number

    def inode(self, handle: int) -> int:
        """A handle's memory."""
        if handle not in self.handles:
            raise self._rules.violation(f"handle {handle:#x} used after its release")
        return self.handles[handle]

    def release(self, handle: int) -> None:
        """End a handle."""
        inode = self.inode(handle)
        del self.handles[handle]
        self.memory[inode].handles -= 1
        self._settle(inode)

    def map(self, inode: int, size_bytes: int, kind: Kind) -> int:
        """Map memory; its address."""
        memory = self.memory[inode]
        if size_bytes > memory.size_bytes:
            raise CudaError("map", INVALID, f"{size_bytes} of {memory.size_bytes} bytes")
        keep = mmap.mmap(memory.descriptor, size_bytes)
        memory.maps += 1
        address = ctypes.addressof(ctypes.c_char.from_buffer(keep))
        self.ranges.append(Range(address, size_bytes, inode, kind, keep))
        return address

    def mapped(self, address: int, kind: Kind, size_bytes: int | None = None) -> Range:
        """A live mapping by its start."""
        for found in self.ranges:
            if found.live and found.address == address and found.kind == kind and size_bytes in (None, found.size_bytes):
                return found
        raise self._rules.violation(f"{address:#x} given back, and nothing of that kind and size is mapped there")

    def end(self, mapping: Range) -> None:
        """Unmap."""
        mapping.live = False
        self.memory[mapping.inode].maps -= 1
        self._settle(mapping.inode)

    def check_access(self, address: int, size_bytes: int) -> None:
        """A copy reads or writes there: wholly inside a live mapping, or in the host's own memory."""
        for found in self.ranges:
            if found.address < address + size_bytes and address < found.address + found.size_bytes:
                inside = found.address <= address and address + size_bytes <= found.address + found.size_bytes
                if not found.live or (found.kind == "ipc" and self.memory[found.inode].freed):
                    raise self._rules.violation(f"{size_bytes} bytes at {address:#x} used after they were given back")
                if not inside:
                    raise self._rules.violation(f"{size_bytes} bytes at {address:#x} reach out of what is mapped there")

    def _settle(self, inode: int) -> None:
        memory = self.memory[inode]
        if not memory.handles and not memory.maps:
            memory.size_bytes = 0  # the descriptor stays, for those who may still ask for it by mistake


@dataclass
class Copy:
    """A queued copy."""

    to: int
    of: int
    size_bytes: int

    def touches(self, address: int, size_bytes: int) -> bool:
        """Whether it reads or writes there."""
        return any(address < end + self.size_bytes and end < address + size_bytes for end in (self.to, self.of))


@dataclass
class Launch:
    """A queued kernel: what it copies, and how it is run."""

    copies: list[Copy]
    run: Callable[[], None]


@dataclass
class Mark:
    """An event's record, or a wait for it, in a stream."""

    event: int
    version: int
    follows: bool


@dataclass
class Stream:
    """What is queued, in order."""

    device: int
    queue: list[Copy | Launch | Mark] = field(default_factory=list)


@dataclass
class Event:
    """How often it was recorded, and which record has been reached."""

    recorded: int = 0
    reached: int = 0
    stream: int = 0


class Queues:
    """Streams and events. Nothing runs before it must."""

    def __init__(self, rules: Rules, mappings: Mappings) -> None:
        self._rules, self._mappings = rules, mappings
        self.streams: dict[int, Stream] = {}
        self.events: dict[int, Event] = {}
        self._closed: list[Stream] = []
        self._numbers = itertools.count(0x2000)

    def open_stream(self, device: int) -> int:
        """A new stream."""
        number = next(self._numbers)
        self.streams[number] = Stream(device)
        return number

    def close_stream(self, stream: int) -> None:
        """What is queued on it may still run."""
        self._closed.append(self.stream(stream))
        del self.streams[stream]

    def open_event(self) -> int:
        """A new event."""
        number = next(self._numbers)
        self.events[number] = Event()
        return number

    def close_event(self, event: int) -> None:
        """Destroy it."""
        self.event(event)
        del self.events[event]

    def stream(self, stream: int) -> Stream:
        """An open stream."""
        if stream not in self.streams:
            raise self._rules.violation(f"stream {stream:#x} used after its end")
        return self.streams[stream]

    def event(self, event: int) -> Event:
        """An open event."""
        if event not in self.events:
            raise self._rules.violation(f"event {event:#x} used after its end")
        return self.events[event]

    def copies(self) -> Iterator[Copy]:
        """All that have not run."""
        for stream in self._all():
            for each in stream.queue:
                if not isinstance(each, Mark):
                    yield from [each] if isinstance(each, Copy) else each.copies

    def check_quiet(self, address: int, size_bytes: int, what: str) -> None:
        """No copy is in flight there."""
        if any(each.touches(address, size_bytes) for each in self.copies()):
            raise self._rules.violation(f"{size_bytes} bytes at {address:#x} {what} while a copy is in flight there")

    def copy(self, stream: int, to: int, of: int, size_bytes: int) -> None:
        """Queue a copy. Its target is poisoned, unless an earlier one has still to do with it."""
        queue = self.stream(stream).queue
        queue.append(self._checked(to, of, size_bytes))

    def launch(self, stream: int, copies: Sequence[tuple[int, int, int]], run: Callable[[], None]) -> None:
        """Queue a kernel that makes these copies, each (to, of, bytes)."""
        queue = self.stream(stream).queue
        queue.append(Launch([self._checked(*each) for each in copies], run))

    def _checked(self, to: int, of: int, size_bytes: int) -> Copy:
        for address in (to, of):
            self._mappings.check_access(address, size_bytes)
        if not any(each.touches(to, size_bytes) for each in self.copies()):
            ctypes.memset(to, POISON, size_bytes)
        return Copy(to, of, size_bytes)

    def record(self, stream: int, event: int) -> None:
        """Queue an event."""
        found = self.event(event)
        found.recorded, found.stream = found.recorded + 1, stream
        self.stream(stream).queue.append(Mark(event, found.recorded, follows=False))

    def follow(self, stream: int, event: int) -> None:
        """Queue a wait for an event, as it was recorded last."""
        self.stream(stream).queue.append(Mark(event, self.event(event).recorded, follows=True))

    def step(self, event: int) -> bool:
        """Run one thing on the event's stream; whether the event is done."""
        found = self.event(event)
        if found.reached < found.recorded and found.stream in self.streams:
            self._run_one(self.streams[found.stream])
        return found.reached >= found.recorded

    def run_until(self, event: int, version: int) -> None:
        """Run what is queued before an event's record, and no more."""
        found = self.events.get(event)
        mark = Mark(event, version, follows=False)
        for stream in self._all():
            while found is not None and found.reached < version and mark in stream.queue:
                self._run_one(stream)

    def drop(self, device: int) -> None:
        """What is queued on a device never runs."""
        for stream in self._all():
            if stream.device == device:
                stream.queue.clear()

    def _all(self) -> list[Stream]:
        return [*self.streams.values(), *self._closed]

    def _run_one(self, stream: Stream) -> None:
        if not stream.queue:
            return
        first = stream.queue.pop(0)
        if isinstance(first, Copy):
            for address in (first.to, first.of):
                self._mappings.check_access(address, first.size_bytes)
            ctypes.memmove(first.to, first.of, first.size_bytes)
        elif isinstance(first, Launch):
            for each in first.copies:
                for address in (each.to, each.of):
                    self._mappings.check_access(address, each.size_bytes)
            first.run()
        elif first.follows:
            self.run_until(first.event, first.version)
        elif first.event in self.events:
            self.events[first.event].reached = max(self.events[first.event].reached, first.version)
