"""A session that is silent ends; time in which the daemon itself stood still is not silence, and its own sessions never are silent."""

from __future__ import annotations

from kvstore.cache.core import Cache
from kvstore.cache.messages import Attach, SessionEnded
from tests.cache.world import sizes

SILENCE_S = 5.0
TICK_S = 0.1


def attached(**more: bool) -> Cache:
    cache = Cache(sizes(silence_s=SILENCE_S))
    cache.attach(Attach(1, "default", **more), 0.0)
    return cache


def ended(cache: Cache, first: float, last: float) -> bool:
    """Whether the session ends while the clock ticks from `first` to `last`."""
    for tick in range(round((last - first) / TICK_S) + 1):
        cache.tick(first + tick * TICK_S)
    return any(isinstance(decision, SessionEnded) for decision in cache.drain())


def test_a_silent_session_ends() -> None:
    cache = attached()
    assert not ended(cache, 0.1, SILENCE_S - TICK_S)
    assert ended(cache, SILENCE_S, SILENCE_S + 2 * TICK_S)


def test_time_in_which_the_daemon_stood_still_is_not_silence() -> None:
    cache = attached()
    assert not ended(cache, 0.1, 1.0)
    assert not ended(cache, 100.0, 103.0)


def test_a_daemon_that_stumbles_ends_nobody() -> None:
    """Each step is shorter than the silence allowed, their sum is not; what there was of it was the daemon's own."""
    cache = attached()
    for stumble in range(12):
        cache.tick(0.9 * stumble)
        assert not cache.drain()
    assert ended(cache, 9.9 + TICK_S, 9.9 + SILENCE_S)


def test_nor_is_that_before_the_first_tick() -> None:
    assert not ended(attached(), 100.0, 103.0)


def test_the_daemon_is_never_silent_to_itself() -> None:
    cache = attached(own=True)
    cache.heard(1, 0.0)
    assert not ended(cache, 0.1, 3 * SILENCE_S)
