"""A real GPU for the worker: torch computes, CuPy compiles and launches the kernels, both on torch's current stream.

Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvstore.clients.hbm import ImportedPool
from kvstore.clients.promotion import Copy
from kvstore.errors import ConfigError
from kvstore.kernels.arrays import describe
from kvstore.kernels.copying import copy_pieces
from kvstore.kernels.cuda import CudaBackend
from kvstore.kernels.driver import CudaDriver, CudaError, LibCuda
from kvstore.kernels.layout import SlotSpace
from kvstore.kernels.variants import Variant
from kvstore.worker.gpu.device import Graph, Views

LAUNCH_FAILED = 719  # status: CUDA_ERROR_LAUNCH_FAILED
WARM_UPS = 2  # passes before a capture, as torch asks: libraries take their workspaces in the first


class TorchBackend(CudaBackend):
    """Launches on torch's current stream, with scratch memory of torch's, which a capture may take too."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device.index or 0)
        self._torch = device

    def stream(self) -> int:
        """See `CudaBackend`."""
        return int(torch.cuda.current_stream(self._torch).cuda_stream)

    def scratch(self, count: int) -> Any:
        """See `Backend`."""
        return torch.empty(count, dtype=torch.float32, device=self._torch)


class CudaGpu:
    """See `Gpu`. Raises ConfigError where torch, CuPy or the driver sees no such GPU, or it is too old."""

    def __init__(self, number: int = 0) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("torch sees no GPU; install its build for CUDA, see nvidia-smi, or use --device cpu")
        self.number, self.device = number, torch.device("cuda", number)
        self.backend = TorchBackend(self.device)
        self.driver: CudaDriver = LibCuda()
        self.views = Views()
        self._aside = cast(Any, torch.cuda.Stream)(self.device)
        # Whether a kernel reads pinned host memory at the host's own addresses.
        self._reads_host = bool(self.backend.device.attributes["CanUseHostPointerForRegisteredMem"])

    def prepare(self, variants: list[Variant]) -> None:
        """See `Gpu`."""
        self.backend.prepare(variants)

    def view(self, pool: ImportedPool) -> Tensor:
        """See `Gpu`."""
        return self.views.add(torch.as_tensor(pool.view(0, pool.size_bytes), device=self.device), pool)

    def stream(self) -> int:
        """See `Gpu`."""
        return self.backend.stream()

    def arrived(self, follow: Callable[[int], None]) -> None:
        """See `Gpu`."""
        follow(self.stream())

    def upload(self, array: NDArray[Any]) -> Tensor:
        """See `Gpu`."""
        return torch.from_numpy(array).to(self.device)

    def settle(self) -> None:
        """See `Gpu`."""
        torch.cuda.current_stream(self.device).synchronize()

    def bring(self, tensor: Tensor) -> Tensor:
        """See `Gpu`."""
        return tensor.cpu()

    def copier(self, slots: SlotSpace, sources: NDArray[np.uint32], targets: NDArray[np.uint32], stream: int) -> Copy | None:
        """See `Gpu`."""
        if not self._reads_host:
            return None
        queue = cast(Any, torch.cuda.ExternalStream)(stream, device=self.device)
        with torch.cuda.stream(self._aside):  # a copy from memory that is not pinned has arrived when it returns
            blocks = torch.from_numpy(np.stack((sources, targets)).view(np.int32)).to(self.device)

        def copy(first: int, size_bytes: int) -> None:
            try:
                with torch.cuda.stream(queue):
                    copy_pieces(self.backend, slots, (first, size_bytes), describe(blocks[0], "uint32"), describe(blocks[1], "uint32"))
            except RuntimeError as error:  # CuPy's
                raise CudaError("block_copy", LAUNCH_FAILED, str(error)) from error

        return copy

    def capture(self, work: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        """See `Gpu`."""
        aside = cast(Any, torch.cuda.Stream)(self.device)
        present = torch.cuda.current_stream(self.device)
        aside.wait_stream(present)
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                work()
        present.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process go on asking the driver for things, which a capture of the whole process would refuse.
        with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
            logits = work()
        return _Captured(graph), logits


class _Captured:
    """See `Graph`."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph

    def replay(self) -> None:
        if self._graph is None:
            raise ConfigError("a graph is replayed after it was let go")
        self._graph.replay()

    def close(self) -> None:
        self._graph = None
