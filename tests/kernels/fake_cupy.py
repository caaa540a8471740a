"""What the CUDA backend uses of CuPy, with the host shim in the driver's place.

Arrays are "device" arrays: they have a CUDA array interface and no other, so that whoever reads one without `get` fails. NVRTC is
the real one where it is installed: what is loaded is checked to be a program for the device's architecture.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InternalFault
from kvstore.kernels.cuda import Compiled
from kvstore.kernels.variants import Variant

THREADS = {"x": 1024, "y": 1024, "z": 64}  # the most of a thread block along each side
GRID = (2**31 - 1, 65_535, 65_535)  # the most thread blocks of a launch along each side
SHARED_BYTES = 48 << 10  # of a thread block, without asking for more
MEMORY_BYTES = 8 << 20  # that are free on the device
STREAM = 0x5EED  # the current stream's handle


class DeviceArray:
    """An array that only the fake device can read."""

    def __init__(self, memory: NDArray[Any]) -> None:
        self._memory = memory

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return dict(self._memory.__array_interface__)

    def __getitem__(self, at: Any) -> DeviceArray:
        return DeviceArray(self._memory[at])

    def __setitem__(self, at: Any, value: DeviceArray) -> None:
        self._memory[at] = value._memory

    def reshape(self, *shape: int) -> DeviceArray:
        return DeviceArray(self._memory.reshape(*shape))

    def view(self, dtype: Any) -> DeviceArray:
        return DeviceArray(self._memory.view(dtype))

    def get(self) -> NDArray[Any]:
        """A copy in the host's memory."""
        return self._memory.copy()


class Device:
    """One GPU."""

    compute_capability = "90"
    attributes: dict[str, int] = {"MultiProcessorCount": 4, "ClockRate": 1_000_000, "L2CacheSize": 1 << 16}  # noqa: RUF012
    mem_info = (MEMORY_BYTES, 2 * MEMORY_BYTES)

    def __init__(self, number: int) -> None:
        self.number = number

    def synchronize(self) -> None:
        """All work is done at once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to give back."""


class Stream:
    """Work on it is done at once; a graph that is captured on it does nothing more when it is launched."""

    ptr = STREAM

    def __init__(self, non_blocking: bool = False) -> None:
        self.capturing = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to give back."""

    def begin_capture(self) -> None:
        if self.capturing:
            raise InternalFault("a capture within a capture")
        self.capturing = True

    def end_capture(self) -> Stream:
        self.capturing = False
        return self

    def launch(self, stream: Stream) -> None:
        if stream.capturing:
            raise InternalFault("a graph launched while another is captured")


class Event:
    """A point in time."""

    def __init__(self) -> None:
        self.at = 0.0

    def record(self, stream: Stream) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        if not self.at:
            raise InternalFault("an event that was not recorded is waited for")


class FakeCuda:
    """What `importlib.import_module` is to give for "cupy"."""

    def __init__(self, library: Path, devices: int = 1) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.kv_last_error.restype = ctypes.c_char_p
        self._names: list[str] = []
        self._keep: list[Any] = []
        self.launches: list[str] = []
        self.driver = SimpleNamespace(moduleLoadData=self._load, moduleGetFunction=self._function, launchKernel=self._launch)
        runtime = SimpleNamespace(getDeviceCount=lambda: devices, free=lambda pointer: None, memcpyDeviceToDevice=3)
        runtime.getDeviceProperties, runtime.memcpyAsync = lambda device: {"name": b"a fake"}, self._copy
        stream = Stream()
        cuda = SimpleNamespace(is_available=lambda: devices > 0, runtime=runtime, driver=self.driver, Device=Device)
        cuda.get_current_stream, cuda.Stream, cuda.Event = lambda: stream, Stream, Event
        cuda.get_elapsed_time = lambda first, last: (last.at - first.at) * 1e3 + 1e-3
        self.cupy = SimpleNamespace(cuda=cuda, asarray=self._upload, zeros=lambda shape, dtype: self._upload(np.zeros(shape, dtype)))
        self.cupy.empty = lambda shape, dtype: self._upload(np.full(shape, 0xFF, np.uint8 if dtype == "uint8" else dtype))

    def modules(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """What stands for importlib.import_module."""
        return lambda name, package=None: self.cupy if name == "cupy" else real(name, package)

    def _upload(self, array: NDArray[Any]) -> DeviceArray:
        self._keep.append(array.copy())
        return DeviceArray(self._keep[-1])

    def _copy(self, to: int, of: int, size: int, kind: int, stream: int) -> None:
        if kind != self.cupy.cuda.runtime.memcpyDeviceToDevice or stream != STREAM:
            raise InternalFault(f"a copy of kind {kind} on stream {stream:#x}")
        ctypes.memmove(to, of, size)

    def _load(self, cubin: bytes) -> int:
        if not cubin.startswith(b"\x7fELF"):
            raise InternalFault("what is loaded is no program")
        return 1

    def _function(self, module: int, name: str) -> int:
        self._names.append(name)
        return len(self._names) - 1

    def _launch(self, function: int, *numbers: int) -> None:
        *sizes, shared, stream, pointers, extra = numbers
        grid, block = sizes[:3], sizes[3:]
        if stream != STREAM or extra or block[1:] != [1, 1] or not 0 < block[0] <= THREADS["x"] or shared > SHARED_BYTES:
            raise InternalFault(f"a launch of {block} threads with {shared} bytes on stream {stream:#x}")
        if any(not 0 < size <= most for size, most in zip(grid, GRID, strict=True)):
            raise InternalFault(f"a grid of {grid}")
        name = self._names[function]
        self.launches.append(name)
        entry = getattr(self._library, f"kv_launch_{name}")
        if entry((ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block), ctypes.c_uint(shared), ctypes.c_void_p(pointers)):
            raise InternalFault(self._library.kv_last_error().decode())


def not_compiled(variants: Sequence[Variant], capability: int) -> Compiled:
    """In place of compile_for where no NVRTC is installed."""
    return Compiled(b"\x7fELF", f"{len(variants)} kernels for sm_{capability}")
