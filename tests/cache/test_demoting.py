"""Copies down to nvme that are never finished with are as bad as none."""

from __future__ import annotations

import pytest

from kvstore.cache.core import Cache
from kvstore.cache.messages import Acquire, Release, TransferResult
from tests.cache.world import World, chain, pack, sizes


@pytest.mark.parametrize("write", ["on_evict", "through"])
def test_an_idle_cache_with_little_disk_stops_writing(write: str) -> None:
    world = World(Cache(sizes(nvme_write=write, nvme_bytes=4 * sizes().dram_bytes // 16)))
    world.attach(0, 0, 0)
    client = world.clients[1]
    for number in range(6):
        world.reserve(client, 1, [], 1)
        world.commit(client, list(client.reserved), (number,), lease=number + 1)
        world.cache.release(Release(1, number + 1))
        client.leases.clear()
    assert _writes(world) < 60
    assert _writes(world) == 0, "nothing has happened since"
    world.cache.acquire(Acquire(1, 99, pack(chain((0,))), 9.0, 1), world.now)
    world.cache.release(Release(1, 99))
    assert _writes(world) < 60


def _writes(world: World) -> int:
    """Finish all that the cache would like to write, and say how many blocks that were; 1,000 at most."""
    count = idle = 0
    while idle < 3 and count < 1000:
        started = world.cache.next_writes(4)
        world.pending |= {each.transfer: each for each in started}
        world.step()
        for transfer in list(world.pending):
            world.finish(transfer, TransferResult.OK)
        idle = 0 if started else idle + 1
        count += len(started)
    return count
