"""A client of a daemon that is measured, with a namespace of opaque blocks of one size."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np

from kvstore.clients.client import KVClient
from kvstore.clients.handles import Namespace
from kvstore.geometry import Geometry
from kvstore.hashing import Identity, block_hash, block_hashes
from kvstore.testing.daemon import DaemonProcess

WRITE_DEADLINE_S = 120.0  # seconds for write-through to finish


class Bench:
    """A daemon, a client and a namespace of opaque blocks of one size."""

    def __init__(self, daemon: DaemonProcess, block_bytes: int, name: str) -> None:
        self.client = KVClient(daemon.address, name="bench")
        geometry = Geometry("mha", 1, 1, 1, 1, "uint8", 1, format="bench", opaque_block_bytes=block_bytes)
        self.space: Namespace = self.client.open_namespace(Identity(model="bench", revision=name, dtype="uint8"), geometry)

    def hashes(self, count: int, salt: int) -> bytes:
        """A chain of `count` blocks that no other salt gives."""
        root = block_hash(self.space.root, [salt])
        return block_hashes(root, np.arange(count), 1)

    def put(self, hashes: bytes, source: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Store the blocks of `source`, one after the other."""
        size = self.space.geometry.block_bytes
        with self.client.put(self.space, hashes) as put:
            put.write_all([source[at : at + size] for at in range(0, size * (len(hashes) // 32), size)])
        if put.stored * 32 != len(hashes):
            raise RuntimeError(f"{put.stored} of {len(hashes) // 32} blocks were stored: {set(put.names)}")

    def get(self, hashes: bytes, target: np.ndarray[Any, np.dtype[np.uint8]] | None) -> None:
        """Lease the blocks; copy them where a target is given."""
        size = self.space.geometry.block_bytes
        with self.client.get(self.space, hashes, timeout_s=60.0) as lease:
            if lease.blocks * 32 != len(hashes):
                raise RuntimeError(f"{lease.blocks} of {len(hashes) // 32} blocks were found")
            if target is not None:
                lease.copy_into([target[i * size : (i + 1) * size] for i in range(lease.blocks)])

    def wait_written(self, blocks: int, deadline_s: float = WRITE_DEADLINE_S) -> None:
        """Until so many blocks are on disk."""
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            tiers = {tier.tier: tier for tier in self.client.stats().tiers}
            if tiers["nvme"].blocks >= blocks:
                return
            time.sleep(0.004)
        raise RuntimeError(f"the blocks were not on disk after {deadline_s:.0f} s")


def wait_touched(daemon: DaemonProcess) -> None:
    """Until the arena's memory is taken: a first touch would be measured otherwise."""
    deadline = time.monotonic() + WRITE_DEADLINE_S
    while time.monotonic() < deadline:
        said = re.findall(r"dram: (\S+ \S+) of (\S+ \S+) touched", daemon.log())
        if said and said[-1][0] == said[-1][1]:
            return
        time.sleep(0.05)
    raise RuntimeError("the arena's memory was not taken in time")
