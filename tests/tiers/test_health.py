"""What a tier says of itself, between calls that fail and calls that work."""

from __future__ import annotations

import time

import pytest

from kvstore.tiers import health
from kvstore.tiers.base import HealthState
from kvstore.tiers.health import HealthRecord


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the record sees, in seconds."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    return clock


def test_a_disk_on_which_some_writes_work_stays_degraded(now: list[float]) -> None:
    record = HealthRecord()
    for _ in range(20):
        record.failed("write", "no space")
        record.worked("write")
        assert record.health().state is HealthState.DEGRADED
        now[0] += 1
        record.worked("write")
        assert record.health().reason == "no space"


def test_a_fault_is_over_when_the_same_kind_of_call_works_some_seconds_later(now: list[float]) -> None:
    record = HealthRecord()
    record.failed("write", "no space")
    now[0] += health.STANDS_S
    record.worked("read")
    assert record.health().state is HealthState.DEGRADED
    record.worked("write")
    assert record.health().state is HealthState.OK
