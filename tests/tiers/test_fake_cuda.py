"""The driver that the hbm tier is tested with: it finds each breach of the rules, and works as late as it may."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvstore.geometry import UNIT_BYTES
from kvstore.kernels.driver import OUT_OF_MEMORY, CudaError
from kvstore.testing.fake_cuda import GRANULARITY_BYTES, FakeCuda
from kvstore.testing.fake_cuda_parts import POISON, Violation
from kvstore.testing.tier_contract import aligned

SIZE = GRANULARITY_BYTES


class Setting:
    """One GPU with a pool, a stream and an event, and host memory full of ones."""

    def __init__(self) -> None:
        self.driver = FakeCuda()
        self.handle = self.driver.create(0, SIZE)
        self.pool = self.driver.map(0, self.handle, SIZE)
        self.plain = self.driver.allocate(0, SIZE)
        self.stream, self.event = self.driver.stream(0), self.driver.event(0)
        self.host = np.frombuffer(aligned(UNIT_BYTES, fill=1), np.uint8)
        self.at = self.host.ctypes.data
        self.driver.pin(0, self.at, UNIT_BYTES)

    def up(self, to: int) -> None:
        self.driver.copy(0, self.stream, to, self.at, UNIT_BYTES)


def _freed_under_a_copy(s: Setting) -> None:
    s.up(s.plain)
    s.driver.free(0, s.plain)


def _unmapped_under_a_copy(s: Setting) -> None:
    s.up(s.pool)
    s.driver.unmap(0, s.pool, SIZE)


def _unpinned_under_a_copy(s: Setting) -> None:
    s.up(s.pool)
    s.driver.unpin(0, s.at)


def _used_after_unmap(s: Setting) -> None:
    s.driver.unmap(0, s.pool, SIZE)
    s.up(s.pool)


def _used_after_the_owner_freed_it(s: Setting) -> None:
    opened = s.driver.open_ipc(0, s.driver.export_ipc(0, s.plain))
    s.driver.free(0, s.plain)
    s.up(opened)


def _reaches_out(s: Setting) -> None:
    s.up(s.pool + SIZE - UNIT_BYTES // 2)


def _released_twice(s: Setting) -> None:
    s.driver.release(0, s.handle)
    s.driver.release(0, s.handle)


def _mapped_after_release(s: Setting) -> None:
    s.driver.release(0, s.handle)
    s.driver.map(0, s.handle, SIZE)


def _stream_after_its_end(s: Setting) -> None:
    s.driver.close_stream(0, s.stream)
    s.up(s.pool)


def _event_after_its_end(s: Setting) -> None:
    s.driver.close_event(0, s.event)
    s.driver.wait(0, s.event)


def _unpinned_twice(s: Setting) -> None:
    s.driver.unpin(0, s.at)
    s.driver.unpin(0, s.at)


def _freed_as_another_kind(s: Setting) -> None:
    s.driver.free(0, s.pool)


BREACHES: list[Callable[[Setting], None]] = [
    _freed_under_a_copy, _unmapped_under_a_copy, _unpinned_under_a_copy, _used_after_unmap, _used_after_the_owner_freed_it, _reaches_out,
    _released_twice, _mapped_after_release, _stream_after_its_end, _event_after_its_end, _unpinned_twice, _freed_as_another_kind,
]  # fmt: skip


@pytest.mark.parametrize("breach", BREACHES, ids=lambda breach: breach.__name__.strip("_"))
def test_a_breach_of_the_rules_is_raised_and_kept(breach: Callable[[Setting], None]) -> None:
    setting = Setting()
    with pytest.raises(Violation):
        breach(setting)
    assert len(setting.driver.violations) == 1


def test_a_copy_runs_when_it_is_waited_for_and_not_before() -> None:
    s, target = Setting(), np.frombuffer(aligned(UNIT_BYTES), np.uint8)
    s.up(s.pool)
    s.driver.copy(0, s.stream, target.ctypes.data, s.pool, UNIT_BYTES)
    s.driver.record(0, s.stream, s.event)
    assert (target == POISON).all()
    s.driver.wait(0, s.event)
    assert (target == 1).all()


def test_a_source_that_changes_too_early_shows() -> None:
    s, target = Setting(), np.frombuffer(aligned(UNIT_BYTES), np.uint8)
    s.up(s.pool)
    s.host[:] = 9
    s.driver.copy(0, s.stream, target.ctypes.data, s.pool, UNIT_BYTES)
    s.driver.record(0, s.stream, s.event)
    s.driver.wait(0, s.event)
    assert (target == 9).all()


@pytest.mark.parametrize("follows", [True, False])
def test_streams_are_ordered_by_events_alone(follows: bool) -> None:
    s, target = Setting(), np.frombuffer(aligned(UNIT_BYTES), np.uint8)
    other, last = s.driver.stream(0), s.driver.event(0)
    s.up(s.pool)
    s.driver.record(0, s.stream, s.event)
    if follows:
        s.driver.follow(0, other, s.event)
    s.driver.copy(0, other, target.ctypes.data, s.pool, UNIT_BYTES)
    s.driver.record(0, other, last)
    s.driver.wait(0, last)
    assert (target == (1 if follows else POISON)).all()


def test_an_event_becomes_done_only_by_what_ran() -> None:
    s = Setting()
    assert s.driver.done(0, s.event), "an event that was never recorded is done"
    s.up(s.pool)
    s.driver.record(0, s.stream, s.event)
    assert not s.driver.done(0, s.event)
    assert s.driver.done(0, s.event)


def test_memory_is_counted_until_nothing_holds_it() -> None:
    driver = FakeCuda(memory_bytes=2 * SIZE)
    first = driver.create(0, SIZE)
    address = driver.map(0, first, SIZE)
    driver.release(0, first)
    driver.create(0, SIZE)
    with pytest.raises(CudaError) as raised:
        driver.create(0, SIZE)
    assert raised.value.status == OUT_OF_MEMORY
    driver.unmap(0, address, SIZE)
    driver.create(0, SIZE)
