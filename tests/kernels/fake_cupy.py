"""What the CUDA backend uses of CuPy, with the host shim in the driver's place.

Arrays are "device" arrays: they have a CUDA array interface and no other, so that whoever reads one without `get` fails. NVRTC is
the real one where it is installed: what is loaded is checked to be a program for the device's architecture.
"""

from __future__ import annotations

import ctypes
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

    def view(self, dtype: Any) -> DeviceArray:
        return DeviceArray(self._memory.view(dtype))

    def get(self) -> NDArray[Any]:
        """A copy in the host's memory."""
        return self._memory.copy()


class Device:
    """One GPU."""

    compute_capability = "90"
    attributes: dict[str, int] = {"MultiProcessorCount": 4}  # noqa: RUF012

    def __init__(self, number: int) -> None:
        self.number = number

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to give back."""


class FakeCuda:
    """What `importlib.import_module` is to give for "cupy"."""

    def __init__(self, library: Path, devices: int = 1) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.kv_last_error.restype = ctypes.c_char_p
        self._names: list[str] = []
        self._keep: list[Any] = []
        self.launches: list[str] = []
        self.driver = SimpleNamespace(moduleLoadData=self._load, moduleGetFunction=self._function, launchKernel=self._launch)
        runtime = SimpleNamespace(getDeviceCount=lambda: devices, free=lambda pointer: None)
        stream = SimpleNamespace(ptr=STREAM)
        cuda = SimpleNamespace(is_available=lambda: devices > 0, runtime=runtime, driver=self.driver, Device=Device)
        cuda.get_current_stream = lambda: stream
        self.cupy = SimpleNamespace(cuda=cuda, asarray=self._upload, empty=lambda count, dtype: self._upload(np.full(count, np.nan, dtype)))

    def modules(self, real: Callable[[str], Any]) -> Callable[[str], Any]:
        """What stands for importlib.import_module."""
        return lambda name: self.cupy if name == "cupy" else real(name)

    def _upload(self, array: NDArray[Any]) -> DeviceArray:
        self._keep.append(array.copy())
        return DeviceArray(self._keep[-1])

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
