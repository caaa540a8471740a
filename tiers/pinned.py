"""The dram arena pinned for the GPUs, so that copies between the two run by themselves and at the bus's speed.

In chunks, as the pages come: one call for all of a large arena would keep the driver's lock for seconds. If one fails, all are undone:
an arena pinned in part would be fast for some blocks and slow for others, with nothing to show which.
"""

from __future__ import annotations

import contextlib

import numpy as np
from numpy.typing import NDArray

from kvstore.config import format_bytes
from kvstore.errors import InvalidArgument
from kvstore.kernels.driver import CudaDriver, CudaError

CHUNK_BYTES = 1 << 30  # bytes pinned in one call: a tenth of a second or two
PAGE_BYTES = 4096  # bytes: what an address and a length must be multiples of


class PinnedArena:
    """Pins on construction; `note` says why not, where it could not be done. Every process pins its own mapping.

    One thread calls it. The memory must stay mapped until `close`, and nothing may be in flight to or from it then.
    """

    def __init__(self, driver: CudaDriver, device: int, memory: NDArray[np.uint8], chunk_bytes: int = CHUNK_BYTES) -> None:
        if memory.ctypes.data % PAGE_BYTES or memory.nbytes % PAGE_BYTES or chunk_bytes % PAGE_BYTES or chunk_bytes <= 0:
            where = f"{memory.nbytes} bytes at {memory.ctypes.data:#x} in chunks of {chunk_bytes}"
            raise InvalidArgument(f"{where} cannot be pinned; only whole pages can")
        self._driver, self._device, self._memory = driver, device, memory
        self._pinned: list[int] = []
        self.note = ""
        for start in range(0, memory.nbytes, chunk_bytes):
            address = memory.ctypes.data + start
            try:
                driver.pin(device, address, min(chunk_bytes, memory.nbytes - start))
            except CudaError as error:
                done = format_bytes(start)
                self.note = f"dram arena not pinned, copies to and from GPUs are slower: {error}, after {done}; raise the memlock limit"
                self.close()
                return
            self._pinned.append(address)

    @property
    def pinned(self) -> bool:
        """Whether all of it is."""
        return bool(self._pinned)

    def close(self) -> None:
        """Undo it. Idempotent."""
        while self._pinned:
            with contextlib.suppress(CudaError):  # a lost context has unpinned it
                self._driver.unpin(self._device, self._pinned.pop())
