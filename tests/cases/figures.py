"""What a daemon says of itself, and waiting until it says something else."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from kvstore.clients.client import KVClient
from kvstore.clients.handles import Namespace
from kvstore.clients.put import Put
from kvstore.geometry import Geometry
from kvstore.proto import kvstore_pb2 as pb
from tests.blocks import each_hash, pattern

POLL_S = 0.01  # seconds between looks
LOOK_S = 0.1  # seconds that a look counts for at most: a machine that stands still for a while uses up nobody's patience
PATIENCE_S = 20.0  # seconds: far beyond what anything here takes on a loaded machine


def eventually(happened: Callable[[], bool], within_s: float = PATIENCE_S) -> bool:
    """Whether it becomes true in this time, of which no look uses more than LOOK_S."""
    looked_at = time.monotonic()
    while not happened():
        if within_s < 0:
            return False
        time.sleep(POLL_S)
        within_s -= min(time.monotonic() - looked_at, LOOK_S)
        looked_at = time.monotonic()
    return True


def tier(client: KVClient, name: str) -> pb.TierStats:
    """One tier's figures."""
    return next(each for each in client.stats().tiers if each.tier == name)


def all_on_disk(client: KVClient, blocks: int) -> bool:
    """Wait until the disk has so many blocks and nothing is under way."""
    return eventually(lambda: tier(client, "nvme").blocks == blocks and idle(client))


def settled(client: KVClient) -> bool:
    """Wait until nothing is on its way up or down, or waits to be, and nothing is being deleted."""
    return eventually(lambda: idle(client))


def idle(client: KVClient) -> bool:
    """Whether this is so now; by itself it stays so."""
    stats = client.stats()
    tiers = {each.tier: each for each in stats.tiers}
    return not (stats.waiting_writes or tiers["nvme"].held_bytes or tiers["dram"].class_bytes["filling"])


def nothing_held(client: KVClient, within_s: float = PATIENCE_S) -> bool:
    """Wait until nobody holds anything of memory, copies to the disk included."""
    return eventually(lambda: tier(client, "dram").held_bytes == 0, within_s)


def store(client: KVClient, namespace: Namespace, hashes: bytes, parent: bytes | None = None) -> Put:
    """Store a chain, each block with bytes of its own."""
    with client.put(namespace, hashes, parent) as put:
        for block in put.blocks:
            block.write(pattern(block.hash, namespace.geometry.block_bytes))
    return put


def store_each(client: KVClient, namespace: Namespace, hashes: bytes) -> int:
    """Store blocks each of which is a chain of its own; how many are there now."""
    return sum(store(client, namespace, key).stored for key in each_hash(hashes))


def read(client: KVClient, namespace: Namespace, hashes: bytes) -> int:
    """Read the leading blocks that are here, and check every byte of them."""
    with client.get(namespace, hashes) as lease:
        keys = each_hash(hashes)[: lease.blocks]
        size_bytes = namespace.geometry.block_bytes
        assert all(np.array_equal(view, pattern(key, size_bytes)) for view, key in zip(lease.views, keys, strict=True))
        return lease.blocks


def present(client: KVClient, namespace: Namespace, hashes: bytes) -> list[bool]:
    """Which blocks are here, each by itself."""
    return [client.lookup(namespace, key).blocks == 1 for key in each_hash(hashes)]


def opaque(block_bytes: int) -> Geometry:
    """A geometry with blocks of this size."""
    return Geometry("mha", 1, 1, 1, 1, "uint8", 16, format="test", opaque_block_bytes=block_bytes)




def private_bytes(pid: int) -> int:
    """A process's resident memory without what it shares: for a daemon, all beyond its arenas."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        sizes = dict(line.split(":", 1) for line in file)
    return sum(int(sizes[name].split()[0]) << 10 for name in ("RssAnon", "RssFile"))
