"""Whatever comes in whatever order: limits hold, no record precedes its extent, and every transfer is reported once."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.cache.messages import Priority, StartVerify, StartWrite, Tier, TransferDone, TransferResult
from kvstore.daemon.budget import BURST_S, ByteBudget
from kvstore.daemon.jobs import AssignJob, Job, Moved, ReadJob, WriteJob
from tests.daemon.test_mover import EXTENT_UNITS, Rig, assign, delete, read, write

EXTENTS = 4
LANES, QUEUE_DEPTH = 3, 12


class MoverMachine(RuleBasedStateMachine):
    """Plays the cache core and the lanes."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(LANES, QUEUE_DEPTH, write_bytes_per_s=20 * 16_384)
        self.now = 0.0
        self.last = 0
        self.out: list[Job] = []
        self.expected: set[int] = set()
        self.reported: Counter[int] = Counter()
        self.on_disk: set[int] = set()  # extents
        self.decided: set[int] = set()

    def fresh(self) -> int:
        self.last += 1
        self.expected.add(self.last)
        return self.last

    @rule(priority=st.sampled_from([Priority.DEMAND, Priority.PREFETCH]), lasts_s=st.floats(0.0, 3.0))
    def want_a_block(self, priority: Priority, lasts_s: float) -> None:
        self.rig.mover.add(read(self.fresh(), priority, self.now + lasts_s))

    @rule()
    def want_a_hit_verified(self) -> None:
        self.rig.mover.add(StartVerify(self.fresh(), 1, bytes(32), Tier.DRAM, 0, None))

    @rule()
    def delete_a_block(self) -> None:
        self.rig.mover.add(delete(self.fresh()))

    @rule(extent=st.integers(0, EXTENTS - 1), count=st.integers(1, 10))
    def offer_writes(self, extent: int, count: int) -> None:
        self.rig.waiting += [write(self.fresh(), extent) for _ in range(count)]
        if extent not in self.decided:
            self.decided.add(extent)
            self.rig.assign_with[extent] = assign(extent)

    @rule(passes_s=st.floats(0.0, 1.0))
    def start_jobs(self, passes_s: float) -> None:
        self.now += passes_s
        for job in self.rig.mover.next_jobs(self.now):
            self.out.append(job)
            if isinstance(job, WriteJob):
                assert all(self._assigned(item) for item in job.items)
        waiting = self.rig.waiting or self.rig.mover.reads_queued
        assert self.out or not waiting or self.rig.mover.wake_at() is not None

    @precondition(lambda self: self.out)
    @rule(which=st.integers(0, LANES - 1), result=st.sampled_from(list(TransferResult)))
    def finish_a_job(self, which: int, result: TransferResult) -> None:
        self._finish(self.out.pop(which % len(self.out)), result)

    @invariant()
    def limits_hold(self) -> None:
        assert len(self.out) <= LANES
        assert sum(len(job.items) for job in self.out if isinstance(job, ReadJob | WriteJob)) == self.rig.mover.blocks_out <= QUEUE_DEPTH
        assert not self.reported or max(self.reported.values()) == 1

    def teardown(self) -> None:
        for _ in range(1000):
            self.now += 1.0
            self.start_jobs(0.0)
            while self.out:
                self._finish(self.out.pop(), TransferResult.OK)
            if self.rig.mover.idle and not self.rig.waiting:
                break
        assert set(self.reported) == self.expected

    def _finish(self, job: Job, result: TransferResult) -> None:
        if isinstance(job, AssignJob) and result is TransferResult.OK:
            self.on_disk |= {item.extent for item in job.items}
        self._told(self.rig.mover.finished(job, [Moved(result)] * len(job.items), self.now))

    def _told(self, done: list[TransferDone]) -> None:
        self.reported.update(each.transfer for each in done)

    def _assigned(self, item: StartWrite) -> bool:
        return item.target_units // EXTENT_UNITS in self.on_disk


TestMover = MoverMachine.TestCase
TestMover.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)

SPENDING = st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(0, 5_000)), max_size=50)


@given(SPENDING)
def test_a_budget_is_never_passed_by_more_than_a_burst_and_one_block(steps: list[tuple[float, int]]) -> None:
    budget = ByteBudget(1000)
    now, spent, largest = 0.0, 0, 0
    for passes_s, size in steps:
        now += passes_s
        if budget.allows(now):
            budget.spend(size)
            spent, largest = spent + size, max(largest, size)
        else:
            assert budget.allows_at() >= now
            assert budget.allows(budget.allows_at() + 1e-6)
            now = budget.allows_at() + 1e-6
        assert spent <= 1000 * (now + BURST_S) + largest + 1


def test_no_limit_always_allows() -> None:
    budget = ByteBudget(0)
    for _ in range(3):
        assert budget.allows(0.0)
        budget.spend(1 << 60)
