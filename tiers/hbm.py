"""Blocks in a GPU's memory. A `ByteTier` over one pool that clients map; its copies run on streams of its own.

`read` and `write` are called by lanes, several at once; each takes one of the tier's streams, queues its copies and sleeps until their
event, so the event loop is never kept waiting. No buffer is given back while a copy may still touch it, not after an error either.
Not yet run on a GPU; the tests put a driver in its place that checks the order of everything.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.errors import ConfigError, Unavailable
from kvstore.kernels.driver import CudaDriver, CudaError, LibCuda
from kvstore.tiers.base import Health, HealthState
from kvstore.tiers.direct_io import check_range
from kvstore.tiers.hbm_pool import DevicePool
from kvstore.tiers.health import HealthRecord

STREAMS = 4  # copies in flight: two directions of a bus, and the next of each queued behind it
WAIT_FOR_STREAM_S = 30.0  # seconds: by then a copy of the largest block has long ended, or the GPU hangs


@dataclass(frozen=True)
class HbmOptions:
    device: int  # the GPU's number in this process
    capacity_bytes: int
    streams: int = STREAMS


@dataclass(frozen=True)
class Absent:
    """Why there is no hbm tier."""

    reason: str


def find_driver() -> CudaDriver | Absent:
    """The CUDA driver, or why this machine has none."""
    try:
        return LibCuda()
    except ConfigError as error:
        return Absent(str(error))


@dataclass(frozen=True)
class _Lane:
    stream: int
    event: int


class HbmTier:
    """A `ByteTier` in one GPU's memory. `pool` is what clients are offered.

    Raises ConfigError where the GPU is not there, or has less memory free than asked for.
    """

    name = "hbm"

    def __init__(self, driver: CudaDriver, options: HbmOptions) -> None:
        if not 0 <= options.device < driver.devices():
            raise ConfigError(f"hbm: GPU {options.device} is not there, the driver sees {driver.devices()}; check CUDA_VISIBLE_DEVICES")
        self._driver, self._options = driver, options
        self.pool = DevicePool(driver, options.device, options.capacity_bytes)
        standing = f"hbm: shared by CUDA IPC, clients lose it with the daemon: {self.pool.note}" if self.pool.note else ""
        self._health = HealthRecord(standing)
        self._lanes: queue.LifoQueue[_Lane] = queue.LifoQueue()
        self._all_lanes: list[_Lane] = []
        self._lock = threading.Lock()
        self._users = 0
        self._open = True
        self._lost = ""  # what ended the device's context; nothing works after that
        try:
            for _ in range(options.streams):
                self._add_lane()
        except CudaError:
            self._give_back()
            raise

    @property
    def label(self) -> str:
        """What stats, metrics and logs call it: hbm: and the GPU's number."""
        return f"hbm:{self._options.device}"

    @property
    def lost(self) -> str:
        """What ended the GPU's context, so that nothing works there any more; empty while it does."""
        return self._lost

    @property
    def capacity_bytes(self) -> int:
        """Size of the range."""
        return self._options.capacity_bytes

    def read(self, offset_bytes: int, targets: Sequence[memoryview]) -> None:
        """See `ByteTier.read`."""
        self._move("read", offset_bytes, targets)

    def write(self, offset_bytes: int, sources: Sequence[memoryview]) -> None:
        """See `ByteTier.write`."""
        self._move("write", offset_bytes, sources)

    def health(self) -> Health:
        """See `ByteTier.health`."""
        if self._lost and self._open:
            return Health(HealthState.FAILED, f"hbm: GPU {self._options.device} failed ({self._lost}); restart the daemon, see nvidia-smi")
        return self._health.health()

    def close(self) -> None:
        """See `ByteTier.close`: the last call in progress gives the memory back."""
        with self._lock:
            if not self._open:
                return
            self._open = False
            idle = self._users == 0
        self._health.close()
        if idle:
            self._give_back()

    def _move(self, kind: str, offset_bytes: int, buffers: Sequence[memoryview]) -> None:
        with self._in_use():
            check_range(self.name, self.capacity_bytes, offset_bytes, buffers)
            with self._lane() as lane:
                try:
                    self._copy(kind, lane, self.pool.address + offset_bytes, buffers)
                except CudaError as error:
                    self._health.failed(kind, f"hbm: a {kind} failed: {error}")
                    raise
            self._health.worked(kind)

    def _copy(self, kind: str, lane: _Lane, at: int, buffers: Sequence[memoryview]) -> None:
        """Queue a copy for each buffer and sleep until all have run, also those before one that could not be queued."""
        device = self._options.device
        failure: CudaError | None = None
        for buffer in buffers:
            address = np.frombuffer(buffer, np.uint8).ctypes.data
            to, of = (at, address) if kind == "write" else (address, at)
            try:
                self._driver.copy(device, lane.stream, to, of, buffer.nbytes)
            except CudaError as error:
                failure = error
                break
            at += buffer.nbytes
        try:
            self._driver.record(device, lane.stream, lane.event)
            self._driver.wait(device, lane.event)
        except CudaError as error:
            # Such errors stay with the context: nothing runs there any more, so nothing touches the buffers either.
            self._lost = self._lost or str(error)
            raise
        if failure is not None:
            raise failure

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        with self._lock:
            if not self._open:
                raise Unavailable("hbm: closed")
            if self._lost:
                raise Unavailable(f"hbm: GPU {self._options.device} failed ({self._lost}); restart the daemon, see nvidia-smi")
            self._users += 1
        try:
            yield
        finally:
            if self._left():
                self._give_back()

    def _left(self) -> bool:
        """A call has ended; whether it was the last of a closed tier."""
        with self._lock:
            self._users -= 1
            return not self._open and self._users == 0

    @contextlib.contextmanager
    def _lane(self) -> Iterator[_Lane]:
        try:
            lane = self._lanes.get(timeout=WAIT_FOR_STREAM_S)
        except queue.Empty:
            raise Unavailable(f"hbm: GPU {self._options.device} has ended no copy for {WAIT_FOR_STREAM_S:.0f} s; see nvidia-smi") from None
        try:
            yield lane
        finally:
            self._lanes.put(lane)

    def _add_lane(self) -> None:
        stream = self._driver.stream(self._options.device)
        try:
            event = self._driver.event(self._options.device)
        except CudaError:
            self._driver.close_stream(self._options.device, stream)
            raise
        self._all_lanes.append(_Lane(stream, event))
        self._lanes.put(self._all_lanes[-1])

    def _give_back(self) -> None:
        """Streams, events, memory. A lost context gives nothing back, and has nothing to lose."""
        with contextlib.suppress(CudaError):
            for lane in self._all_lanes:
                self._driver.close_event(self._options.device, lane.event)
                self._driver.close_stream(self._options.device, lane.stream)
        with contextlib.suppress(CudaError):
            self.pool.close()
