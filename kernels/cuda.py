"""The kernels on a GPU: compiled by NVRTC for the device at hand when first needed, and queued on CuPy's current stream.

CuPy is imported only when something here is used. Not yet run on a GPU: the tests put a driver in its place that runs the host shim.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from kvstore.errors import ConfigError, InternalFault
from kvstore.kernels.variants import FOLDER, Variant, source_text

LEAST_CAPABILITY = 80  # sm version: what the sources need (bfloat16 conversions, loads that pass L1 by)
OPTIONS = ("--std=c++17", "--ptxas-options=-v", f"-I{FOLDER}")


@dataclass(frozen=True)
class Compiled:
    """A program for one architecture; `log` has the registers and spills of each kernel, as ptxas prints them."""

    cubin: bytes
    log: str


def compile_for(variants: Sequence[Variant], capability: int) -> Compiled:
    """Compile these kernels for sm_`capability` (90 for an H100). Needs no GPU.

    Raises ConfigError without CuPy or NVRTC, InternalFault where a source does not compile.
    """
    nvrtc = _cupy().cuda.nvrtc
    program = nvrtc.createProgram(source_text(variants), "kvstore.cu", [], [])
    try:
        nvrtc.compileProgram(program, [*OPTIONS, f"--gpu-architecture=sm_{capability}"])
        # CuPy leaves out the last byte, which is a zero: the driver does not mind, other readers of ELF do.
        return Compiled(nvrtc.getCUBIN(program) + b"\0", nvrtc.getProgramLog(program))
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise InternalFault(f"the kernels do not compile for sm_{capability}: {error}\n{log[-4000:]}") from error
    finally:
        nvrtc.destroyProgram(program)


class CudaBackend:
    """Launches on one GPU, on the stream that is CuPy's current one in the calling thread.

    Raises ConfigError where CuPy, a driver or a device of that number is missing, or the device is older than sm_80.
    """

    on_device = True

    def __init__(self, device: int = 0) -> None:
        self.cupy = _cupy()
        self._driver = self.cupy.cuda.driver
        if not self.cupy.cuda.is_available():
            raise ConfigError("no GPU was found: the NVIDIA driver is missing, too old, or sees no device; nvidia-smi says which")
        count = self.cupy.cuda.runtime.getDeviceCount()
        if not 0 <= device < count:
            raise ConfigError(f"GPU {device} is not there: the driver sees {count}; check CUDA_VISIBLE_DEVICES")
        self.device = self.cupy.cuda.Device(device)
        self.capability = int(self.device.compute_capability)
        if self.capability < LEAST_CAPABILITY:
            raise ConfigError(f"GPU {device} is sm_{self.capability}; the kernels need sm_{LEAST_CAPABILITY} or later")
        self.multiprocessors = int(self.device.attributes["MultiProcessorCount"])
        self._functions: dict[str, int] = {}
        self._loaded: list[int] = []  # modules: unloading one would take its functions along

    def prepare(self, variants: Sequence[Variant]) -> None:
        """Compile and load kernels ahead, in one program: before a graph is captured, or a benchmark begins."""
        missing = [variant for variant in variants if variant.name not in self._functions]
        if not missing:
            return
        with self.device:
            self.cupy.cuda.runtime.free(0)  # makes the device's context current in this thread
            module = self._driver.moduleLoadData(compile_for(missing, self.capability).cubin)
            self._loaded.append(module)
            for variant in missing:
                self._functions[variant.name] = self._driver.moduleGetFunction(module, variant.name)

    def launch(self, variant: Variant, grid: tuple[int, int, int], shared_bytes: int, args: ctypes.Structure) -> None:
        """Queue one kernel on the current stream. The driver copies the arguments; the arrays must stay until it has run."""
        self.prepare([variant])
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        with self.device:
            function, arguments = self._functions[variant.name], ctypes.addressof(pointers)
            self._driver.launchKernel(function, *grid, variant.threads, 1, 1, shared_bytes, self.stream(), arguments, 0)

    def stream(self) -> int:
        """The driver's handle of the stream that kernels are queued on."""
        return int(self.cupy.cuda.get_current_stream().ptr)

    def upload(self, array: NDArray[Any]) -> Any:
        """A copy of an array in this GPU's memory."""
        with self.device:
            return self.cupy.asarray(array)

    def scratch(self, count: int) -> Any:
        """Uninitialised float32 [count]; CuPy's pool hands it out again in stream order."""
        with self.device:
            return self.cupy.empty(count, "float32")


def _cupy() -> Any:
    try:
        return importlib.import_module("cupy")
    except (ImportError, RuntimeError, OSError) as error:
        raise ConfigError(f"CuPy cannot be loaded ({error}); install kvstore[cuda]") from error
