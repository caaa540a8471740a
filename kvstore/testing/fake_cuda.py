"""A CUDA driver for tests, without a GPU: it does the work in host memory as late as the rules allow, and checks the rules.

A queued copy runs when somebody waits for an event after it, not before; until then its target holds poison. So a read before its
event, a source given back too early, a missing event between two streams: all show as wrong bytes. What breaks a rule of the API is a
Violation, raised and kept: memory unmapped, freed or unpinned while a copy is in flight there, a mapping used after it is gone, a
handle used twice. Exported descriptors are real ones, so another process's fake maps the same memory.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from kvstore.kernels.driver import IPC_HANDLE_BYTES, CudaError, DeviceFacts
from kvstore.testing.fake_cuda_parts import INVALID, Mappings, Queues, Range, Rules

GRANULARITY_BYTES = 64 << 10  # bytes: not the pages of anything, so that who forgets to ask is seen
LOST = 719  # status: CUDA_ERROR_LAUNCH_FAILED, which stays with the context
ALREADY_PINNED = 712  # status: CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED


class FakeCuda:
    """A `CudaDriver`. `fail` and `lose` make things go wrong; `leaks` and `violations` say what is left, and what was broken."""

    def __init__(self, devices: int = 1, memory_bytes: int = 1 << 30, descriptors: bool = True) -> None:
        self._count, self._memory_bytes, self._descriptors = devices, memory_bytes, descriptors
        self._lock = threading.RLock()
        self._rules = Rules()
        self._mappings = Mappings(self._rules, memory_bytes)
        self._queues = Queues(self._rules, self._mappings)
        self._pinned: dict[int, int] = {}  # address → bytes
        self._failures: dict[str, list[int]] = {}  # by call: the status of each of the next ones, 0 for none
        self._lost: set[int] = set()
        self.calls: Counter[str] = Counter()

    # ---- for tests

    @property
    def violations(self) -> list[str]:
        """The rules that were broken."""
        return self._rules.broken

    def fail(self, call: str, status: int, after: int = 0) -> None:
        """Let this call fail once, after so many that work."""
        self._failures[call] = [0] * after + [status]

    def lose(self, device: int) -> None:
        """The device's context is lost: every call fails, what was queued never runs."""
        with self._lock:
            self._lost.add(device)
            self._queues.drop(device)

    def leaks(self) -> list[str]:
        """What was made and not given back."""
        kept = [f"{each.kind} of {each.size_bytes} bytes" for each in self._mappings.ranges if each.live]
        kept += [f"handle {handle:#x}" for handle in self._mappings.handles] + [f"pin of {size} bytes" for size in self._pinned.values()]
        return kept + [f"stream {key:#x}" for key in self._queues.streams] + [f"event {key:#x}" for key in self._queues.events]

    def in_flight(self) -> int:
        """Copies that are queued and have not run."""
        with self._lock:
            return len(list(self._queues.copies()))

    # ---- CudaDriver

    def devices(self) -> int:
        """See `CudaDriver`."""
        return self._count

    def uuid(self, device: int) -> str:
        """See `CudaDriver`."""
        self._begin("uuid", device)
        return f"gpu-{device}"

    def facts(self, device: int) -> DeviceFacts:
        """See `CudaDriver`."""
        self._begin("facts", device)
        free = self._mappings.free_bytes(device)
        return DeviceFacts("fake", self._memory_bytes, free, GRANULARITY_BYTES, self._descriptors)

    def create(self, device: int, size_bytes: int) -> int:
        """See `CudaDriver`."""
        self._begin("create", device)
        if size_bytes % GRANULARITY_BYTES or size_bytes <= 0:
            raise CudaError("create", INVALID, f"{size_bytes} is not a multiple of the granularity")
        return self._mappings.handle(self._mappings.take(device, size_bytes))

    def release(self, device: int, handle: int) -> None:
        """See `CudaDriver`."""
        self._begin("release", device)
        self._mappings.release(handle)

    def map(self, device: int, handle: int, size_bytes: int) -> int:
        """See `CudaDriver`."""
        self._begin("map", device)
        return self._mappings.map(self._mappings.inode(handle), size_bytes, "map")

    def unmap(self, device: int, address: int, size_bytes: int) -> None:
        """See `CudaDriver`."""
        self._begin("unmap", device)
        self._end(self._mappings.mapped(address, "map", size_bytes))

    def export_descriptor(self, device: int, handle: int) -> int:
        """See `CudaDriver`."""
        self._begin("export_descriptor", device)
        return os.dup(self._mappings.memory[self._mappings.inode(handle)].descriptor)

    def import_descriptor(self, device: int, descriptor: int) -> int:
        """See `CudaDriver`."""
        self._begin("import_descriptor", device)
        return self._mappings.handle(self._mappings.know(os.dup(descriptor), device))

    def allocate(self, device: int, size_bytes: int) -> int:
        """See `CudaDriver`."""
        self._begin("allocate", device)
        return self._mappings.map(self._mappings.take(device, size_bytes), size_bytes, "plain")

    def free(self, device: int, address: int) -> None:
        """See `CudaDriver`. Whoever has it open by IPC has nothing from now on."""
        self._begin("free", device)
        mapping = self._mappings.mapped(address, "plain")
        self._end(mapping)
        self._mappings.memory[mapping.inode].freed = True

    def export_ipc(self, device: int, address: int) -> bytes:
        """See `CudaDriver`."""
        self._begin("export_ipc", device)
        memory = self._mappings.memory[self._mappings.mapped(address, "plain").inode]
        return f"{os.getpid()}:{memory.descriptor}".encode().ljust(IPC_HANDLE_BYTES, b"\0")

    def open_ipc(self, device: int, handle: bytes) -> int:
        """See `CudaDriver`."""
        self._begin("open_ipc", device)
        process, number = handle.rstrip(b"\0").decode().split(":")
        try:
            descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
        except OSError as error:
            raise CudaError("open_ipc", INVALID, f"the exporter is gone: {error}") from error
        inode = self._mappings.know(descriptor, device)
        return self._mappings.map(inode, self._mappings.memory[inode].size_bytes, "ipc")

    def close_ipc(self, device: int, address: int) -> None:
        """See `CudaDriver`."""
        self._begin("close_ipc", device)
        self._end(self._mappings.mapped(address, "ipc"))

    def pin(self, device: int, address: int, size_bytes: int) -> None:
        """See `CudaDriver`."""
        self._begin("pin", device)
        if address % mmap.PAGESIZE or size_bytes % mmap.PAGESIZE or size_bytes <= 0:
            raise CudaError("pin", INVALID, "not whole pages")
        if any(address < start + size and start < address + size_bytes for start, size in self._pinned.items()):
            raise CudaError("pin", ALREADY_PINNED, "pinned already")
        self._pinned[address] = size_bytes

    def unpin(self, device: int, address: int) -> None:
        """See `CudaDriver`."""
        self._begin("unpin", device)
        if address not in self._pinned:
            raise self._rules.violation(f"{address:#x} unpinned, and was not pinned")
        self._queues.check_quiet(address, self._pinned[address], "unpinned")
        del self._pinned[address]

    def stream(self, device: int) -> int:
        """See `CudaDriver`."""
        self._begin("stream", device)
        return self._queues.open_stream(device)

    def close_stream(self, device: int, stream: int) -> None:
        """See `CudaDriver`."""
        self._begin("close_stream", device)
        self._queues.close_stream(stream)

    def event(self, device: int) -> int:
        """See `CudaDriver`."""
        self._begin("event", device)
        return self._queues.open_event()

    def close_event(self, device: int, event: int) -> None:
        """See `CudaDriver`."""
        self._begin("close_event", device)
        self._queues.close_event(event)

    def copy(self, device: int, stream: int, to: int, of: int, size_bytes: int) -> None:
        """See `CudaDriver`."""
        with self._lock:
            self._begin("copy", device)
            self._queues.copy(stream, to, of, size_bytes)

    def launch(self, device: int, stream: int, copies: Sequence[tuple[int, int, int]], run: Callable[[], None]) -> None:
        """Queue a kernel that copies so, each (to, of, bytes). No call of `CudaDriver`: on a GPU a backend launches."""
        with self._lock:
            self._begin("launch", device)
            self._queues.launch(stream, copies, run)

    def record(self, device: int, stream: int, event: int) -> None:
        """See `CudaDriver`."""
        with self._lock:
            self._begin("record", device)
            self._queues.record(stream, event)

    def follow(self, device: int, stream: int, event: int) -> None:
        """See `CudaDriver`."""
        with self._lock:
            self._begin("follow", device)
            self._queues.follow(stream, event)

    def done(self, device: int, event: int) -> bool:
        """See `CudaDriver`. Each time it is asked, one more thing on the stream has run."""
        with self._lock:
            self._begin("done", device)
            return self._queues.step(event)

    def wait(self, device: int, event: int) -> None:
        """See `CudaDriver`."""
        with self._lock:
            self._begin("wait", device)
            self._queues.run_until(event, self._queues.event(event).recorded)

    # ---- the inside

    def _begin(self, call: str, device: int) -> None:
        with self._lock:
            self.calls[call] += 1
            if not 0 <= device < self._count:
                raise CudaError(call, INVALID, f"no device {device}")
            if device in self._lost:
                raise CudaError(call, LOST, "the context is lost")
            waiting = self._failures.get(call)
            status = waiting.pop(0) if waiting else 0
            if status:
                raise CudaError(call, status, "as the test asked")

    def _end(self, mapping: Range) -> None:
        with self._lock:
            self._queues.check_quiet(mapping.address, mapping.size_bytes, "given back")
            self._mappings.end(mapping)
