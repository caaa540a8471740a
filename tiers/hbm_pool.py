"""The memory that the hbm tier keeps blocks in: one range of one GPU, that other processes can map."""

from __future__ import annotations

import os
import socket

from kvstore.config import format_bytes
from kvstore.errors import ConfigError
from kvstore.kernels.driver import OUT_OF_MEMORY, CudaDriver, CudaError
from kvstore.kernels.sharing import Kind, Offer, send_offer

LEFT_FREE_BYTES = 512 << 20  # bytes of a GPU that are never asked for: contexts of this and of other processes need them


class TooLittleMemory(ConfigError):
    """A GPU has less memory free than asked for."""


class DevicePool:
    """Owned by the daemon. `kind` says how it is shared; `note` why not as a descriptor, where it is not.

    Raises TooLittleMemory where the GPU has less free than asked for. `close` gives it back: nothing may be in flight there. Importers of
    a descriptor keep the memory; importers of an IPC handle must have stopped.
    """

    def __init__(self, driver: CudaDriver, device: int, size_bytes: int) -> None:
        self.driver, self.device = driver, device
        facts = driver.facts(device)
        self.uuid = driver.uuid(device)
        self.size_bytes = -(-size_bytes // facts.granularity_bytes) * facts.granularity_bytes
        if self.size_bytes > facts.free_bytes - LEFT_FREE_BYTES:
            raise TooLittleMemory(_too_little(device, facts.name, self.size_bytes, facts.free_bytes))
        self.kind: Kind = "descriptor"
        self.note = "" if facts.descriptors else "its driver cannot share memory as descriptors"
        self._handle, self._descriptor, self._ipc = 0, -1, b""
        self.address = 0
        try:
            if facts.descriptors:
                self.note = self._take_shareable()
            if self.note:
                self.kind = "ipc"
                self._take_plain()
        except CudaError as error:
            if error.status == OUT_OF_MEMORY:
                raise TooLittleMemory(_too_little(device, facts.name, self.size_bytes, facts.free_bytes)) from error
            raise
        self._open = True

    def offer(self, connection: socket.socket) -> None:
        """Send a process what it needs to map the pool. Raises OSError where that process is gone."""
        descriptor = self._descriptor if self.kind == "descriptor" else None
        send_offer(connection, Offer(self.uuid, self.size_bytes, self.kind, self._ipc.hex()), descriptor)

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        if not self._open:
            return
        self._open = False
        if self.kind == "ipc":
            self.driver.free(self.device, self.address)
            return
        os.close(self._descriptor)
        self.driver.unmap(self.device, self.address, self.size_bytes)
        self.driver.release(self.device, self._handle)

    def _take_shareable(self) -> str:
        """Memory with a descriptor; "" or what the driver refused, with nothing left behind. Running out of memory is an error."""
        handle = address = 0
        try:
            handle = self.driver.create(self.device, self.size_bytes)
            address = self.driver.map(self.device, handle, self.size_bytes)
            self._descriptor = self.driver.export_descriptor(self.device, handle)
        except CudaError as error:
            if address:
                self.driver.unmap(self.device, address, self.size_bytes)
            if handle:
                self.driver.release(self.device, handle)
            if error.status == OUT_OF_MEMORY:
                raise
            return str(error)
        self._handle, self.address = handle, address
        return ""

    def _take_plain(self) -> None:
        address = self.driver.allocate(self.device, self.size_bytes)
        try:
            self._ipc = self.driver.export_ipc(self.device, address)
        except CudaError:
            self.driver.free(self.device, address)
            raise
        self.address = address


def _too_little(device: int, name: str, size_bytes: int, free_bytes: int) -> str:
    asked, free = format_bytes(size_bytes), format_bytes(free_bytes)
    return f"hbm: {asked} asked of GPU {device} ({name}), {free} are free; keep fewer bytes there, or start before what else uses it"
