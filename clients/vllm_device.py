"""The engine's KV tensors in a GPU's memory as blocks of opaque bytes: copied by the driver, on streams of our own.

A block is one copy for each of its pages, queued at once and waited for together; pages that follow each other are one. The arena is
pinned when it is first seen, so that the copies run at the bus's speed; where that fails they are slower, and the log says so.

Nothing here waits for the engine's stream: what is saved was computed by steps whose results the scheduler has seen, and what is loaded
goes into blocks that no step uses before the load is reported. Not yet run on a GPU: the tests put a driver in its place that copies in
host memory, as late as the rules allow.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence

import torch

from kvstore.clients.arena import Arena, Bytes
from kvstore.clients.vllm_pages import Layers, Rows
from kvstore.kernels.driver import CudaDriver, CudaError
from kvstore.kernels.memcpy import copy_and_wait
from kvstore.tiers.pinned import PinnedArena

COPIES_AT_ONCE = 32  # blocks: some thousand copies of a large model, a few milliseconds, after which a save can be called off

log = logging.getLogger("kvstore.vllm")


class Gpu:
    """What the pages of one worker share: the driver, the device, and the pins of the arena's mappings. Threads may share it."""

    def __init__(self, driver: CudaDriver, device: int) -> None:
        """device   the driver's number of it"""
        self.driver, self.device = driver, device
        self._guard = threading.Lock()  # over the two below
        self._pins: dict[int, PinnedArena] = {}  # by the mapping's address
        self._used: dict[str, int] = {}  # which mapping is in use, by what is done there

    def pin(self, what: str, memory: Bytes) -> None:
        """Pin a mapping of the arena, where it is not; what nobody uses any more, of a daemon that has gone, is unpinned."""
        address = int(memory.ctypes.data)
        with self._guard:
            self._used[what] = address
            for gone in self._pins.keys() - self._used.values():
                self._pins.pop(gone).close()
            if address in self._pins:
                return
            pinned = self._pins[address] = PinnedArena(self.driver, self.device, memory)
        if pinned.note:
            log.warning("%s", pinned.note)

    def close(self) -> None:
        """Give the pins back. Nothing is being copied. Idempotent."""
        with self._guard:
            for pinned in self._pins.values():
                pinned.close()
            self._pins.clear()
            self._used.clear()


class DevicePages:
    """See `EnginePages`. Two threads may copy, one that gathers and one that scatters."""

    copies_at_once = COPIES_AT_ONCE

    def __init__(self, tensors: Mapping[str, torch.Tensor], gpu: Gpu) -> None:
        """tensors   see `Layers.of`;  gpu  where they are. Raises GeometryError for those that cannot be taken."""
        self._layers = Layers.of(tensors)
        self._gpu = gpu
        self.layers, self.layout = len(self._layers.rows), self._layers.layout
        self.blocks = self._layers.rows[0].blocks
        self._runs = _joined(self._layers.rows)
        self._streams: dict[str, int] = {}  # by what is done there, each by one thread

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(run.page_bytes for run in self._runs)

    def source(self, arena: Arena, unit: int) -> Bytes:
        """The bytes of the slot at `unit`, of the writable mapping: a read-only one cannot be pinned."""
        self._gpu.pin("scatter", arena.writable)
        return arena.writable_view(unit, self.block_bytes)

    def write_to(self, arena: Arena) -> None:
        """Slots of this arena will be gathered into."""
        self._gpu.pin("gather", arena.writable)

    def gather(self, blocks: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Copy engine blocks, each into a slot's first `block_bytes`. Raises CudaError; then some of them may be filled."""
        self._copy("gather", [(at, of, size) for of, at, size in self._pairs(blocks, slots)])

    def scatter(self, blocks: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Copy the first `block_bytes` of slots, each into an engine block. Raises CudaError; then some of them may be filled."""
        self._copy("scatter", self._pairs(blocks, slots))

    def close(self) -> None:
        """Give the streams and the pins back. Nothing is being copied."""
        for stream in self._streams.values():
            with contextlib.suppress(CudaError):  # a lost context has no streams any more
                self._gpu.driver.close_stream(self._gpu.device, stream)
        self._streams.clear()
        self._gpu.close()

    def _pairs(self, blocks: Sequence[int], slots: Sequence[Bytes]) -> list[tuple[int, int, int]]:
        """Where each page lies in the engine, where in its slot, and its bytes."""
        pairs = []
        for block, slot in zip(blocks, slots, strict=True):
            at = int(slot.ctypes.data)
            for run in self._runs:
                pairs.append((run.address + block * run.stride_bytes, at, run.page_bytes))
                at += run.page_bytes
        return pairs

    def _copy(self, what: str, copies: Sequence[tuple[int, int, int]]) -> None:
        """Queue copies (to, of, bytes), and sleep until all have run."""
        driver, device = self._gpu.driver, self._gpu.device
        if what not in self._streams:
            self._streams[what] = driver.stream(device)
        copy_and_wait(driver, device, self._streams[what], copies)


def _joined(rows: Sequence[Rows]) -> list[Rows]:
    """Pages that follow each other in memory as one."""
    joined: list[Rows] = []
    for each in rows:
        last = joined[-1] if joined else None
        if last and last.stride_bytes == each.stride_bytes and last.address + last.page_bytes == each.address:
            joined[-1] = Rows(last.address, last.blocks, last.stride_bytes, last.page_bytes + each.page_bytes)
        else:
            joined.append(each)
    return joined
