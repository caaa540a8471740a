"""What the core must not let a client do: blocks that fit no extent, rings of parents, another's lease; and what waits must be hurried."""

from __future__ import annotations

import pytest

from kvstore.cache.core import Cache
from kvstore.cache.invariants import violations
from kvstore.cache.messages import (
    Abandon,
    Acquire,
    Attach,
    BlockOutcome,
    Commit,
    Committed,
    Done,
    NamespaceSpec,
    Priority,
    Recovered,
    Refused,
    Release,
    Reserve,
    Reserved,
    StartRead,
)
from tests.cache.test_recovery import found
from tests.cache.world import ROOT, SMALL, UNIT, World, chain, key_of, pack, sizes


def test_a_block_larger_than_any_tier_s_extent_is_refused() -> None:
    cache = Cache(sizes(dram_extent_bytes=8 * UNIT, nvme_extent_bytes=2 * UNIT))
    answer = cache.open_namespace(NamespaceSpec("default", bytes(32), 4, 4 * UNIT))
    assert isinstance(answer, Refused)
    assert "nvme" in answer.text


def test_parents_cannot_form_a_ring() -> None:
    cache = World(Cache(sizes(nvme_bytes=0))).cache
    cache.attach(Attach(1, "default"), 0.0)
    one, two = key_of((1,)), key_of((2,))
    outcomes = []
    for lease, (key, parent) in enumerate(((one, two), (two, one)), start=1):
        reserved = cache.reserve(Reserve(1, lease, 1, 1))
        assert isinstance(reserved, Reserved)
        committed = cache.commit(Commit(1, lease, 1, reserved.units, reserved.generations, pack([key]), pack([parent])))
        assert isinstance(committed, Committed)
        outcomes += committed.outcomes.tolist()
    assert outcomes == [BlockOutcome.STORED, BlockOutcome.BAD_KEY]
    assert violations(cache.state) == []


@pytest.mark.parametrize("many", [1, 3])
def test_a_slot_of_another_size_takes_no_block_of_a_namespace(many: int) -> None:
    """Reading it would run over into its neighbour."""
    cache = Cache(sizes())
    small, large = (cache.open_namespace(NamespaceSpec("default", bytes([n]) * 32, n, n * UNIT)) for n in (1, 2))
    assert isinstance(small, int)
    assert isinstance(large, int)
    cache.attach(Attach(1, "default"), 0.0)
    keys = pack(chain(tuple(range(many))))
    for reserved_in, namespace in ((small, large), (large, small)):
        reserved = cache.reserve(Reserve(1, 1, reserved_in, many))
        assert isinstance(reserved, Reserved)
        committed = cache.commit(Commit(1, namespace, namespace, reserved.units, reserved.generations, keys, pack([ROOT])))
        assert isinstance(committed, Committed)
        assert committed.outcomes.tolist() == [BlockOutcome.BAD_SLOT] * many
    assert cache.abandon(Abandon(1, 1)) == Done(2 * many)
    assert violations(cache.state) == []


def test_a_member_cannot_release_anothers_group_lease() -> None:
    cache = World(Cache(sizes())).cache
    for session in (1, 2):
        cache.attach(Attach(session, "default"), 0.0)
        assert cache.join_group(session, "model", (1, 3)) == Done(session)
    for namespace in (1, 3):
        reserved = cache.reserve(Reserve(1, 1, namespace, 1))
        assert isinstance(reserved, Reserved)
        cache.commit(Commit(1, 9, namespace, reserved.units, reserved.generations, pack(chain((0,))), pack([ROOT])))
        cache.release(Release(1, 9))
    cache.acquire(Acquire(1, 5, pack(chain((0,))), 9.0, group="model"), 0.0)
    cache.drain()
    assert cache.release(Release(2, 5)) == Done(0)
    assert cache.release(Release(1, 5)) == Done(1)


def test_a_guess_that_somebody_comes_to_wait_for_is_hurried() -> None:
    world = World(Cache(sizes()))
    keys = chain((0,))
    world.cache.recover(found(keys, [ROOT], [1], [0]))
    world.cache.attach(Attach(1, "default"), 0.0)
    assert world.cache.prefetch(1, pack(keys), 1.0) == (1, 0)
    world.cache.acquire(Acquire(1, 1, pack(keys), 7.0, 1), 0.0)
    reads = [decision for decision in world.cache.drain() if isinstance(decision, StartRead)]
    assert [(read.priority, read.deadline_at) for read in reads] == [(Priority.PREFETCH, 1.0), (Priority.DEMAND, 7.0)]
    assert len({read.transfer for read in reads}) == 1


def test_recovery_into_a_smaller_index_keeps_the_newest() -> None:
    cache = Cache(sizes(index_blocks=8))
    cache.open_namespace(NamespaceSpec("default", bytes(32), SMALL, UNIT))
    keys = [key_of((9, number)) for number in range(16)]
    oldest_first: Recovered = found(keys, [ROOT] * 16, [1] * 16, list(range(16)))
    kept = cache.recover(oldest_first)
    here = [cache.lookup("default", 1, "", pack([key])).blocks for key in keys]  # type: ignore[union-attr]
    assert 0 < kept < 16
    assert here == [0] * (16 - kept) + [1] * kept


def test_what_is_regained_must_fit_into_the_limit_that_is_asked() -> None:
    cache = World(Cache(sizes())).cache
    cache.attach(Attach(1, "default"), 0.0)
    cache.reserve(Reserve(1, 1, 1, 3))
    cache.session_lost(1, "end")
    small = cache.attach(Attach(2, "default", limit_bytes=2 * UNIT, resume=1), 0.0)
    assert isinstance(small, Refused)
    assert "limit" in small.text
    assert cache.attach(Attach(3, "default", limit_bytes=3 * UNIT, resume=1), 0.0) == Done()
    assert violations(cache.state) == []
