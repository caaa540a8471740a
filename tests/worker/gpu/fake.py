"""A GPU for the worker that is this machine's memory and processor, and checks the rules of a real one.

Memory is that of the fake CUDA driver, so other processes map it too. Kernels are the host shim's. What torch computes is done at once;
what it has to wait for must have been followed before, or it reads poison. A capture runs nothing, and refuses what a real one would:
looking at a number on the device, or bringing one there. A replay must find everything that was recorded where it was, and mapped.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvstore.clients.hbm import ImportedPool
from kvstore.clients.promotion import Copy
from kvstore.geometry import UNIT_BYTES
from kvstore.kernels.copying import copy_pieces
from kvstore.kernels.host import HostBackend, build
from kvstore.kernels.layout import ARENA_SHIFT, SlotSpace
from kvstore.kernels.variants import Variant, all_variants
from kvstore.testing.fake_cuda import FakeCuda
from kvstore.testing.fake_cuda_parts import Violation
from kvstore.worker.gpu.device import Views

BUILT = Path(__file__).resolve().parent.parent.parent.parent / "build" / "kernels"
# Arguments that a step makes anew: a capture's own memory on a GPU. All others are recorded as they are.
TEMPORARY = ("q", "out", "partial", "partial_top", "partial_sum", "sink_logits", "source")
REFUSED = ("_local_scalar_dense", "lift_fresh", "nonzero", "_unique2", "is_nonzero", "item")  # torch's names


def library() -> Path:
    """All kernels for this processor, as the kernels' own tests build them."""
    BUILT.mkdir(parents=True, exist_ok=True)
    return build(all_variants(), BUILT)


class FakeGpu:
    """See `kvstore.worker.gpu.device.Gpu`. `launches` counts kernels that ran; `close` gives the stream back."""

    number = 0
    device = torch.device("cpu")

    def __init__(self, driver: FakeCuda | None = None) -> None:
        self.driver = driver or FakeCuda()
        self.backend = CheckedBackend(library(), self.driver)
        self.captures = self.replays = 0
        self.views = Views()
        self._stream, self._event = self.driver.stream(0), self.driver.event(0)

    @property
    def launches(self) -> list[str]:
        return self.backend.launches

    def prepare(self, variants: list[Variant]) -> None:
        """All are built."""

    def memory(self, size_bytes: int) -> Tensor:
        """Device memory for a store of this process's own."""
        return _bytes_at(self.driver.allocate(0, size_bytes), size_bytes)

    def view(self, pool: ImportedPool) -> Tensor:
        return self.views.add(_bytes_at(pool.address, pool.size_bytes), pool)

    def stream(self) -> int:
        return self._stream

    def arrived(self, follow: Callable[[int], None]) -> None:
        follow(self._stream)
        self.settle()  # what is queued there next is done at once

    def upload(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array.copy())

    def settle(self) -> None:
        self.driver.record(0, self._stream, self._event)
        self.driver.wait(0, self._event)

    def bring(self, tensor: Tensor) -> Tensor:
        self.settle()
        return tensor.clone()

    def copier(self, slots: SlotSpace, sources: NDArray[np.uint32], targets: NDArray[np.uint32], stream: int) -> Copy | None:
        """What it queues is run by the kernel, and when the driver says so."""
        blocks = sources.copy(), targets.copy()

        def copy(first: int, size_bytes: int) -> None:
            at = [[slots.arenas[entry >> ARENA_SHIFT] + (entry % (1 << ARENA_SHIFT)) * UNIT_BYTES + first for entry in each.tolist()]
                  for each in blocks]  # fmt: skip
            copies = [(to, of, size_bytes) for of, to in zip(*at, strict=True)]
            run = partial(copy_pieces, self.backend.aside, slots, (first, size_bytes), *blocks)
            self.driver.launch(0, stream, copies, run)

        return copy

    def capture(self, work: Callable[[], Tensor]) -> tuple[Recorded, Tensor]:
        work()
        self.captures += 1
        self.backend.begin(recorded=None)
        try:
            with mock.patch("transformers.masking_utils.is_tracing", return_value=True), cast(Any, _Strict)():
                out = work()
        finally:
            launches = self.backend.end()
        out.fill_(float("nan"))
        return Recorded(self, work, out, launches), out

    def close(self) -> None:
        self.driver.close_event(0, self._event)
        self.driver.close_stream(0, self._stream)


class Recorded:
    """A graph: the work, what it launched when it was captured, and where its result goes."""

    def __init__(self, gpu: FakeGpu, work: Callable[[], Tensor], out: Tensor, launches: list[bytes]) -> None:
        self._gpu, self._out, self._launches = gpu, out, launches
        self._work: Callable[[], Tensor] | None = work

    def replay(self) -> None:
        if self._work is None:
            raise Violation("a graph replayed after it was let go")
        self._gpu.replays += 1
        self._gpu.backend.begin(self._launches)
        self._out.copy_(self._work())
        self._gpu.backend.end()

    def close(self) -> None:
        self._work = None


class CheckedBackend(HostBackend):
    """The host shim, on memory that the driver says is mapped; while something is captured it launches nothing."""

    def __init__(self, path: Path, driver: FakeCuda) -> None:
        super().__init__(path)
        self.launches: list[str] = []
        self._one_at_a_time = threading.Lock()
        self.aside = Aside(path, self._one_at_a_time)
        self._driver = driver
        self._noted: list[bytes] | None = None
        self._wanted: list[bytes] | None = None

    def begin(self, recorded: list[bytes] | None) -> None:
        """From now on launches are noted: without a recording instead of being run, else to be the same ones."""
        self._noted, self._wanted = [], recorded

    def end(self) -> list[bytes]:
        """What was noted."""
        noted, self._noted = self._noted or [], None
        if self._wanted is not None and len(noted) != len(self._wanted):
            raise Violation(f"a replay launches {len(noted)} kernels, {len(self._wanted)} were recorded")
        return noted

    def launch(self, variant: Variant, grid: tuple[int, int, int], shared_bytes: int, args: ctypes.Structure) -> None:
        for side in (args.source, args.target) if hasattr(args, "target") else (args,):
            for address in side.slots.arena:
                if address:
                    self._driver._mappings.check_access(address, 1)
        if self._noted is not None:
            self._noted.append(repr((variant.name, grid, shared_bytes)).encode() + _baked(args))
            if self._wanted is None:
                return
            if self._noted[-1] != self._wanted[len(self._noted) - 1]:
                raise Violation(f"{variant.name} is replayed with other arguments than it was recorded with")
        self.launches.append(variant.name)
        with self._one_at_a_time:
            super().launch(variant, grid, shared_bytes, args)


class Aside(HostBackend):
    """For what other streams run, in whichever thread waits for it."""

    def __init__(self, path: Path, one_at_a_time: threading.Lock) -> None:
        super().__init__(path)
        self.launches = 0
        self._one_at_a_time = one_at_a_time

    def launch(self, variant: Variant, grid: tuple[int, int, int], shared_bytes: int, args: ctypes.Structure) -> None:
        with self._one_at_a_time:
            self.launches += 1
            super().launch(variant, grid, shared_bytes, args)


class _Strict(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what waits for the device, or brings numbers there, as a capture does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        if name in REFUSED:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        return func(*args, **(kwargs or {}))


def _baked(args: ctypes.Structure) -> bytes:
    """The arguments that a graph keeps as they are."""
    copy = type(args).from_buffer_copy(args)
    for name in TEMPORARY:
        if hasattr(copy, name):
            field = getattr(type(copy), name)
            ctypes.memset(ctypes.addressof(copy) + field.offset, 0, field.size)
    return bytes(copy)


def _bytes_at(address: int, size_bytes: int) -> Tensor:
    return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address)))
