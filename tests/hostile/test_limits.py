"""Every table that a client can fill has a limit, and says so at it: the cache core by itself, with limits that are reached soon."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.cache import leases, ready, writing
from kvstore.cache.core import Cache
from kvstore.cache.invariants import violations
from kvstore.cache.messages import (
    MAX_SESSION_GROUPS,
    MAX_SLOT_HOLDS,
    Abandon,
    Acquire,
    Attach,
    BlockOutcome,
    Claim,
    Claimed,
    Commit,
    Committed,
    Done,
    Hashes,
    NamespaceSpec,
    Refused,
    Release,
    Reserve,
    Reserved,
    unpack_hashes,
)
from kvstore.cache.state import CacheSizes
from tests.blocks import chain

UNIT_BYTES = 4096
MOST_LEASES = 100
MOST_HOLDS = 50
MOST_BLOCKS = 130  # under one lease


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Cache:
    """Two sessions, one namespace with blocks of 4 KiB, room for 1,024 of them."""
    monkeypatch.setattr(leases, "MAX_SESSION_LEASES", MOST_LEASES)
    for module in (leases, ready):
        monkeypatch.setattr(module, "MAX_SLOT_HOLDS", MOST_HOLDS)
    monkeypatch.setattr(writing, "MAX_LEASE_BLOCKS", MOST_BLOCKS)
    made = Cache(CacheSizes(4 << 20))
    assert made.open_namespace(NamespaceSpec("default", bytes(32), 1, UNIT_BYTES)) == 1
    for session in (1, 2):
        made.attach(Attach(session, "default"), 0.0)
    return made


def hashes(seed: int, blocks: int) -> Hashes:
    return unpack_hashes(chain(seed, blocks))


def store(cache: Cache, lease: int, keys: Hashes) -> Committed:
    """By session 1, under this lease."""
    slots = cache.reserve(Reserve(1, lease, 1, len(keys)))
    assert isinstance(slots, Reserved)
    done = cache.commit(Commit(1, lease, 1, slots.units, slots.generations, keys, unpack_hashes(bytes(32))))
    assert isinstance(done, Committed)
    return done


def sound(cache: Cache) -> bool:
    cache.drain()
    return violations(cache.state) == []


def test_a_session_has_so_many_leases_and_no_more(cache: Cache) -> None:
    answers = [cache.acquire(Acquire(1, lease, hashes(1, 1), 1.0, 1), 0.0) for lease in range(1, MOST_LEASES + 10)]
    assert sum(isinstance(answer, Refused) for answer in answers) == 9
    slots = cache.reserve(Reserve(1, 1, 1, 1))
    assert isinstance(slots, Reserved)
    refused = cache.commit(Commit(1, 10**6, 1, slots.units, slots.generations, hashes(2, 1), unpack_hashes(bytes(32))))
    assert isinstance(refused, Refused)
    assert "release some" in refused.text
    assert isinstance(cache.acquire(Acquire(2, 1, hashes(1, 1), 1.0, 1), 0.0), type(answers[0])), "another session is not concerned"
    assert cache.release(Release(1, 1)) == Done(0)
    assert not isinstance(cache.acquire(Acquire(1, 1, hashes(1, 1), 1.0, 1), 0.0), Refused)
    assert sound(cache)


def test_a_session_joins_so_many_groups_and_no_more(cache: Cache) -> None:
    answers = [cache.join_group(1, f"group {number}", (1,)) for number in range(MAX_SESSION_GROUPS + 3)]
    assert [isinstance(answer, Refused) for answer in answers] == [False] * MAX_SESSION_GROUPS + [True] * 3
    assert not isinstance(cache.join_group(1, "group 0", (1,)), Refused), "one it is in already"
    assert not isinstance(cache.join_group(2, "group x", (1,)), Refused)
    cache.detach(1)
    assert list(cache.state.groups) == [("default", "group x")]
    assert sound(cache)


def test_a_group_has_so_many_leases_and_no_more(cache: Cache) -> None:
    store(cache, 1, hashes(1, 1))
    for session in (1, 2):
        cache.join_group(session, "group", (1,))
    for lease in range(10, 10 + MOST_LEASES // 2):
        for session, number in ((1, lease), (2, lease + MOST_LEASES)):
            assert not isinstance(cache.acquire(Acquire(session, number, hashes(1, 1), 1.0, group="group"), 0.0), Refused)
    assert isinstance(cache.acquire(Acquire(2, 5, hashes(1, 1), 1.0, group="group"), 0.0), Refused)
    assert sound(cache)


def test_one_block_committed_again_and_again_is_held_so_often_and_no_more(cache: Cache) -> None:
    """The slot stays private each time, and the shared one is held once more: the count of holds never runs over."""
    keys = hashes(1, 1)
    store(cache, 1, keys)
    slots = cache.reserve(Reserve(1, 2, 1, 1))
    assert isinstance(slots, Reserved)
    many = 10
    units, generations = np.repeat(slots.units, many), np.repeat(slots.generations, many)
    answers = [cache.commit(Commit(1, 2, 1, units, generations, keys.repeat(many, axis=0), keys)) for _ in range(14)]
    assert isinstance(answers[-1], Refused)
    assert str(MOST_BLOCKS) in answers[-1].text
    given = [answer.generations > 0 for answer in answers[:-1] if isinstance(answer, Committed)]
    assert np.concatenate(given).sum() == MOST_HOLDS - 1
    assert all((answer.outcomes == BlockOutcome.EXISTS).all() for answer in answers if isinstance(answer, Committed))
    more = cache.acquire(Acquire(1, 3, keys, 1.0, 1), 0.0)
    assert not isinstance(more, Refused)
    assert len(cache.state.sessions[1].leases[3]) == 0
    assert sound(cache)
    for lease in (1, 2, 3):
        cache.release(Release(1, lease))
    cache.abandon(Abandon(1, 2))
    assert cache.state.dram.held_bytes == 0
    assert sound(cache)


def test_the_count_of_holds_has_room_for_its_limit(cache: Cache) -> None:
    assert np.iinfo(cache.state.sessions[1].counts.dtype).max == MAX_SLOT_HOLDS


def test_a_claim_is_within_the_sessions_limit(cache: Cache) -> None:
    store(cache, 1, hashes(1, 8))
    cache.attach(Attach(3, "default", limit_bytes=4 * UNIT_BYTES), 0.0)
    for session in (1, 3):
        cache.join_group(session, "group", (1,))
    for lease, blocks in ((5, 8), (6, 3)):
        cache.acquire(Acquire(1, lease, hashes(1, blocks), 1.0, group="group"), 0.0)
    cache.drain()
    assert isinstance(cache.claim(Claim(3, 5, "group", 1)), Refused)
    assert isinstance(cache.claim(Claim(3, 6, "group", 1)), Claimed)
    assert sound(cache)


def test_a_slot_named_twice_is_given_back_once(cache: Cache) -> None:
    slots = cache.reserve(Reserve(1, 1, 1, 3))
    assert isinstance(slots, Reserved)
    units, generations = np.tile(slots.units[:2], 3), np.tile(slots.generations[:2], 3)
    assert cache.abandon(Abandon(1, 1, units, generations)) == Done(2)
    assert cache.abandon(Abandon(1, 1)) == Done(1)
    assert sound(cache)
