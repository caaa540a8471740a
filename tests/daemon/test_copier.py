"""Bytes go down and come up the same, under the right key, or not at all. Real memory, a real disk."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from kvstore.cache.messages import AssignExtent, Priority, StartDelete, StartRead, StartVerify, StartWrite, Tier, TransferResult
from kvstore.daemon.copier import Copier
from kvstore.daemon.jobs import AssignJob, DeleteJob, Moved, NamespaceFacts, ReadJob, ScrubJob, VerifyJob, WriteJob
from kvstore.geometry import UNIT_BYTES
from kvstore.testing.tier_contract import aligned, pattern
from kvstore.tiers.base import HealthState
from kvstore.tiers.nvme import NvmeOptions, NvmeTier

EXTENT_UNITS = 64
SLOT_UNITS = 3
BLOCK_BYTES = 2 * UNIT_BYTES + 999
MEMORY_UNITS = 256
OK, FAILED, CORRUPT, NO_SPACE = TransferResult.OK, TransferResult.FAILED, TransferResult.CORRUPT, TransferResult.NO_SPACE


def facts(name: bytes) -> NamespaceFacts:
    return NamespaceFacts(sha256(name).digest(), SLOT_UNITS, BLOCK_BYTES)


NAMESPACES = {1: facts(b"one"), 2: facts(b"two")}
REFUSED = {3: facts(b"three")}  # not on disk


class Rig:
    """An arena, a disk of eight extents for one slot size, and a copier between them. Block n lies n slots from the start of each."""

    def __init__(self, directory: Path) -> None:
        self.memory = aligned(MEMORY_UNITS * UNIT_BYTES)
        self.data = directory / "data"
        self.disk = asyncio.run(NvmeTier.open(NvmeOptions(directory, 8 * EXTENT_UNITS * UNIT_BYTES, EXTENT_UNITS)))
        for each in NAMESPACES.values():
            asyncio.run(self.disk.add_namespace(each.digest, {}))
        self.copier = Copier(self.memory, self.disk, NAMESPACES | REFUSED)
        assigns = tuple(AssignExtent(Tier.NVME, extent, SLOT_UNITS) for extent in range(8))
        assert {moved.result for moved in self.copier.run(AssignJob(assigns))} == {OK}

    def fill(self, number: int) -> None:
        start = number * SLOT_UNITS * UNIT_BYTES
        self.memory[start : start + SLOT_UNITS * UNIT_BYTES] = pattern(number, SLOT_UNITS * UNIT_BYTES)

    def holds(self, number: int, at: int) -> bool:
        """Whether slot `at` of memory has the bytes of block `number`."""
        start = at * SLOT_UNITS * UNIT_BYTES
        return bytes(self.memory[start : start + BLOCK_BYTES]) == pattern(number, SLOT_UNITS * UNIT_BYTES)[:BLOCK_BYTES]

    def put(self, *numbers: int) -> dict[int, tuple[int, int]]:
        """Blocks to disk; their checksums."""
        for number in numbers:
            self.fill(number)
        moved = self.copier.run(WriteJob(tuple(down(number) for number in numbers)))
        assert all(each.result is OK for each in moved)
        return {number: each.checksum for number, each in zip(numbers, moved, strict=True) if each.checksum}

    def flip(self, number: int, offset: int) -> None:
        with self.data.open("r+b") as file:
            at = number * SLOT_UNITS * UNIT_BYTES + offset
            byte = os.pread(file.fileno(), 1, at)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 1]), at)
            os.fsync(file.fileno())


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "nvme")
    yield rig
    rig.disk.close()


def block_hash(number: int) -> bytes:
    return sha256(b"%d" % number).digest()


def down(number: int, checksum: tuple[int, int] | None = None) -> StartWrite:
    units = number * SLOT_UNITS
    return StartWrite(number, 1, block_hash(number), bytes(32), units, units, 1, checksum)


def up(number: int, at: int, checksum: tuple[int, int]) -> StartRead:
    return StartRead(number, Priority.DEMAND, 1, block_hash(number), number * SLOT_UNITS, at * SLOT_UNITS, checksum, 1e9)


def results(moved: list[Moved]) -> list[TransferResult]:
    return [each.result for each in moved]


def test_blocks_come_back_as_they_went_in_any_order(rig: Rig) -> None:
    sums = rig.put(5, 3, 4, 9)
    order = [4, 9, 3, 5]
    moved = rig.copier.run(ReadJob(tuple(up(number, 20 + number, sums[number]) for number in order)))
    assert results(moved) == [OK] * 4
    assert all(rig.holds(number, 20 + number) for number in order)


def test_a_namespace_that_the_disk_does_not_know_costs_others_nothing(rig: Rig) -> None:
    for number in (1, 2, 3):
        rig.fill(number)
    jobs = (down(1), replace(down(2), namespace=3), replace(down(3), namespace=2))
    assert results(rig.copier.run(WriteJob(jobs))) == [OK, FAILED, OK]
    asyncio.run(rig.disk.add_namespace(REFUSED[3].digest, {}))
    assert results(rig.copier.run(WriteJob(jobs[1:2]))) == [OK]


def test_neighbours_on_the_disk_move_in_one_call(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = os.preadv

    def counting(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(len(buffers))
        return real(fd, buffers, offset)

    sums = rig.put(1, 2, 3, 7)
    monkeypatch.setattr(os, "preadv", counting)
    rig.copier.run(ReadJob(tuple(up(number, 30 - number, sums[number]) for number in (7, 3, 1, 2))))
    assert calls == [3, 1]
    assert all(rig.holds(number, 30 - number) for number in (7, 3, 1, 2))


@pytest.mark.parametrize("offset", [0, UNIT_BYTES, BLOCK_BYTES - 1])
def test_one_flipped_bit_is_corrupt_and_only_there(rig: Rig, offset: int) -> None:
    sums = rig.put(1, 2, 3)
    rig.flip(2, offset)
    moved = rig.copier.run(ReadJob(tuple(up(number, 20 + number, sums[number]) for number in (1, 2, 3))))
    assert results(moved) == [OK, CORRUPT, OK]


def test_a_flipped_bit_in_the_padding_is_nobodys(rig: Rig) -> None:
    sums = rig.put(1)
    rig.flip(1, BLOCK_BYTES)
    assert results(rig.copier.run(ReadJob((up(1, 20, sums[1]),)))) == [OK]


def test_right_bytes_under_another_key_are_corrupt(rig: Rig) -> None:
    sums = rig.put(1)
    good = up(1, 20, sums[1])
    for wrong in (replace(good, hash=block_hash(2)), replace(good, namespace=2), replace(good, checksum=(sums[1][0], 0))):
        assert results(rig.copier.run(ReadJob((wrong,)))) == [CORRUPT]


@pytest.mark.usefixtures("faults_pass_at_once")
def test_a_truncated_file_fails_what_lies_beyond_and_no_more(rig: Rig) -> None:
    sums = rig.put(1, 2, 3, 4)
    os.truncate(rig.data, 3 * SLOT_UNITS * UNIT_BYTES + 100)
    moved = rig.copier.run(ReadJob(tuple(up(number, 20 + number, sums[number]) for number in (1, 2, 3, 4))))
    assert results(moved) == [OK, OK, FAILED, FAILED]
    assert rig.put(3)[3] == sums[3]
    assert results(rig.copier.run(ReadJob((up(3, 20, sums[3]),)))) == [OK]
    assert rig.disk.health().state is HealthState.OK


@pytest.mark.parametrize(("number", "expected"), [(errno.ENOSPC, NO_SPACE), (errno.EIO, FAILED)])
@pytest.mark.parametrize("call", ["pwritev", "pwrite"])
def test_a_write_that_failed_leaves_no_record(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, call: str, number: int, expected: TransferResult
) -> None:
    rig.put(1)

    def failing(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        moved = rig.copier.run(WriteJob((down(2), down(3), down(9))))
        assert results(moved) == [expected] * 3
    assert rig.disk.health().state is HealthState.DEGRADED
    rig.disk.close()
    disk = asyncio.run(NvmeTier.open(NvmeOptions(rig.data.parent, rig.disk.capacity_bytes, EXTENT_UNITS)))
    assert disk.load().units.tolist() == [SLOT_UNITS]
    disk.close()


def test_a_block_that_cannot_be_written_costs_only_itself(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev

    def bad_sector(fd: int, buffers: list[memoryview], offset: int) -> int:
        end = offset + sum(len(buffer) for buffer in buffers)
        if offset <= 2 * SLOT_UNITS * UNIT_BYTES < end:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", bad_sector)
    assert results(rig.copier.run(WriteJob((down(1), down(2), down(3))))) == [OK, FAILED, OK]


def where(number: int, tier: Tier, checksum: tuple[int, int] | None) -> StartVerify:
    return StartVerify(number, 1, block_hash(number), tier, number * SLOT_UNITS, checksum)


@pytest.mark.parametrize("tier", [Tier.DRAM, Tier.NVME])
def test_a_look_finds_what_lies_there(rig: Rig, tier: Tier) -> None:
    sums = rig.put(1, 2, 3)
    if tier is Tier.DRAM:
        rig.memory[2 * SLOT_UNITS * UNIT_BYTES + 5] ^= 1
    else:
        rig.flip(2, 5)
    looks = tuple(where(number, tier, sums[number]) for number in (1, 2, 3))
    for job in (VerifyJob(looks), ScrubJob(looks)):
        assert results(rig.copier.run(job)) == [OK, CORRUPT, OK]
    (first,) = rig.copier.run(VerifyJob((where(1, tier, None),)))
    assert first == Moved(OK, sums[1])


def test_a_look_at_the_disk_leaves_memory_alone(rig: Rig) -> None:
    sums = rig.put(1)
    rig.fill(2)
    before = bytes(rig.memory)
    assert results(rig.copier.run(ScrubJob((where(1, Tier.NVME, sums[1]),)))) == [OK]
    assert bytes(rig.memory) == before


def test_a_look_at_a_disk_that_fails_says_so(rig: Rig) -> None:
    sums = rig.put(1)
    os.truncate(rig.data, 0)
    assert results(rig.copier.run(ScrubJob((where(1, Tier.NVME, sums[1]),)))) == [FAILED]
    assert rig.copier.faults == {"scrub:Unavailable": 1}


def test_without_a_disk_only_memory_is_looked_at(rig: Rig) -> None:
    sums = rig.put(1)
    alone = Copier(rig.memory, None, NAMESPACES)
    assert results(alone.run(VerifyJob((where(1, Tier.DRAM, sums[1]),)))) == [OK]
    assert results(alone.run(WriteJob((down(1),)))) == [FAILED]


def test_deletes_of_a_kind_share_one_call(rig: Rig) -> None:
    rig.put(1, 2, 3, 4)
    units = [np.array([number * SLOT_UNITS], np.uint32) for number in range(5)]
    job = DeleteJob((StartDelete(11, units[1]), StartDelete(12, units[2], quarantine=True), StartDelete(13, units[4])))
    assert results(rig.copier.run(job)) == [OK] * 3
    rig.disk.close()
    disk = asyncio.run(NvmeTier.open(NvmeOptions(rig.data.parent, rig.disk.capacity_bytes, EXTENT_UNITS)))
    loaded = disk.load()
    disk.close()
    assert (loaded.units.tolist(), loaded.quarantined_units.tolist()) == ([3 * SLOT_UNITS], [2 * SLOT_UNITS])


def test_a_given_checksum_is_compared_on_the_way_down(rig: Rig) -> None:
    right = rig.put(1)[1]
    wrong = (right[0] ^ 1, right[1])
    assert results(rig.copier.run(WriteJob((down(1, wrong), down(2))))) == [CORRUPT, OK]
    assert rig.copier.run(WriteJob((down(1, right),))) == [Moved(OK, right)]


def test_a_namespace_that_is_not_open_fails_the_job_and_no_more(rig: Rig) -> None:
    assert results(rig.copier.run(ReadJob((replace(up(1, 20, (0, 0)), namespace=9),)))) == [FAILED]
    assert results(rig.copier.run(WriteJob((replace(down(1), namespace=9),)))) == [FAILED]
    rig.put(1)


def test_a_fault_is_logged_once_and_counted_always(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    sums = rig.put(1)
    os.truncate(rig.data, 0)
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            assert results(rig.copier.run(ReadJob((up(1, 20, sums[1]),)))) == [FAILED]
    assert len(caplog.records) == 1
    assert "truncated" in caplog.text
    assert rig.copier.faults == {"read:Unavailable": 5}
