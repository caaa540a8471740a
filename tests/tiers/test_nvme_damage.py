"""What is wrong on disk is known for what it is, and costs no more than itself."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.errors import InternalFault, ResourceExhausted, Unavailable
from kvstore.geometry import UNIT_BYTES
from kvstore.testing.tier_contract import aligned, filled
from kvstore.tiers.base import HealthState
from kvstore.tiers.record_codec import RECORD_BYTES
from tests.tiers.disk import (
    REGION_BYTES,
    SLOT_UNITS,
    Disk,
    damage,
    found,
    place_of_record,
    record_of,
    slots,
    store,
    units_of,
)


@pytest.mark.parametrize("offset", [0, 9, 16, 47, 81, 100, RECORD_BYTES - 1])
def test_a_damaged_record_is_no_block(disk: Disk, offset: int) -> None:
    disk.filled(10).close()
    damage(disk.directory / "records", place_of_record(6) + offset)
    loaded = disk.open().load()
    assert loaded.torn_units.tolist() == [units_of(6)]
    assert len(loaded) == 9


def test_a_torn_record_is_no_block(disk: Disk) -> None:
    tier = disk.filled(5)
    path = disk.directory / "records"
    before = path.read_bytes()
    tier.delete_records(slots(4), quarantine=False)
    store(tier, 90, units_of(4))
    tier.close()
    after, at = path.read_bytes(), place_of_record(4)
    for cut in range(24, RECORD_BYTES, 8):  # the first 16 bytes of both are equal
        path.write_bytes(after[: at + cut] + before[at + cut :])
        tier = disk.open()
        assert sorted(found(tier)) == [0, 1, 2, 3]
        tier.close()


def test_a_record_moved_to_another_slot_is_no_block(disk: Disk) -> None:
    disk.filled(10).close()
    path = disk.directory / "records"
    raw = bytearray(path.read_bytes())
    raw[place_of_record(7) : place_of_record(7) + RECORD_BYTES] = raw[place_of_record(2) : place_of_record(2) + RECORD_BYTES]
    path.write_bytes(raw)
    loaded = disk.open().load()
    assert loaded.misplaced_units.tolist() == [units_of(7)]
    assert len(loaded) == 9


def test_an_extent_with_a_damaged_head_is_unassigned(disk: Disk) -> None:
    disk.filled(10).close()
    damage(disk.directory / "records", REGION_BYTES + 20)
    tier = disk.open()
    assert sorted(found(tier)) == [0, 1, 2, 3, 4]
    assert tier.extent_slot_units[:2].tolist() == [SLOT_UNITS, 0]


def test_blocks_of_a_forgotten_namespace_are_dropped(disk: Disk) -> None:
    disk.filled(3).close()
    (disk.directory / "namespaces.json").unlink()
    loaded = disk.open().load()
    assert len(loaded) == 0
    assert sorted(loaded.misplaced_units.tolist()) == [units_of(0), units_of(1), units_of(2)]


def test_a_record_needs_its_namespace_first(disk: Disk) -> None:
    tier = disk.open()
    tier.assign_extent(0, SLOT_UNITS)
    with pytest.raises(Unavailable, match="namespace"):
        tier.write_records([record_of(0, filled(0, SLOT_UNITS * UNIT_BYTES))])


def test_a_record_needs_its_extent_first(disk: Disk) -> None:
    tier = disk.filled(1)
    with pytest.raises(InternalFault, match="extent"):
        tier.write_records([record_of(30, filled(0, SLOT_UNITS * UNIT_BYTES))])


@pytest.mark.usefixtures("faults_pass_at_once")
def test_a_truncated_data_file_fails_reads_and_nothing_else(disk: Disk) -> None:
    tier = disk.filled(10)
    os.truncate(disk.directory / "data", units_of(6) * UNIT_BYTES + 5000)
    data = aligned(SLOT_UNITS * UNIT_BYTES)
    tier.read(units_of(5) * UNIT_BYTES, [data])
    for number in (6, 9):
        with pytest.raises(Unavailable, match="truncated"):
            tier.read(units_of(number) * UNIT_BYTES, [data])
    assert tier.health().state is HealthState.DEGRADED
    store(tier, 9)
    tier.read(units_of(9) * UNIT_BYTES, [data])
    assert data == filled(9, SLOT_UNITS * UNIT_BYTES)
    assert tier.health().state is HealthState.OK


def test_blocks_beyond_a_truncated_file_are_gone_after_restart(disk: Disk) -> None:
    disk.filled(10).close()
    os.truncate(disk.directory / "data", units_of(6) * UNIT_BYTES + 5000)
    tier = disk.open()
    assert sorted(found(tier)) == [0, 1, 2, 3, 4, 5]
    tier.close()
    assert sorted(found(disk.open())) == [0, 1, 2, 3, 4, 5]


DELETED: dict[str, Callable[[Path], None]] = {
    "data": lambda directory: (directory / "data").unlink(),
    "records": lambda directory: (directory / "records").unlink(),
    "data and records": shutil.rmtree,
}


@pytest.mark.parametrize("what", DELETED)
def test_what_is_deleted_serves_until_restart_takes_nothing_and_is_empty_then(disk: Disk, what: str) -> None:
    tier = disk.filled(9)
    new = filled(9, SLOT_UNITS * UNIT_BYTES)
    tier.write(units_of(9) * UNIT_BYTES, [new])
    DELETED[what](disk.directory)
    data = aligned(SLOT_UNITS * UNIT_BYTES)
    tier.read(units_of(8) * UNIT_BYTES, [data])
    assert data == filled(8, SLOT_UNITS * UNIT_BYTES)
    assert (tier.health().state, f"{what} deleted under the daemon; " in tier.health().reason) == (HealthState.DEGRADED, True)
    with pytest.raises(Unavailable, match="restart it"):
        tier.write_records([record_of(9, new)])
    with pytest.raises(Unavailable, match="restart it"):
        tier.write(units_of(9) * UNIT_BYTES, [new])
    with pytest.raises(Unavailable, match="restart it"):
        asyncio.run(tier.add_namespace(bytes(32), {}))
    with pytest.raises(Unavailable, match="restart it"):
        asyncio.run(tier.stop_clean())
    assert tier.health().reason.count("restart it") == 1
    tier.close()
    tier = disk.open()
    assert found(tier) == {}
    assert (disk.directory / "data").stat().st_size == tier.capacity_bytes


def test_a_deleted_file_of_records_means_no_blocks(disk: Disk) -> None:
    disk.filled(10).close()
    (disk.directory / "records").unlink()
    assert found(disk.open()) == {}


FAULTS = [(errno.ENOSPC, ResourceExhausted), (errno.EDQUOT, ResourceExhausted), (errno.EIO, Unavailable)]


@pytest.mark.usefixtures("faults_pass_at_once")
@pytest.mark.parametrize(("number", "kind"), FAULTS)
def test_a_fault_has_a_type_and_health_recovers(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    tier = disk.filled(2)
    data = filled(1, SLOT_UNITS * UNIT_BYTES)

    def failing(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", failing)
        patch.setattr(os, "pwrite", failing)
        with pytest.raises(kind):
            tier.write(0, [data])
        with pytest.raises(kind):
            tier.write_records([record_of(1, data)])
        with pytest.raises(kind):
            tier.delete_records(slots(1), quarantine=False)
        with pytest.raises(kind):
            tier.assign_extent(1, SLOT_UNITS)
        assert tier.extent_slot_units[1] == 0
    assert tier.health().state is HealthState.DEGRADED
    tier.write(units_of(1) * UNIT_BYTES, [data])
    tier.write_records([record_of(1, data)])
    tier.delete_records(slots(1), quarantine=False)
    assert tier.health().state is HealthState.DEGRADED
    tier.assign_extent(1, SLOT_UNITS)
    assert tier.health().state is HealthState.OK


def test_a_write_cut_short_means_no_space(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = disk.filled(1)
    calls: list[int] = []

    def cut(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        return UNIT_BYTES if len(calls) == 1 else 0

    monkeypatch.setattr(os, "pwritev", cut)
    with pytest.raises(ResourceExhausted, match="cut short"):
        tier.write(0, [aligned(UNIT_BYTES), aligned(2 * UNIT_BYTES)])
    assert calls == [0, UNIT_BYTES]
