"""Mooncake Store through shared memory: a master, a process that owns the memory, and a client that shares it. Run by driver.py."""

from __future__ import annotations

import ctypes
import hashlib
import os
import time
from importlib.metadata import version
from typing import Any

import numpy as np
from mooncake.store import MooncakeDistributedStore

SEGMENT_FACTOR = 1.25  # times the bytes that are stored at once: the allocator's rounding, and some air below its mark for eviction
OWNER_THREADS = 2  # threads of the process that owns the memory: as many as copy in the others


class Mooncake:
    """The caller's buffer lies in memory that the owner has mapped too, so a put and a get are one copy each."""

    def __init__(self, work: dict[str, Any], servers: Any) -> None:
        self._blocks, self._block_bytes = work["blocks"], work["block_bytes"]
        size_bytes = self._blocks * self._block_bytes
        master, owner, metrics = servers.free_port(), servers.free_port(), servers.free_port()
        flags = ["--rpc_address=127.0.0.1", f"--rpc_port={master}", "--metrics_host=127.0.0.1", f"--metrics_port={metrics}"]
        libraries = {"LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")}
        servers.start([servers.program("mooncake_master"), *flags], lambda: servers.listens(master), libraries)
        segment = int(size_bytes * SEGMENT_FACTOR) + (64 << 20)
        flags = ["--host=127.0.0.1", f"--port={owner}", f"--master_server_address=127.0.0.1:{master}", "--metadata_server=P2PHANDSHAKE"]
        flags += ["--protocol=tcp", f"--global_segment_size={segment}", f"--threads={OWNER_THREADS}"]
        servers.start([servers.program("mooncake_client"), *flags], lambda: servers.listens(owner), libraries)
        self._store = MooncakeDistributedStore()
        status = self._store.setup_dummy(size_bytes + (16 << 20), 16 << 20, f"127.0.0.1:{owner}")
        if status:
            raise RuntimeError(f"setup_dummy gave status {status}")
        self._base = self._store.alloc_from_mem_pool(size_bytes)
        if not self._base or self._store.register_buffer(self._base, size_bytes):
            raise RuntimeError("no memory for the buffer that the owner can map")
        self._buffer = np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(self._base))
        self._buffer[:] = np.frombuffer(np.random.default_rng(1).bytes(size_bytes), np.uint8)

    def about(self) -> dict[str, str]:
        return {
            "version": f"mooncake {version('mooncake-transfer-engine-non-cuda')}",
            "how": f"shared memory of a mooncake_client with {OWNER_THREADS} threads, batch_put_from and batch_get_into",
        }

    def _objects(self, turn: int, per_object: int) -> tuple[list[str], list[int], list[int]]:
        size, firsts = per_object * self._block_bytes, range(0, self._blocks, per_object)
        return (
            [f"{turn}/{per_object}/{first}" for first in firsts],
            [self._base + first * self._block_bytes for first in firsts],
            [size] * len(firsts),
        )

    def store(self, turn: int, per_object: int) -> float:
        keys, addresses, sizes = self._objects(turn, per_object)
        began = time.perf_counter()
        statuses = self._store.batch_put_from(keys, addresses, sizes)
        seconds = time.perf_counter() - began
        if any(statuses):
            raise RuntimeError(f"batch_put_from gave statuses {sorted(set(statuses))}")
        return seconds

    def retrieve(self, turn: int, per_object: int, *, into_buffer: bool) -> float:
        keys, addresses, sizes = self._objects(turn, per_object)
        began = time.perf_counter()
        gotten = self._store.batch_get_into(keys, addresses, sizes)
        seconds = time.perf_counter() - began
        if gotten != sizes:
            raise RuntimeError(f"batch_get_into gave {sorted(set(gotten) - set(sizes))} for some objects")
        return seconds

    def lookup(self, turn: int, per_object: int) -> tuple[float, int]:
        keys, _, _ = self._objects(turn, per_object)
        began = time.perf_counter()
        found = self._store.batch_is_exist(keys)
        return time.perf_counter() - began, sum(each == 1 for each in found) * per_object

    def digest(self) -> str:
        return hashlib.sha256(self._buffer.data).hexdigest()

    def wipe(self) -> None:
        self._buffer[:] = 0

    def clear(self) -> None:
        if self._store.remove_all(True) < 0:
            raise RuntimeError("remove_all failed")

    def close(self) -> None:
        self._store.close()


def open_peer(work: dict[str, Any], servers: Any) -> Mooncake:
    """Master, owner and client."""
    return Mooncake(work, servers)
