"""The daemon's GPU memory in this process: mapped once, read and written in place."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError, InvalidArgument, Unavailable
from kvstore.kernels.driver import CudaDriver, CudaError
from kvstore.kernels.memcpy import copy_and_wait
from kvstore.kernels.sharing import ANSWER_S, Offer, receive_offer


class DeviceBytes:
    """Bytes in GPU memory that CuPy and torch take without a copy, as uint8 [size]; view them as what they hold.

    It keeps the mapping's object alive, not the mapping: after `ImportedPool.close` it must not be used.
    """

    def __init__(self, pool: ImportedPool, address: int, size_bytes: int) -> None:
        self.address = address  # for the driver
        self._pool = pool
        self.__cuda_array_interface__: dict[str, Any] = {
            "data": (address, False),
            "shape": (size_bytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


class ImportedPool:
    """A pool of the daemon, mapped. `device` is the GPU's number in this process.

    outlives_owner   whether the memory stays when the daemon goes. If not, `owner_ended` must be called then, and the pool is closed.
    """

    def __init__(self, driver: CudaDriver, path: Path) -> None:
        """Raises Unavailable where the daemon offers none, ConfigError where this process does not see that GPU."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_S)
            try:
                connection.connect(str(path))
            except OSError as error:
                raise Unavailable(f"{path}: {error}; the daemon keeps no blocks on this GPU, or is not running") from error
            offer, descriptor = receive_offer(connection)
        self._driver, self.size_bytes = driver, offer.size_bytes
        self.outlives_owner = offer.kind == "descriptor"
        self._handle = 0
        try:
            self.device = _number(driver, offer.uuid)
            self.address = self._mapped(offer, descriptor)
        except CudaError as error:
            raise Unavailable(f"the daemon's GPU memory cannot be mapped: {error}") from error
        finally:
            if descriptor is not None:
                os.close(descriptor)
        self._open = True

    def view(self, offset_bytes: int, size_bytes: int) -> DeviceBytes:
        """Part of the pool. Raises InvalidArgument outside of it, Unavailable once it is closed."""
        if not self._open:
            raise Unavailable("the daemon's GPU memory is not mapped any more; attach again")
        if offset_bytes < 0 or size_bytes <= 0 or offset_bytes + size_bytes > self.size_bytes:
            raise InvalidArgument(f"{size_bytes} bytes at {offset_bytes} are not in a pool of {self.size_bytes}")
        return DeviceBytes(self, self.address + offset_bytes, size_bytes)

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Make copies (to, of, bytes), by addresses of host or GPU memory, and sleep until all have arrived.

        What fills the sources must have run. Raises CudaError where a copy cannot be made; none is in flight then, or the GPU is lost.
        """
        driver, device = self._driver, self.device
        stream = driver.stream(device)
        try:
            copy_and_wait(driver, device, stream, copies)
        finally:
            with contextlib.suppress(CudaError):
                driver.close_stream(device, stream)

    @property
    def is_open(self) -> bool:
        """Whether it is mapped."""
        return self._open

    def owner_ended(self) -> None:
        """The daemon is gone: memory that went with it is closed, memory that did not stays."""
        if not self.outlives_owner:
            self.close()

    def close(self) -> None:
        """Unmap. Nothing may be in flight there, and no view may be used after. Idempotent."""
        if not self._open:
            return
        self._open = False
        if self.outlives_owner:
            self._driver.unmap(self.device, self.address, self.size_bytes)
            self._driver.release(self.device, self._handle)
        else:
            self._driver.close_ipc(self.device, self.address)

    def _mapped(self, offer: Offer, descriptor: int | None) -> int:
        if descriptor is None:
            return self._driver.open_ipc(self.device, bytes.fromhex(offer.handle))
        self._handle = self._driver.import_descriptor(self.device, descriptor)
        try:
            return self._driver.map(self.device, self._handle, self.size_bytes)
        except CudaError:
            self._driver.release(self.device, self._handle)
            raise


def _number(driver: CudaDriver, uuid: str) -> int:
    """The number that this process has for a GPU."""
    for device in range(driver.devices()):
        if driver.uuid(device) == uuid:
            return device
    raise ConfigError(f"this process does not see the GPU {uuid} that the daemon keeps blocks on; check CUDA_VISIBLE_DEVICES")
