"""Why a block is not here, where many left at once and not each of them is told of."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.cache.core import Cache
from kvstore.cache.explaining import Reason
from kvstore.cache.leaving import evict_all
from kvstore.cache.messages import UNIT_BYTES, Attach, Commit, Hashes, NamespaceSpec, Release, Reserve, Reserved, Tier
from kvstore.cache.state import CacheSizes

COUNT = 6


@pytest.fixture
def cache() -> Cache:
    made = Cache(CacheSizes(64 * UNIT_BYTES, dram_extent_bytes=16 * UNIT_BYTES, index_blocks=400))
    made.dram_ready(64)
    made.open_namespace(NamespaceSpec("tenant", bytes(32), 1, UNIT_BYTES))
    made.attach(Attach(1, "tenant"), 0.0)
    return made


@pytest.fixture
def hashes(cache: Cache) -> Hashes:
    """A chain, stored block by block, which nobody holds."""
    chain = np.random.default_rng(0).integers(1, 2**63, (COUNT, 4)).astype("<u8")
    parents = np.concatenate([np.zeros((1, 4), "<u8"), chain[:-1]])
    for at in range(COUNT):
        got = cache.reserve(Reserve(1, 1 + at, 1, 1))
        assert isinstance(got, Reserved)
        cache.commit(Commit(1, 1 + at, 1, got.units, got.generations, chain[at : at + 1], parents[at : at + 1]))
        cache.release(Release(1, 1 + at))
    return chain


def test_blocks_that_were_evicted_in_any_order_are_told_as_evicted(cache: Cache, hashes: Hashes) -> None:
    state = cache.state
    slots = state.index.slot[Tier.DRAM][state.index.find(1, hashes)]
    evict_all(state, Tier.DRAM, slots[[2, 0, 1, 3, 4, 5]])  # as an extent has them, which another size takes
    assert [cache.why_missing(1, hashes, first) for first in range(COUNT)] == [Reason.EVICTED] * COUNT


def test_blocks_that_were_cleared_are_told_as_removed(cache: Cache, hashes: Hashes) -> None:
    cache.clear(1, (1,))
    assert [cache.why_missing(1, hashes, first) for first in range(COUNT)] == [Reason.REMOVED] * COUNT
    assert cache.why_missing(1, hashes + np.uint64(1), 0) is Reason.NOT_STORED
