"""What the worker asks of a GPU: memory as tensors, kernels on the stream that torch computes on, and graphs of what was queued there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvstore.clients.hbm import ImportedPool
from kvstore.clients.promotion import Copy
from kvstore.errors import Unavailable
from kvstore.kernels.backend import Backend
from kvstore.kernels.driver import CudaDriver
from kvstore.kernels.layout import SlotSpace
from kvstore.kernels.variants import Variant


class MemoryLost(Unavailable):
    """Blocks lay in memory that went with the daemon (a pool that is shared by plain CUDA IPC): what ran on them is to begin again."""


class Views:
    """Which mapped pools are seen as tensors. One thread adds, any asks."""

    def __init__(self) -> None:
        self._seen: list[tuple[Tensor, ImportedPool]] = []

    def add(self, memory: Tensor, pool: ImportedPool) -> Tensor:
        """This is how a pool is seen."""
        self._seen.append((memory, pool))  # one for each run of the daemon
        return memory

    def require(self, memory: Any) -> None:
        """Raises MemoryLost where this was a view of a pool that is mapped no more."""
        for tensor, pool in self._seen:
            if tensor is memory and not pool.is_open:
                raise MemoryLost("the daemon's GPU memory went with it, and blocks in it")


class Graph(Protocol):
    """What was captured. Its tensors stay where they were then."""

    def replay(self) -> None:
        """Queue it again. The memory that it was captured with must be mapped as it was."""

    def close(self) -> None:
        """Let it go. Idempotent."""


class Gpu(Protocol):
    """One GPU. The engine's thread calls it, but for `driver`, which any thread may use."""

    @property
    def number(self) -> int:
        """Of the GPU in this process, for torch, CuPy and the driver alike."""

    @property
    def device(self) -> torch.device:
        """As torch names it."""

    @property
    def driver(self) -> CudaDriver:
        """For what torch does not do."""

    @property
    def backend(self) -> Backend:
        """For the kernels, on the stream that torch computes on."""

    @property
    def views(self) -> Views:
        """The pools that `view` was given."""

    def prepare(self, variants: list[Variant]) -> None:
        """Have these kernels ready: a capture cannot compile."""

    def view(self, pool: ImportedPool) -> Tensor:
        """All of a mapped pool as uint8, without a copy. Must not be used once the pool is closed."""

    def stream(self) -> int:
        """The driver's handle of the stream that torch computes on."""

    def arrived(self, follow: Callable[[int], None]) -> None:
        """Have what is queued from now on wait as `follow` says, which is called with `stream()`. Does not wait itself."""

    def upload(self, array: NDArray[Any]) -> Tensor:
        """A copy of an array, in order with what is computed."""

    def settle(self) -> None:
        """Sleep until all that was queued has run."""

    def bring(self, tensor: Tensor) -> Tensor:
        """A copy in the host's memory; all that was queued before has run then."""

    def copier(self, slots: SlotSpace, sources: NDArray[np.uint32], targets: NDArray[np.uint32], stream: int) -> Copy | None:
        """What queues copies of bytes of these blocks on a stream of the driver's, one launch each. Any thread.

        sources, targets   [block] entries of `table_entries`; one of the arenas is pinned host memory
        None where kernels cannot read that here.
        """

    def capture(self, work: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        """Run `work`, then record it: the graph, and the tensor that each replay fills anew. Raises RuntimeError where it cannot be."""
