"""Blocks on disk outlive the daemon, and a change of the disk's size."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.geometry import UNIT_BYTES
from kvstore.testing.tier_contract import filled
from kvstore.tiers.nvme import Durable
from tests.tiers.disk import (
    EXTENT_UNITS,
    NAMESPACE,
    SLOT_UNITS,
    Disk,
    found,
    record_of,
    slots,
    store,
    units_of,
)


@pytest.mark.parametrize("clean", [True, False])
def test_every_block_is_there_after_a_restart(disk: Disk, clean: bool) -> None:
    tier = disk.filled(23)
    if clean:
        asyncio.run(tier.stop_clean())
    else:
        tier.close()
    tier = disk.open()
    assert found(tier) == {number: units_of(number) for number in range(23)}
    assert tier.suspect is not clean
    assert tier.extent_slot_units.tolist() == [SLOT_UNITS] * 5 + [0] * 3
    assert tier.namespaces[NAMESPACE].facts == {"tenant": "t"}
    tier.close()


def test_blocks_come_back_oldest_first_over_restarts(disk: Disk) -> None:
    tier = disk.filled(5)
    tier.delete_records(slots(1), quarantine=False)
    store(tier, 1)
    tier.close()
    tier = disk.open()
    tier.load()
    tier.delete_records(slots(0), quarantine=False)
    store(tier, 0)
    tier.close()
    assert list(found(disk.open())) == [2, 3, 4, 1, 0]


def test_a_new_directory_is_empty_and_not_suspect(disk: Disk) -> None:
    tier = disk.open()
    assert found(tier) == {}
    assert not tier.suspect
    tier.close()


def test_deleted_blocks_stay_deleted(disk: Disk) -> None:
    tier = disk.filled(10)
    tier.delete_records(slots(7, 2, 3), quarantine=False)
    tier.close()
    assert sorted(found(disk.open())) == [0, 1, 4, 5, 6, 8, 9]


def test_a_quarantined_slot_stays_out_of_use(disk: Disk) -> None:
    tier = disk.filled(4)
    tier.delete_records(slots(2), quarantine=True)
    tier.close()
    loaded = disk.open().load()
    assert loaded.quarantined_units.tolist() == [units_of(2)]
    assert len(loaded) == 3


def test_an_extent_given_to_another_size_forgets_its_blocks(disk: Disk) -> None:
    tier = disk.filled(10)
    tier.assign_extent(0, SLOT_UNITS + 1)
    tier.assign_extent(0, SLOT_UNITS)
    tier.assign_extent(1, 0)
    tier.close()
    tier = disk.open()
    assert found(tier) == {}
    assert tier.extent_slot_units[:2].tolist() == [SLOT_UNITS, 0]


def test_of_two_copies_the_newer_counts_for_ever(disk: Disk) -> None:
    tier = disk.filled(5)
    tier.assign_extent(1, SLOT_UNITS)
    store(tier, 3, units_of(8))
    tier.close()
    tier = disk.open()
    assert found(tier)[3] == units_of(8)
    tier.delete_records(slots(8), quarantine=False)
    tier.close()
    assert 3 not in found(disk.open())


def test_deletes_in_an_unassigned_extent_are_no_error(disk: Disk) -> None:
    tier = disk.filled(1)
    tier.delete_records(slots(20), quarantine=False)
    tier.delete_records(slots(20), quarantine=True)
    tier.close()
    loaded = disk.open().load()
    assert (len(loaded), len(loaded.quarantined_units)) == (1, 0)


def test_a_larger_capacity_keeps_all_blocks(disk: Disk) -> None:
    disk.filled(23).close()
    larger = replace(disk, capacity_bytes=disk.capacity_bytes * 2)
    tier = larger.open()
    assert len(found(tier)) == 23
    tier.assign_extent(15, SLOT_UNITS)
    store(tier, 99, 15 * EXTENT_UNITS)
    tier.close()
    assert found(larger.open())[99] == 15 * EXTENT_UNITS


def test_a_smaller_capacity_drops_only_what_lies_beyond(disk: Disk) -> None:
    disk.filled(23).close()
    tier = replace(disk, capacity_bytes=2 * EXTENT_UNITS * UNIT_BYTES).open()
    assert sorted(found(tier)) == list(range(10))
    assert (disk.directory / "data").stat().st_blocks * 512 <= tier.capacity_bytes + 16 * 4096
    tier.close()
    assert sorted(found(disk.open())) == list(range(10))


def test_an_old_directory_keeps_its_extent_size(disk: Disk) -> None:
    disk.filled(10).close()
    tier = replace(disk, extent_units=64).open()
    assert tier.extent_units == EXTENT_UNITS
    assert len(found(tier)) == 10


def test_more_than_the_disk_has_is_refused_in_words(disk: Disk) -> None:
    disk.filled(3).close()
    with pytest.raises(ConfigError, match=r"nvme data: 8\.0 TiB asked, .* has .* free; set a smaller --nvme-bytes"):
        replace(disk, capacity_bytes=8 << 40).open()
    tier = disk.open()
    assert len(found(tier)) == 3
    assert tier.capacity_bytes == disk.capacity_bytes


def test_less_than_an_extent_is_refused_in_words(disk: Disk) -> None:
    with pytest.raises(ConfigError, match=r"one extent is 64\.0 KiB; set a larger --nvme-bytes"):
        replace(disk, capacity_bytes=UNIT_BYTES).open()


def test_more_than_can_be_addressed_is_refused_in_words(disk: Disk) -> None:
    with pytest.raises(ConfigError, match=r"at most 16\.0 TiB can be used"):
        replace(disk, capacity_bytes=17 << 40).open()


def test_a_directory_that_cannot_be_made_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Not a directory"):
        Disk(tmp_path / "file" / "nvme").open()


@pytest.mark.parametrize("durable", list(Durable))
def test_bytes_reach_the_medium_before_their_record(disk: Disk, monkeypatch: pytest.MonkeyPatch, durable: Durable) -> None:
    tier = replace(disk, durable=durable).filled(5)
    done: list[str] = []

    def watch(name: str, real: object) -> None:
        def watched(fd: int, *rest: object) -> object:
            done.append(f"{name} {os.path.basename(os.readlink(f'/proc/self/fd/{fd}'))}")
            return real(fd, *rest)  # type: ignore[operator]

        monkeypatch.setattr(os, name, watched)

    for name in ("pwritev", "pwrite", "fdatasync"):
        watch(name, getattr(os, name))
    data = filled(1, SLOT_UNITS * UNIT_BYTES)
    tier.write(units_of(0) * UNIT_BYTES, [data])
    tier.write_records([record_of(number, data) for number in (2, 1, 3, 0)])
    tier.delete_records(np.array([units_of(n) for n in (0, 1, 3)], np.uint32), quarantine=False)
    power = durable is Durable.POWER
    sync = ["fdatasync records"] if power else []
    written = ["pwritev data", *(["fdatasync data"] if power else []), "pwrite records", *sync]
    assert done == [*written, "pwrite records", "pwrite records", *sync]
