"""When the mover has blocks looked at: hits that somebody waits for, first checksums, the background check."""

from __future__ import annotations

import pytest

from kvstore.cache.messages import StartVerify, StartWrite, Tier, TransferResult
from kvstore.daemon.jobs import Job, Moved, NamespaceFacts, ReadJob, ScrubJob
from kvstore.daemon.mover import SCRUB_BYTES_PER_JOB, SCRUB_LEAST_BYTES, VERIFY_BYTES_PER_JOB, Mover, MoverLimits, Pulls
from kvstore.geometry import UNIT_BYTES
from tests.daemon.test_mover import EXTENT_UNITS, NAMESPACES, SLOT_UNITS, delete, ok, read, transfers, write

SLOT_BYTES = SLOT_UNITS * UNIT_BYTES
SCRUB_BYTES_PER_S = 64 * SLOT_BYTES


def look(transfer: int, tier: Tier = Tier.DRAM) -> StartVerify:
    return StartVerify(transfer, 1, bytes(32), tier, 0, (1, 2))


class Rig:
    """A mover, and what the core would like done."""

    def __init__(self, lanes: int = 1, queue_depth: int = 32, scrub_bytes_per_s: int = 0, slot_bytes: int = SLOT_BYTES) -> None:
        self._slot_bytes = slot_bytes
        self.writes: list[int] = []
        self.sums: list[int] = []
        self.scrubs: list[int] = []
        pulls = Pulls(self.next_writes, self.next_sums, self.next_scrubs)
        limits = MoverLimits(lanes, queue_depth, EXTENT_UNITS, scrub_bytes_per_s=scrub_bytes_per_s)
        facts = NamespaceFacts(bytes(32), slot_bytes // UNIT_BYTES, slot_bytes)
        self.mover = Mover(limits, NAMESPACES if slot_bytes == SLOT_BYTES else {1: facts}, pulls)

    def next_writes(self, limit: int) -> list[StartWrite]:
        taken, self.writes = self.writes[:limit], self.writes[limit:]
        return [write(each) for each in taken]

    def next_sums(self, limit_bytes: int) -> list[StartVerify]:
        count = limit_bytes // SLOT_BYTES
        taken, self.sums = self.sums[:count], self.sums[count:]
        return [look(each) for each in taken]

    def next_scrubs(self, limit_bytes: int) -> list[StartVerify]:
        count = limit_bytes // self._slot_bytes
        taken, self.scrubs = self.scrubs[:count], self.scrubs[count:]
        return [look(each, Tier.NVME) for each in taken]

    def one_by_one(self, now: float = 0.0) -> list[Job]:
        """All jobs, each finished before the next is asked for."""
        jobs: list[Job] = []
        while fresh := self.mover.next_jobs(now):
            jobs += fresh
            for job in fresh:
                self.mover.finished(job, ok(job), now)
        return jobs


def kinds(jobs: list[Job]) -> list[str]:
    return [type(job).__name__ for job in jobs]


def test_the_background_check_comes_last_and_hits_come_first() -> None:
    rig = Rig(scrub_bytes_per_s=SCRUB_BYTES_PER_S)
    rig.writes, rig.sums, rig.scrubs = [10], [11], [12]
    rig.mover.add(delete(2))
    rig.mover.add(look(1))
    assert kinds(rig.one_by_one()) == ["VerifyJob", "DeleteJob", "VerifyJob", "WriteJob", "ScrubJob"]


def test_loads_and_hits_go_by_age() -> None:
    rig = Rig()
    for transfer in (1, 2):
        rig.mover.add(look(transfer))
    rig.mover.add(read(3))
    rig.mover.add(look(4))
    assert [transfers(job) for job in rig.one_by_one()] == [[1, 2, 4], [3]]
    rig.mover.add(read(5))
    rig.mover.add(look(6))
    assert kinds(rig.one_by_one()) == ["ReadJob", "VerifyJob"]


def test_hits_are_spread_over_the_lanes_and_bounded_in_bytes() -> None:
    rig = Rig(lanes=2)
    for transfer in range(10):
        rig.mover.add(look(transfer))
    assert [transfers(job) for job in rig.mover.next_jobs(0.0)] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    rig = Rig(lanes=1)
    most = VERIFY_BYTES_PER_JOB // SLOT_BYTES
    for transfer in range(2 * most + 5):
        rig.mover.add(look(transfer))
    assert [len(job.items) for job in rig.one_by_one()] == [most, most, 5]


def test_a_full_disk_queue_does_not_keep_hits_waiting() -> None:
    rig = Rig(lanes=3, queue_depth=1)
    rig.mover.add(read(1))
    rig.mover.add(read(2))
    rig.mover.add(look(3))
    assert kinds(rig.mover.next_jobs(0.0)) == ["ReadJob", "VerifyJob"]


def test_first_checksums_leave_a_lane_for_whoever_waits() -> None:
    rig = Rig(lanes=2)
    rig.sums = list(range(10_000))
    assert kinds(rig.mover.next_jobs(0.0)) == ["VerifyJob"]
    rig.mover.add(look(20_000))
    assert [transfers(job) for job in rig.mover.next_jobs(0.0)] == [[20_000]]


def test_a_look_is_reported_with_its_checksum() -> None:
    rig = Rig()
    rig.mover.add(look(1))
    (job,) = rig.mover.next_jobs(0.0)
    assert not rig.mover.idle
    (done,) = rig.mover.finished(job, [Moved(TransferResult.OK, (5, 6))], 0.0)
    assert (done.transfer, done.result, done.checksum) == (1, TransferResult.OK, (5, 6))


def test_the_background_check_waits_until_nothing_is_out() -> None:
    rig = Rig(lanes=4, scrub_bytes_per_s=SCRUB_BYTES_PER_S)
    rig.scrubs = [1]
    rig.mover.add(read(2))
    (demand,) = rig.mover.next_jobs(0.0)
    assert isinstance(demand, ReadJob)
    assert rig.mover.next_jobs(0.0) == []
    rig.mover.finished(demand, ok(demand), 0.0)
    (scrub,) = rig.mover.next_jobs(0.0)
    assert (type(scrub), rig.mover.idle) == (ScrubJob, True), "the orderly stop does not wait for it"


def test_the_background_check_keeps_nobody_waiting() -> None:
    rig = Rig(lanes=2, scrub_bytes_per_s=SCRUB_BYTES_PER_S)
    rig.scrubs = [1]
    assert kinds(rig.mover.next_jobs(0.0)) == ["ScrubJob"]
    rig.writes = [2]
    assert kinds(rig.mover.next_jobs(0.0)) == ["WriteJob"]


@pytest.mark.parametrize("slot_bytes", [UNIT_BYTES, SLOT_BYTES, 2 * SCRUB_LEAST_BYTES])
def test_the_background_check_keeps_to_its_budget_and_small_blocks_count_for_more(slot_bytes: int) -> None:
    rig = Rig(scrub_bytes_per_s=64 * max(slot_bytes, SCRUB_LEAST_BYTES), slot_bytes=slot_bytes)
    rig.scrubs = list(range(100_000))
    now, looked_at = 0.0, 0
    while now < 20.0:
        looked_at += sum(len(job.items) for job in rig.one_by_one(now))
        woken = rig.mover.wake_at()
        assert woken is not None
        now = max(woken, now + 1e-6)
    of_a_job = SCRUB_BYTES_PER_JOB // slot_bytes
    assert 20 * 64 - of_a_job <= looked_at <= 20 * 64 + 32 + of_a_job


def test_wrong_blocks_slow_the_background_check_down() -> None:
    rig = Rig(scrub_bytes_per_s=16 * 2**20)
    rig.scrubs = list(range(100_000))
    (job,) = rig.mover.next_jobs(0.0)
    rig.mover.finished(job, [Moved(TransferResult.CORRUPT)] * len(job.items), 0.0)
    woken = rig.mover.next_jobs(0.0) or rig.mover.wake_at()
    assert isinstance(woken, float)
    assert woken > (len(job.items) - 8) / 16


def test_without_a_budget_there_is_no_background_check() -> None:
    rig = Rig()
    rig.scrubs = [1]
    assert (rig.mover.next_jobs(0.0), rig.mover.wake_at(), rig.scrubs) == ([], None, [1])


def test_nothing_wakes_a_mover_whose_check_rests() -> None:
    rig = Rig(scrub_bytes_per_s=SCRUB_BYTES_PER_S)
    assert (rig.mover.next_jobs(0.0), rig.mover.wake_at()) == ([], None)
