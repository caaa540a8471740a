"""Which byte work runs next, and what the cache core is told of it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from kvstore.cache.messages import AssignExtent, Priority, StartDelete, StartRead, StartWrite, Tier, TransferResult
from kvstore.daemon.jobs import AssignJob, DeleteJob, Job, Moved, NamespaceFacts, ReadJob, WriteJob
from kvstore.daemon.mover import BLOCKS_PER_JOB, BYTES_PER_JOB, WRITES_PER_PULL, Mover, MoverLimits, Pulls
from kvstore.errors import InternalFault
from kvstore.geometry import UNIT_BYTES

EXTENT_UNITS = 64
SLOT_UNITS = 4
NAMESPACES = {1: NamespaceFacts(bytes(32), SLOT_UNITS, SLOT_UNITS * UNIT_BYTES - 7)}
LATER = 1000.0  # a deadline that no test reaches


def read(transfer: int, priority: Priority = Priority.DEMAND, deadline_at: float = LATER) -> StartRead:
    return StartRead(transfer, priority, 1, bytes(32), transfer * SLOT_UNITS, transfer * SLOT_UNITS, (1, 2), deadline_at)


def write(transfer: int, extent: int = 0) -> StartWrite:
    return StartWrite(transfer, 1, bytes(32), bytes(32), 0, extent * EXTENT_UNITS, 1, None)


def delete(transfer: int) -> StartDelete:
    return StartDelete(transfer, np.array([transfer], np.uint32))


def assign(extent: int, slot_units: int = SLOT_UNITS) -> AssignExtent:
    return AssignExtent(Tier.NVME, extent, slot_units)


class Rig:
    """A mover, and writes that the core would like done."""

    def __init__(
        self, lanes: int = 4, queue_depth: int = 256, write_bytes_per_s: int = 0, facts: NamespaceFacts = NAMESPACES[1]
    ) -> None:
        self.waiting: list[StartWrite] = []
        self.assign_with: dict[int, AssignExtent] = {}  # by extent: what the core decides when a write there starts
        self.asked: list[int] = []
        self.mover = Mover(MoverLimits(lanes, queue_depth, EXTENT_UNITS, write_bytes_per_s), {1: facts}, Pulls(self.next_writes))

    def next_writes(self, limit: int) -> list[StartWrite]:
        self.asked.append(limit)
        taken, self.waiting = self.waiting[:limit], self.waiting[limit:]
        for each in taken:
            if decision := self.assign_with.pop(each.target_units // EXTENT_UNITS, None):
                self.mover.add(decision)
        return taken

    def add(self, decisions: Iterable[StartRead | StartDelete | AssignExtent]) -> None:
        for decision in decisions:
            self.mover.add(decision)


def transfers(job: Job) -> list[int]:
    return [] if isinstance(job, AssignJob) else [item.transfer for item in job.items]


def ok(job: Job) -> list[Moved]:
    return [Moved(TransferResult.OK, (3, 4) if isinstance(job, WriteJob) else None) for _ in job.items]


def kinds_one_at_a_time(rig: Rig) -> list[str]:
    """The kinds of all jobs, each finished before the next is asked for."""
    kinds = []
    while jobs := rig.mover.next_jobs(0.0):
        for job in jobs:
            kinds.append(type(job).__name__)
            rig.mover.finished(job, ok(job), 0.0)
    return kinds


def test_the_most_urgent_comes_first_whatever_came_first() -> None:
    rig = Rig(lanes=1)
    rig.waiting = [write(10)]
    rig.add([read(1, Priority.PREFETCH), delete(2), assign(3), read(4)])
    assert kinds_one_at_a_time(rig) == ["ReadJob", "AssignJob", "DeleteJob", "WriteJob", "ReadJob"]
    assert rig.mover.idle


def test_one_lane_stays_free_for_whoever_waits() -> None:
    rig = Rig(lanes=3)
    rig.waiting = [write(n) for n in range(100)]
    rig.add(read(1000 + n, Priority.PREFETCH) for n in range(100))
    background = rig.mover.next_jobs(0.0)
    assert [type(job) for job in background] == [WriteJob, WriteJob]
    rig.mover.add(read(1))
    (demand,) = rig.mover.next_jobs(0.0)
    assert transfers(demand) == [1]
    assert rig.mover.next_jobs(0.0) == []


def test_demand_is_spread_over_the_lanes_in_order() -> None:
    rig = Rig(lanes=4)
    rig.add(read(n) for n in range(12))
    assert [transfers(job) for job in rig.mover.next_jobs(0.0)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    rig = Rig(lanes=2)
    rig.add(read(n) for n in range(200))
    assert [len(job.items) for job in rig.mover.next_jobs(0.0)] == [BLOCKS_PER_JOB] * 2


def test_no_more_blocks_are_out_than_the_queue_is_deep() -> None:
    rig = Rig(lanes=4, queue_depth=10)
    rig.waiting = [write(n) for n in range(100)]
    rig.add(read(1000 + n) for n in range(100))
    jobs = rig.mover.next_jobs(0.0)
    assert (rig.mover.blocks_out, sum(len(job.items) for job in jobs)) == (10, 10)
    assert rig.asked == []
    rig.mover.finished(jobs[0], ok(jobs[0]), 0.0)
    assert rig.mover.blocks_out == 10 - len(jobs[0].items)


def test_a_job_ends_after_so_many_bytes() -> None:
    large = NamespaceFacts(bytes(32), BYTES_PER_JOB // UNIT_BYTES // 2, BYTES_PER_JOB // 2)
    huge = NamespaceFacts(bytes(32), 2 * BYTES_PER_JOB // UNIT_BYTES, 2 * BYTES_PER_JOB)
    for facts, blocks in ((large, 2), (huge, 1)):
        rig = Rig(lanes=2, facts=facts)
        rig.waiting = [write(n) for n in range(20)]
        (first,) = rig.mover.next_jobs(0.0)
        assert transfers(first) == list(range(blocks))
        rig.mover.finished(first, ok(first), 0.0)
        (second,) = rig.mover.next_jobs(0.0)
        assert transfers(second) == list(range(blocks, 2 * blocks))
        assert len(rig.asked) == 1, "what was taken and did not fit is next, before anything is asked for"
        rig = Rig(lanes=1, facts=facts)
        rig.add(read(n) for n in range(20))
        assert [transfers(job) for job in rig.mover.next_jobs(0.0)] == [list(range(blocks))]


def test_nothing_more_is_taken_while_blocks_wait_for_their_extents() -> None:
    rig = Rig(lanes=2)
    rig.waiting = [write(n, extent=n // 10) for n in range(1000)]
    rig.assign_with = {extent: assign(extent) for extent in range(100)}
    while len(rig.waiting) > 10:
        before = len(rig.waiting)
        for job in rig.mover.next_jobs(0.0):
            rig.mover.finished(job, ok(job), 0.0)
        assert before - len(rig.waiting) <= BLOCKS_PER_JOB


def test_the_core_is_asked_for_writes_only_when_there_is_room() -> None:
    rig = Rig(lanes=2)
    rig.waiting = [write(n) for n in range(3)]
    jobs = rig.mover.next_jobs(0.0)
    assert (transfers(jobs[0]), rig.asked) == ([0, 1, 2], [WRITES_PER_PULL] * 2)
    rig.mover.next_jobs(0.0)
    assert len(rig.asked) == 2
    rig.mover.finished(jobs[0], ok(jobs[0]), 0.0)
    assert (rig.mover.next_jobs(0.0), len(rig.asked)) == ([], 3)


def test_reports_carry_each_items_own_result() -> None:
    rig = Rig()
    rig.waiting = [write(1), write(2)]
    (job,) = rig.mover.next_jobs(0.0)
    done = rig.mover.finished(job, [Moved(TransferResult.NO_SPACE), Moved(TransferResult.OK, (5, 6))], 0.0)
    assert [(each.transfer, each.result, each.checksum) for each in done] == [
        (1, TransferResult.NO_SPACE, None),
        (2, TransferResult.OK, (5, 6)),
    ]


def test_a_lane_that_answers_too_little_failed() -> None:
    rig = Rig()
    rig.add([delete(1), delete(2)])
    (job,) = rig.mover.next_jobs(0.0)
    assert isinstance(job, DeleteJob)
    assert [each.result for each in rig.mover.finished(job, [Moved(TransferResult.OK)], 0.0)] == [TransferResult.FAILED] * 2


def test_the_end_of_a_job_is_told_once() -> None:
    rig = Rig()
    rig.add([read(1)])
    (job,) = rig.mover.next_jobs(0.0)
    rig.mover.finished(job, ok(job), 0.0)
    with pytest.raises(InternalFault):
        rig.mover.finished(job, ok(job), 0.0)


# ---- deadlines and priorities


def test_a_read_that_nobody_waits_for_any_more_stands_back() -> None:
    rig = Rig(lanes=1)
    rig.waiting = [write(10)]
    rig.add([read(1, deadline_at=5.0), read(2)])
    first, second, third = (transfers(job) for job in _one_by_one(rig, now=5.0))
    assert (first, second, third) == ([2], [10], [1])


def test_a_guess_that_becomes_a_demand_moves_up() -> None:
    rig = Rig(lanes=1)
    rig.add([read(1, Priority.PREFETCH), read(2, Priority.PREFETCH), read(3), read(2)])
    assert [transfers(job) for job in _one_by_one(rig, now=0.0)] == [[3, 2], [1]]


def _one_by_one(rig: Rig, now: float) -> list[Job]:
    jobs: list[Job] = []
    while fresh := rig.mover.next_jobs(now):
        jobs += fresh
        for job in fresh:
            rig.mover.finished(job, ok(job), now)
    return jobs


# ---- extents


def test_no_record_before_its_extent_is_on_disk() -> None:
    rig = Rig()
    rig.waiting = [write(1, extent=7), write(2, extent=0)]
    rig.assign_with = {7: assign(7)}
    jobs = rig.mover.next_jobs(0.0)
    assert [(type(job), transfers(job)) for job in jobs] == [(WriteJob, [2]), (AssignJob, [])]
    assert rig.mover.next_jobs(0.0) == []
    assert rig.mover.finished(jobs[1], ok(jobs[1]), 0.0) == []
    assert [transfers(job) for job in rig.mover.next_jobs(0.0)] == [[1]]


def test_an_extent_changes_its_size_one_at_a_time() -> None:
    rig = Rig()
    rig.add([assign(7, 4)])
    (first,) = rig.mover.next_jobs(0.0)
    rig.add([assign(7, 0), assign(7, 8)])
    assert rig.mover.next_jobs(0.0) == []
    rig.mover.finished(first, ok(first), 0.0)
    (second,) = rig.mover.next_jobs(0.0)
    assert isinstance(second, AssignJob)
    assert [each.slot_units for each in second.items] == [8]


def test_blocks_of_an_extent_that_cannot_be_assigned_fail_as_it_did() -> None:
    rig = Rig()
    rig.waiting = [write(1, extent=7)]
    rig.assign_with = {7: assign(7)}
    (job,) = rig.mover.next_jobs(0.0)
    done = rig.mover.finished(job, [Moved(TransferResult.NO_SPACE)], 0.0)
    assert [(each.transfer, each.result) for each in done] == [(1, TransferResult.NO_SPACE)]
    rig.waiting = [write(2, extent=7)]
    (again,) = rig.mover.next_jobs(0.0)
    assert isinstance(again, AssignJob)
    rig.mover.finished(again, ok(again), 0.0)
    assert [transfers(job) for job in rig.mover.next_jobs(0.0)] == [[2]]


def test_extents_of_memory_are_not_the_movers() -> None:
    with pytest.raises(InternalFault, match="DRAM"):
        Rig().mover.add(AssignExtent(Tier.DRAM, 0, 1))


# ---- the budget of writes


def test_writes_keep_to_their_budget_and_reads_do_not_wait_for_it() -> None:
    slot_bytes = SLOT_UNITS * UNIT_BYTES
    rig = Rig(lanes=1, write_bytes_per_s=100 * slot_bytes)
    rig.waiting = [write(n) for n in range(10_000)]
    now, written = 0.0, 0
    while now < 10.0:
        for job in rig.mover.next_jobs(now):
            assert isinstance(job, WriteJob)
            written += len(job.items)
            rig.mover.finished(job, ok(job), now)
            break
        else:
            woken = rig.mover.wake_at()
            assert woken is not None
            assert now <= woken <= now + 1.0
            rig.mover.add(read(1))
            (demand,) = rig.mover.next_jobs(now)
            assert isinstance(demand, ReadJob)
            rig.mover.finished(demand, ok(demand), now)
            now = max(woken, now + 1e-6)
    assert 1000 <= written <= 1000 + 50 + BLOCKS_PER_JOB


def test_without_a_budget_nothing_has_to_be_woken() -> None:
    rig = Rig()
    rig.waiting = [write(n) for n in range(100)]
    rig.mover.next_jobs(0.0)
    assert rig.mover.wake_at() is None


def test_how_long_the_disk_has_not_answered_is_known() -> None:
    rig = Rig()
    assert rig.mover.longest_out_s(5.0) == 0.0
    rig.add([read(1)])
    rig.mover.next_jobs(5.0)
    assert rig.mover.longest_out_s(45.0) == 40.0
