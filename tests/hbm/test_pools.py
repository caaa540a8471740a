"""The pools' book-keeping with a clock of the test's own."""

from __future__ import annotations

from pathlib import Path

from kvstore.cache.messages import Attach, NamespaceSpec, Reserve, Reserved
from kvstore.daemon.pools import GONE_S, GpuPool, Pools, core_of
from kvstore.geometry import UNIT_BYTES
from kvstore.testing.fake_cuda import FakeCuda
from kvstore.tiers.hbm import HbmOptions, HbmTier

SLOTS = 3


def test_what_a_dead_process_held_is_free_only_when_what_it_had_queued_on_the_gpu_has_ended() -> None:
    driver = FakeCuda()
    tier = HbmTier(driver, HbmOptions(0, 4 << 20))
    pool = GpuPool(1, tier, Path("nowhere"), core_of(tier, "lru", 1, 8))
    pools = Pools([pool], lambda *_: None, lambda *_: None)
    pools.open(1, NamespaceSpec("tenant", b"digest", 1, UNIT_BYTES))
    pool.cache.attach(Attach(1, "tenant", own=True), 10.0)
    assert isinstance(pool.cache.reserve(Reserve(1, 1, 1, count=SLOTS)), Reserved)
    pools.session_ended(1, "its stream ended")
    pools.process_gone(1, 20.0)
    for now, held in [(20.0, SLOTS), (20.0 + 0.9 * GONE_S, SLOTS), (20.0 + 1.1 * GONE_S, 0)]:
        assert pools.collect(now) == []
        pools.settle()
        assert sum(figures.held_bytes for figures in pools.figures().values()) == held * UNIT_BYTES
    assert GONE_S >= 1.0, "a copy that was queued takes some time"
    tier.close()
    assert driver.leaks() == []
