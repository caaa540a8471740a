"""Copies by the CUDA driver, waited for."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from kvstore.kernels.driver import CudaDriver, CudaError


def copy_and_wait(driver: CudaDriver, device: int, stream: int, copies: Sequence[tuple[int, int, int]]) -> None:
    """Queue copies (to, of, bytes), by addresses of host or GPU memory, and sleep until all have arrived.

    Raises CudaError where a copy cannot be made; what was queued before it has run even then, unless the GPU is lost: nothing runs there.
    """
    event = driver.event(device)
    try:
        try:
            for to, of, size_bytes in copies:
                driver.copy(device, stream, to, of, size_bytes)
        finally:  # also where the rest could not be: somebody gives the memory back now
            driver.record(device, stream, event)
            driver.wait(device, event)
    finally:
        with contextlib.suppress(CudaError):
            driver.close_event(device, event)
