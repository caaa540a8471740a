"""Under `durable = power`, a sync that failed is never made good by one that works: what was written before it is written anew."""

from __future__ import annotations

import errno
import os
from dataclasses import replace

import pytest

from kvstore.errors import Unavailable
from kvstore.geometry import UNIT_BYTES
from kvstore.testing.tier_contract import filled
from kvstore.tiers.nvme import Durable, NvmeTier
from tests.tiers.disk import SLOT_UNITS, Disk, found, record_of, slots, store


@pytest.fixture
def tier(disk: Disk) -> NvmeTier:
    return replace(disk, durable=Durable.POWER).filled(3)


def put(tier: NvmeTier, number: int) -> None:
    """The bytes of a block, without its record."""
    data = filled(number, SLOT_UNITS * UNIT_BYTES)
    tier.write(record_of(number, data).units * UNIT_BYTES, [data])


def remember(tier: NvmeTier, number: int) -> None:
    """Its record."""
    tier.write_records([record_of(number, filled(number, SLOT_UNITS * UNIT_BYTES))])


def fail_one(monkeypatch: pytest.MonkeyPatch, which: int) -> None:
    """The `which`-th sync from now on fails; the others work."""
    real, calls = os.fdatasync, iter(range(1, 1000))

    def fdatasync(fd: int) -> None:
        if next(calls) == which:
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)


def test_bytes_that_anothers_failed_sync_left_are_not_called_stored(tier: NvmeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tier, 3)
    put(tier, 4)
    fail_one(monkeypatch, 1)
    with pytest.raises(Unavailable, match="Input/output error"):
        remember(tier, 3)
    with pytest.raises(Unavailable, match="written anew"):
        remember(tier, 4)
    store(tier, 3)
    store(tier, 4)


def test_records_that_anothers_failed_sync_left_are_not_called_stored(tier: NvmeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tier, 3)
    real = tier._records.write

    def write_and_be_overtaken(records: object) -> None:
        monkeypatch.setattr(tier._records, "write", real)
        real(records)  # type: ignore[arg-type]
        fail_one(monkeypatch, 1)
        with pytest.raises(Unavailable, match="Input/output error"):
            tier.delete_records(slots(0), quarantine=False)

    monkeypatch.setattr(tier._records, "write", write_and_be_overtaken)
    with pytest.raises(Unavailable, match="written anew"):
        remember(tier, 3)
    store(tier, 3)


def test_what_the_last_run_could_not_sync_is_synced_at_start(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.filled(3).close()
    tier = replace(disk, durable=Durable.POWER).open()
    fail_one(monkeypatch, 2)
    with pytest.raises(Unavailable):
        tier.load()
    assert len(found(tier)) == 3
