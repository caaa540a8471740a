"""The GPUs of a client: the pools that it asks the daemon for, each mapped once in a run of the daemon and closed when nothing uses it.

Any thread may call.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from kvstore.clients.copying import Buffer, address, checked
from kvstore.clients.handles import Attached
from kvstore.clients.hbm import DeviceBytes, ImportedPool
from kvstore.clients.pools import Pool, PoolTerms
from kvstore.errors import ConfigError, InvalidArgument, SessionEnded, Unavailable
from kvstore.geometry import UNIT_BYTES
from kvstore.kernels.arrays import describe, width
from kvstore.kernels.driver import CudaDriver, LibCuda


class MappedPool:
    """One pool as this process maps it. It is closed when it is retired and the last of its users has dropped it."""

    def __init__(self, pool: Pool, imported: ImportedPool) -> None:
        self.pool = pool
        self.imported = imported
        self._guard = threading.Lock()
        self._users = 0
        self._retired = False

    def hold(self) -> None:
        """One more user. Raises Unavailable where it is mapped no more."""
        with self._guard:
            if not self.imported.is_open:
                raise Unavailable("the daemon's GPU memory went with it; try again")
            self._users += 1

    def drop(self) -> None:
        """One less."""
        with self._guard:
            self._users -= 1
            self._close_if_done()

    def retire(self) -> None:
        """Nobody will hold it any more."""
        with self._guard:
            self._retired = True
            self._close_if_done()

    def views(self, units: NDArray[np.uint32], generations: NDArray[np.uint32], size_bytes: int) -> DeviceViews:
        """Slots of this pool."""
        return DeviceViews(self.imported, units, generations, size_bytes)

    def _close_if_done(self) -> None:
        if self._retired and self._users <= 0:
            self.imported.close()


class DeviceViews(Sequence[DeviceBytes]):
    """Blocks in a pool, each as bytes for CuPy and torch, made when it is asked for."""

    def __init__(self, memory: ImportedPool, units: NDArray[np.uint32], generations: NDArray[np.uint32], size_bytes: int) -> None:
        """units, generations [n]: the slots; generation 0 marks a block that the namespace does not keep, and that has no bytes."""
        self.memory, self.size_bytes = memory, size_bytes
        self._units, self._generations = units, generations

    def __len__(self) -> int:
        return len(self._units)

    @overload
    def __getitem__(self, which: int) -> DeviceBytes: ...
    @overload
    def __getitem__(self, which: slice) -> list[DeviceBytes]: ...
    def __getitem__(self, which: int | slice) -> DeviceBytes | list[DeviceBytes]:
        if isinstance(which, slice):
            return [self[each] for each in range(*which.indices(len(self)))]
        if not self._generations[which]:
            return DeviceBytes(self.memory, 0, 0)
        return self.memory.view(int(self._units[which]) * UNIT_BYTES, self.size_bytes)


class Gpus:
    """What a client uses of its GPUs' memory: nothing, where it names none."""

    def __init__(self, numbers: Sequence[int], driver: CudaDriver | None) -> None:
        """numbers   of the GPUs in this process;  driver  None finds the machine's.

        Raises ConfigError where there is none, or no such GPU.
        """
        self._driver = driver or (LibCuda() if numbers else None)
        self._uuids: dict[int, str] = {}
        self._mapped: dict[int, MappedPool] = {}
        self._told: dict[int, Attached] = {}  # whose end closes memory that goes with the daemon
        self._guard = threading.Lock()
        self._closed = False
        for number in numbers:
            if self._driver is None or not 0 <= number < self._driver.devices():
                raise ConfigError(f"GPU {number} is not there; check CUDA_VISIBLE_DEVICES, and nvidia-smi")
            self._uuids[number] = self._driver.uuid(number)

    def terms(self) -> list[PoolTerms]:
        """What a Hello asks for."""
        return [PoolTerms(uuid) for uuid in self._uuids.values()]

    def mapped(self, attached: Attached, number: int) -> MappedPool:
        """A GPU's pool under this session; hold it while it is used.

        Raises InvalidArgument for a GPU that this client was not made with, ConfigError where the daemon has no pool there.
        """
        if number not in self._uuids or self._driver is None:
            raise InvalidArgument(f"this client does not use the memory of GPU {number}; make it with gpus=[{number}]")
        pool = attached.session.pools.get(self._uuids[number])
        if pool is None:
            where = f"GPU {number} ({self._uuids[number]})"
            raise ConfigError(f"the daemon keeps no blocks on {where}; start it with --hbm, or leave `pool` out")
        with self._guard:
            if self._closed:
                raise SessionEnded("the client was closed; make a new one")
            found = self._mapped.get(number)
            if found is None or found.pool != pool or not found.imported.is_open:
                fresh = MappedPool(pool, ImportedPool(self._driver, Path(pool.socket_path)))
                self._mapped[number] = fresh
                self._told.pop(number, None)
                if found is not None:
                    found.retire()
                found = fresh
            if self._told.get(number) is not attached:
                self._told[number] = attached
                attached.imports(found.imported)
            return found

    def close(self) -> None:
        """Close what nothing uses, and the rest with its last use. Idempotent."""
        with self._guard:
            self._closed = True
            for each in self._mapped.values():
                each.retire()
            self._mapped.clear()


def place_of(buffer: Buffer, size_bytes: int, what: str, *, writable: bool) -> int:
    """Where a caller's buffer begins: host memory, or an array in a GPU's. Raises InvalidArgument for one of another size, or with gaps."""
    if not hasattr(buffer, "__cuda_array_interface__"):
        return address(checked(buffer, size_bytes, what, writable=writable))
    found = describe(buffer)
    found.require_dense(what, len(found.shape))
    if (given := math.prod(found.shape) * width(found.dtype)) != size_bytes:
        raise InvalidArgument(f"{what} has {given} bytes, a block {size_bytes}; give one of the same size")
    return found.address
