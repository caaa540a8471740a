"""What sets one eviction policy apart from another, on caches of a few blocks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from kvstore.cache.core import Cache
from kvstore.cache.eviction.s3fifo import S3Fifo
from kvstore.cache.messages import UNIT_BYTES, Acquire, Attach, Commit, Looked, NamespaceSpec, Release, Reserve, Reserved, unpack_hashes
from kvstore.cache.state import CacheSizes

BLOCK_TOKENS = 15_000  # tokens: two such blocks, and attention costs as much as the rest
ROOT = np.zeros((1, 4), np.uint64)


class Shelf:
    """A cache of so many blocks in dram, one client, and chains by name."""

    def __init__(self, eviction: str, blocks: int) -> None:
        size_bytes = blocks * UNIT_BYTES
        self.cache = Cache(CacheSizes(size_bytes, dram_extent_bytes=size_bytes, index_blocks=256, eviction=eviction, seed=1))
        self.cache.open_namespace(NamespaceSpec("t", bytes(32), 1, UNIT_BYTES, block_tokens=BLOCK_TOKENS))
        self.cache.attach(Attach(1, "t"), 0.0)
        self.lengths: dict[str, int] = {}

    def _hashes(self, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
        return unpack_hashes(b"".join(hashlib.sha256(f"{name}/{i}".encode()).digest() for i in range(self.lengths[name])))

    def put(self, name: str, blocks: int = 1) -> None:
        self.lengths[name] = blocks
        reserved = self.cache.reserve(Reserve(1, 1, 1, blocks))
        assert isinstance(reserved, Reserved)
        self.cache.commit(Commit(1, 1, 1, reserved.units, reserved.generations, self._hashes(name), ROOT))
        self.cache.release(Release(1, 1))
        self.cache.drain()

    def use(self, name: str, times: int = 1) -> None:
        for _ in range(times):
            self.cache.acquire(Acquire(1, 2, self._hashes(name), 1.0, 1), 0.0)
            self.cache.release(Release(1, 2))
            self.cache.drain()

    def has(self, names: Sequence[str]) -> list[int]:
        """How many leading blocks of each chain are here."""
        looked = [self.cache.lookup("t", 1, "", self._hashes(name)) for name in names]
        return [answer.blocks for answer in looked if isinstance(answer, Looked)]


def names(count: int, prefix: str = "n") -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


def test_lru_evicts_what_was_used_longest_ago() -> None:
    shelf = Shelf("lru", 3)
    for name in ("a", "b", "c"):
        shelf.put(name)
    shelf.use("a")
    shelf.put("d")
    assert shelf.has(["a", "b", "c", "d"]) == [1, 0, 1, 1]


def test_s3fifo_keeps_the_used_through_a_scan() -> None:
    """One scan through twice the cache: lru would lose everything."""
    shelf = Shelf("s3fifo", 20)
    for name in names(10, "hot"):
        shelf.put(name)
        shelf.use(name, 2)
    for name in names(40, "scan"):
        shelf.put(name)
    assert shelf.has(names(10, "hot")) == [1] * 10
    other = Shelf("lru", 20)
    for name in (*names(10, "hot"), *names(40, "scan")):
        other.put(name)
        other.use(name, 2)
    assert other.has(names(10, "hot")) == [0] * 10


def test_s3fifo_admits_a_block_that_comes_back_to_the_main_queue() -> None:
    shelf = Shelf("s3fifo", 20)
    for name in names(21):
        shelf.put(name)
    assert shelf.has(["n0"]) == [0]
    shelf.put("n0")
    for name in names(60, "scan"):
        shelf.put(name)
    assert shelf.has(["n0"]) == [1]


def test_s3fifo_lets_go_of_what_was_popular_once() -> None:
    shelf = Shelf("s3fifo", 20)
    for name in names(20, "old"):
        shelf.put(name)
        shelf.use(name, 3)
    for turn in range(6):
        for name in names(20, f"new{turn}"):
            shelf.put(name)
            shelf.use(name, 3)
    assert sum(shelf.has(names(20, "old"))) == 0


def test_s3fifo_counts_the_bytes_of_its_queues_right() -> None:
    shelf = Shelf("s3fifo", 20)
    for turn in range(5):
        for name in names(15, str(turn)):
            shelf.put(name)
            shelf.use(name, turn)
    (policy,) = shelf.cache.state.policies.values()
    assert isinstance(policy, S3Fifo)
    assert sum(policy._units) == shelf.cache.state.dram.blocks


def test_cost_keeps_the_end_of_a_long_prompt_over_a_short_one() -> None:
    for eviction, kept in (("cost", [4, 0]), ("lru", [3, 1])):
        shelf = Shelf(eviction, 6)
        shelf.put("long", 4)
        shelf.put("short")
        shelf.put("x")
        shelf.put("y")
        assert shelf.has(["long", "short"]) == kept, eviction


def test_cost_lets_go_of_a_long_prompt_that_nobody_uses() -> None:
    shelf = Shelf("cost", 6)
    shelf.put("long", 4)
    for name in names(60):
        shelf.put(name)
    assert shelf.has(["long"]) == [0]


def test_cost_keeps_what_is_used_more() -> None:
    shelf = Shelf("cost", 4)
    for name in ("a", "b", "c", "d"):
        shelf.put(name)
    shelf.use("a", 3)
    for name in ("b", "c", "d"):
        shelf.use(name)
    for name in names(3):
        shelf.put(name)
        shelf.use(name)
    assert shelf.has(["a", "b", "c", "d"]) == [1, 0, 0, 0]


def test_cost_prefers_small_blocks_of_equal_work() -> None:
    """Room for a third size is made of the extent whose blocks save least per byte."""
    extent = 4 * UNIT_BYTES
    cache = Cache(CacheSizes(2 * extent, dram_extent_bytes=extent, index_blocks=64, eviction="cost", seed=1))
    cache.attach(Attach(1, "t"), 0.0)
    for namespace, units in ((1, 1), (2, 4), (3, 2)):
        assert cache.open_namespace(NamespaceSpec("t", bytes([namespace]) * 32, units, UNIT_BYTES, block_tokens=16)) == namespace
        reserved = cache.reserve(Reserve(1, 1, namespace, 1))
        assert isinstance(reserved, Reserved)
        key = unpack_hashes(bytes([namespace]) * 32)
        cache.commit(Commit(1, 1, namespace, reserved.units, reserved.generations, key, ROOT))
        cache.release(Release(1, 1))
    found = [cache.lookup("t", namespace, "", unpack_hashes(bytes([namespace]) * 32)) for namespace in (1, 2, 3)]
    assert [answer.blocks for answer in found if isinstance(answer, Looked)] == [1, 0, 1]
