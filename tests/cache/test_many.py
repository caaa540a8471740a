"""What is done to many blocks at once is what is done to one: ends of sessions with many slots, clears in pieces, whole extents."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.cache.core import Cache
from kvstore.cache.invariants import violations
from kvstore.cache.messages import (
    Abandon,
    Attach,
    BlockOutcome,
    Commit,
    Committed,
    Done,
    Hashes,
    NamespaceSpec,
    Notice,
    NoticeKind,
    Refused,
    Release,
    Reserve,
    Reserved,
    Tier,
    pack_hashes,
    unpack_hashes,
)
from kvstore.cache.recovery import clear_piece
from kvstore.cache.state import CacheSizes

UNIT = 4096
SMALL, LARGE = 1, 2  # namespaces with slots of one and of two units
COUNT = 300  # slots: more than are handled one by one
random = np.random.default_rng(3)


def keys(count: int = COUNT) -> Hashes:
    return random.integers(1, 1 << 63, (count, 4), dtype=np.uint64)


@pytest.fixture
def cache() -> Cache:
    made = Cache(CacheSizes(2400 * UNIT, dram_extent_bytes=240 * UNIT, index_blocks=5000))
    made.open_namespace(NamespaceSpec("t", b"s" * 32, 1, UNIT))
    made.open_namespace(NamespaceSpec("t", b"l" * 32, 2, 2 * UNIT))
    made.attach(Attach(1, "t"), 0.0)
    return made


def reserve(cache: Cache) -> list[Reserved]:
    """Slots of both sizes, nameless and named."""
    nameless = [Reserve(1, 1, SMALL, COUNT), Reserve(1, 3, LARGE, COUNT)]
    named = [Reserve(1, 2, SMALL, hashes=keys()), Reserve(1, 4, LARGE, hashes=keys())]
    got = [cache.reserve(each) for each in (nameless[0], named[0], nameless[1], named[1])]
    assert all(isinstance(each, Reserved) and each.generations.all() for each in got)
    cache.drain()
    return got  # type: ignore[return-value]


def store(cache: Cache, namespace: int, count: int = COUNT, parent: bytes = bytes(32)) -> Hashes:
    hashes = keys(count)
    slots = cache.reserve(Reserve(1, 9, namespace, count))
    assert isinstance(slots, Reserved)
    done = cache.commit(Commit(1, 9, namespace, slots.units, slots.generations, hashes, unpack_hashes(parent)))
    assert isinstance(done, Committed)
    cache.release(Release(1, 9))
    cache.drain()
    return hashes


def nothing_is_held(cache: Cache) -> None:
    cache.drain()
    assert violations(cache.state) == []
    figures = cache.stats().tiers[Tier.DRAM]
    assert figures.held_bytes == 0
    assert figures.class_bytes["reserved"] == figures.class_bytes["orphaned"] == 0
    assert not cache.state.writer.any()
    assert cache.state.index.used == 0


def test_a_session_that_leaves_gives_all_its_slots_back(cache: Cache) -> None:
    reserve(cache)
    assert isinstance(cache.detach(1), Done)
    nothing_is_held(cache)


def test_a_lost_sessions_slots_are_orphans_until_its_process_is_gone(cache: Cache) -> None:
    reserve(cache)
    cache.session_lost(1, "its stream broke")
    cache.drain()
    assert violations(cache.state) == []
    assert not cache.state.writer.any(), "its keys are free at once"
    assert cache.stats().tiers[Tier.DRAM].class_bytes["orphaned"] == 2 * COUNT * (1 + 2) * UNIT
    cache.process_gone(1)
    nothing_is_held(cache)


def test_reservations_are_abandoned_whole_or_by_slot(cache: Cache) -> None:
    got = reserve(cache)
    assert cache.abandon(Abandon(1, 2)) == Done(COUNT)
    assert cache.abandon(Abandon(1, 3, got[2].units, got[2].generations + np.uint32(1))) == Done(0), "those of another tenure are not its"
    for at in (0, 2, 3):
        assert cache.abandon(Abandon(1, at + 1, got[at].units, got[at].generations)) == Done(COUNT)
    nothing_is_held(cache)


def test_a_clear_goes_on_in_pieces_and_takes_what_comes_meanwhile(cache: Cache) -> None:
    mine, others = store(cache, SMALL), store(cache, LARGE)
    start, blocks, pieces = 1, 0, 0
    while start:
        piece, start = clear_piece(cache.state, (SMALL,), start, most=64)
        told = [each for each in cache.drain() if isinstance(each, Notice) and each.kind is NoticeKind.REMOVED]
        assert sum(len(each.hashes) for each in told) == 32 * piece.blocks
        assert violations(cache.state) == []
        blocks, pieces = blocks + piece.blocks, pieces + 1
        if pieces == 2:
            late = store(cache, SMALL, 10)
    assert pieces > 5
    blocks += cache.clear(1, (SMALL,)).blocks
    assert blocks == COUNT + 10
    assert not cache.has(SMALL, mine).any()
    assert not cache.has(SMALL, late).any()
    assert cache.has(LARGE, others).all()


def test_a_clear_counts_only_what_is_in_no_other_core(cache: Cache) -> None:
    hashes = store(cache, SMALL)
    there = {each.tobytes() for each in hashes[:100]}
    piece, _ = clear_piece(cache.state, (SMALL,), 1, lambda _, asked: np.array([each.tobytes() in there for each in asked], bool))
    assert piece.blocks == COUNT - 100
    assert piece.dram_bytes == COUNT * UNIT
    assert not cache.has(SMALL, hashes).any()


def test_another_size_takes_the_coldest_extent_with_all_that_hangs_below(cache: Cache) -> None:
    """Nobody hears of a block that is gone, and none is left without a way to it."""
    old = store(cache, LARGE, 200)
    below = store(cache, LARGE, 900, parent=pack_hashes(old[-1:]))
    assert cache.has(LARGE, below).all()
    cache.drain()
    kept = store(cache, SMALL, 200)
    assert violations(cache.state) == []
    assert cache.stats().counters["extents_reassigned"] > 0
    assert cache.has(SMALL, kept).all()
    left = cache.has(LARGE, np.concatenate([old, below]))
    assert not left.all()
    assert left[: int(left.sum())].all(), "what is left is a beginning"


@pytest.fixture
def full() -> tuple[Cache, Hashes]:
    """All rows of the index are in use but one, by blocks that could go; the keys of the younger ones."""
    cache = Cache(CacheSizes(200 * UNIT, dram_extent_bytes=20 * UNIT, index_blocks=40))
    cache.open_namespace(NamespaceSpec("t", b"s" * 32, 1, UNIT))
    cache.attach(Attach(1, "t"), 0.0)
    store(cache, SMALL, 10)
    keys_there = store(cache, SMALL, 28, parent=bytes([1]) * 32)
    assert cache.state.index.room == 0
    return cache, keys_there


def test_a_commit_into_slots_that_are_not_the_sessions_pushes_nothing_out(full: tuple[Cache, Hashes]) -> None:
    cache, _ = full
    before = cache.stats().tiers[Tier.DRAM].blocks
    done = cache.commit(Commit(1, 9, SMALL, np.zeros(30, np.uint32), np.full(30, 7, np.uint32), keys(30), unpack_hashes(bytes(32))))
    assert isinstance(done, Committed)
    assert set(done.outcomes.tolist()) <= {BlockOutcome.BAD_SLOT, BlockOutcome.NONE}
    assert cache.stats().tiers[Tier.DRAM].blocks == before


def test_slots_for_blocks_that_are_all_there_push_nothing_out(full: tuple[Cache, Hashes]) -> None:
    cache, there = full
    asked = cache.reserve(Reserve(1, 3, SMALL, hashes=there))
    assert isinstance(asked, Reserved)
    assert (asked.outcomes == BlockOutcome.EXISTS).all()
    assert not cache.stats().counters.get("evicted_dram")


def test_where_rows_are_short_a_batch_takes_those_of_the_coldest(full: tuple[Cache, Hashes]) -> None:
    cache, there = full
    new = store(cache, SMALL, 9, parent=bytes([2]) * 32)
    assert cache.has(SMALL, new).all()
    assert cache.has(SMALL, there).sum() >= 28 - 1, "the older ten went first"
    assert violations(cache.state) == []


def test_a_group_of_a_process_that_has_ended_is_asked_for_again_soon(cache: Cache) -> None:
    """An engine that restarts with other members finds the old ones until its former process's holds are given back."""
    assert isinstance(cache.join_group(1, "model", (SMALL,)), Done)
    cache.session_lost(1, "killed")
    cache.attach(Attach(2, "t"), 0.0)
    refused = cache.join_group(2, "model", (SMALL, LARGE))
    assert isinstance(refused, Refused)
    assert refused.code == "UNAVAILABLE"
    cache.process_gone(1)
    assert isinstance(cache.join_group(2, "model", (SMALL, LARGE)), Done)
