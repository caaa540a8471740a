"""What runs kernels: a GPU through CuPy (`cuda.py`), or the host shim (`host.py`). Both are launched in the way of cuLaunchKernel."""

import ctypes
from typing import Any, Protocol

from numpy.typing import NDArray

from kvstore.kernels.variants import Variant


class Backend(Protocol):
    """One device. Not thread-safe: one thread launches."""

    on_device: bool  # whether arrays must lie in a GPU's memory
    multiprocessors: int  # how many run thread blocks at once

    def launch(self, variant: Variant, grid: tuple[int, int, int], shared_bytes: int, args: ctypes.Structure) -> None:
        """Start one kernel. On a GPU it is queued on the current stream; the arrays must stay until it is done there."""

    def upload(self, array: NDArray[Any]) -> Any:
        """A copy of an array in the device's memory."""

    def scratch(self, count: int) -> Any:
        """Uninitialised float32 [count] in the device's memory, freed in stream order."""
