"""Decides which byte work runs next. Sans-I/O: decisions of the cache core go in, jobs come out, results go in, reports come out.

Order: blocks that somebody waits for; extents and deletes, which free slots; first checksums; write-through, under its budget; guesses;
and when nothing at all is out, the background check, under a budget of its own. At most one job a lane is out, so nothing ever queues
behind less urgent work; background work leaves one lane free for whoever waits. Work already out is not recalled: a job's limits in blocks
or bytes bound how long that takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvstore.cache.messages import (
    AssignExtent,
    Priority,
    StartDelete,
    StartRead,
    StartVerify,
    StartWrite,
    Tier,
    TransferDone,
    TransferResult,
)
from kvstore.daemon.budget import ByteBudget
from kvstore.daemon.jobs import AssignJob, DeleteJob, Job, Moved, Namespaces, ReadJob, ScrubJob, VerifyJob, WriteJob
from kvstore.errors import InternalFault
from kvstore.geometry import UNIT_BYTES

BLOCKS_PER_JOB = 64  # blocks: of small ones enough to pay for a thread's hand-over and for the system calls
BYTES_PER_JOB = 8 * 2**20  # 8 MiB: under 5 ms of a disk, in which somebody may come who waits; 16 are no faster. One block at least
WRITES_PER_PULL = 8  # blocks: what is taken from the core at a time; what does not fit into the job is kept for the next one
DELETES_PER_JOB = 64  # deletes: each may be many records, which lie together
VERIFY_BYTES_PER_JOB = 16 * 2**20  # 16 MiB: some 2 ms of a core; of small blocks enough to pay for the hand-over
SCRUB_BYTES_PER_JOB = 2**20  # 1 MiB: under 2 ms of a disk, in which somebody may come who waits
SCRUB_LOOK_S = 0.1  # seconds until the next look, where there was nothing to check
SCRUB_LEAST_BYTES = 2**16  # 64 KiB of budget: checking a smaller block takes as long as one of this size, most of it not the disk's time
SCRUB_BYTES_PER_WRONG_BLOCK = 2**20  # 1 MiB of budget: removing and logging it costs the loop more than reading it costs the disk


@dataclass(frozen=True)
class MoverLimits:
    lanes: int  # threads
    queue_depth: int  # blocks in flight
    extent_units: int  # of the nvme tier
    write_bytes_per_s: int = 0  # 0: no limit
    scrub_bytes_per_s: int = 0  # 0: no background check


def _none(_: int) -> list[StartVerify]:
    return []


@dataclass(frozen=True)
class Pulls:
    """What the mover asks the cache core for when it has room: up to so many blocks, or about so many bytes of them.

    `next_writes` adds an AssignExtent that its blocks rely on to the mover before it returns.
    """

    next_writes: Callable[[int], list[StartWrite]]
    next_sums: Callable[[int], list[StartVerify]] = _none
    next_scrubs: Callable[[int], list[StartVerify]] = _none


class Mover:
    """Called from the event loop only. `add` may be called from inside `next_writes`."""

    def __init__(self, limits: MoverLimits, namespaces: Namespaces, pulls: Pulls) -> None:
        self._limits = limits
        self._namespaces = namespaces
        self._pulls = pulls
        self._budget = ByteBudget(limits.write_bytes_per_s)
        self._scrub_budget = ByteBudget(limits.scrub_bytes_per_s)
        self._scrub_at = 0.0  # when to look again for blocks to check, after there were none
        self._over: list[ByteBudget] = []  # budgets that work is waiting for
        self._checks: deque[StartVerify] = deque()  # hits in dram that somebody waits for
        self._demand: dict[int, StartRead] = {}  # by transfer, in order of arrival
        self._prefetch: dict[int, StartRead] = {}
        self._deletes: deque[StartDelete] = deque()
        self._assigns: dict[int, AssignExtent] = {}  # by extent; the newest counts
        self._assigns_out: set[int] = set()
        self._assigns_failed: dict[int, AssignExtent] = {}  # tried again when a block for the extent comes
        self._held: deque[StartWrite] = deque()  # blocks for extents whose assignment is not on disk yet
        self._out: dict[Job, float] = {}  # and since when

    def add(self, decision: StartRead | StartVerify | StartDelete | AssignExtent) -> None:
        """Queue one decision. A read that is queued as a guess and comes again as a demand moves up."""
        match decision:
            case StartRead() if self._is_out(decision.transfer):
                pass  # it is being read already: nothing is sooner
            case StartRead():
                self._demand.pop(decision.transfer, None)
                self._prefetch.pop(decision.transfer, None)
                queue = self._demand if decision.priority is Priority.DEMAND else self._prefetch
                queue[decision.transfer] = decision
            case StartVerify():
                self._checks.append(decision)
            case StartDelete():
                self._deletes.append(decision)
            case AssignExtent():
                if decision.tier is not Tier.NVME:
                    raise InternalFault(f"the mover got an extent of {decision.tier.name}; only nvme keeps its extents on disk")
                self._assigns_failed.pop(decision.extent, None)
                self._assigns[decision.extent] = decision

    def _is_out(self, transfer: int) -> bool:
        return any(item.transfer == transfer for job in self._out if isinstance(job, ReadJob) for item in job.items)

    def next_jobs(self, now: float) -> list[Job]:
        """The jobs to start now. Call after every `add`, every `finished`, and at `wake_at`."""
        jobs: list[Job] = []
        self._over = []
        while (job := self._next_job(now)) is not None:
            self._out[job] = now
            jobs.append(job)
        return jobs

    def finished(self, job: Job, results: Sequence[Moved], now: float) -> list[TransferDone]:
        """A job is done, with one result an item. Answers what the cache core is to be told."""
        if self._out.pop(job, None) is None:
            raise InternalFault("the mover was told of the end of a job that it had not started, or twice")
        if len(results) != len(job.items):
            results = [Moved(TransferResult.FAILED)] * len(job.items)
        if isinstance(job, AssignJob):
            return self._assigned(job, results)
        if isinstance(job, ScrubJob):
            self._scrub_budget.spend(SCRUB_BYTES_PER_WRONG_BLOCK * sum(moved.result is TransferResult.CORRUPT for moved in results))
        transfers = [item.transfer for item in job.items]
        return [TransferDone(transfer, moved.result, moved.checksum) for transfer, moved in zip(transfers, results, strict=True)]

    def wake_at(self) -> float | None:
        """When to call `next_jobs` again though nothing happened; None: not needed."""
        return min((budget.allows_at() for budget in self._over), default=None)

    @property
    def idle(self) -> bool:
        """Whether nothing that was added or taken is still to be done, the background check aside. (The core may have more to write.)"""
        waiting = self._checks or self._demand or self._prefetch or self._deletes or self._assigns or self._held
        return not waiting and all(isinstance(job, ScrubJob) for job in self._out)

    @property
    def blocks_out(self) -> int:
        """Blocks being copied now."""
        return sum(len(job.items) for job in self._out if isinstance(job, ReadJob | WriteJob))

    @property
    def reads_queued(self) -> int:
        """Blocks that wait to be copied up."""
        return len(self._demand) + len(self._prefetch)

    def longest_out_s(self, now: float) -> float:
        """For how long the oldest job has been out; a large value means that the disk does not answer."""
        return now - min(self._out.values(), default=now)

    # ---- choosing

    def _next_job(self, now: float) -> Job | None:
        lanes_free = self._limits.lanes - len(self._out)
        room = min(BLOCKS_PER_JOB, self._limits.queue_depth - self.blocks_out)
        if lanes_free <= 0:
            return None
        if demand := self._demand_job(now, room, lanes_free):
            return demand
        if self._limits.lanes > 1 and lanes_free == 1 and not any(isinstance(job, ScrubJob) for job in self._out):
            return None  # kept for whoever waits next; a lane that scrubs is as good as free
        job = self._assign_job() or self._delete_job() or self._sum_job()
        if job is None and room > 0:
            job = self._write_job(now, room) or self._prefetch_job(room) or self._scrub_job(now)
        return job

    def _demand_job(self, now: float, room: int, lanes_free: int) -> Job | None:
        """The oldest loads or hits to verify, spread over the free lanes. A load whose deadline has passed has nobody waiting: a guess.

        Ids of transfers rise with time. A hit past its deadline is verified all the same: others may wait for it by now.
        """
        while self._demand and (first := next(iter(self._demand.values()))).deadline_at <= now:
            self._prefetch[first.transfer] = self._demand.pop(first.transfer)
        if self._checks and (room <= 0 or self._checks[0].transfer < next(iter(self._demand), self._checks[0].transfer + 1)):
            return VerifyJob(self._take_checks(-(-len(self._checks) // lanes_free)))
        return self._read_job(self._demand, min(room, -(-len(self._demand) // lanes_free)))

    def _read_job(self, queue: dict[int, StartRead], most: int) -> Job | None:
        taken: list[StartRead] = []
        left_bytes = BYTES_PER_JOB
        while len(taken) < most and left_bytes > 0 and queue:
            taken.append(queue.pop(next(iter(queue))))
            left_bytes -= self._slot_bytes(taken[-1])
        return ReadJob(tuple(taken)) if taken else None

    def _take_checks(self, share: int) -> tuple[StartVerify, ...]:
        taken: list[StartVerify] = []
        left_bytes = VERIFY_BYTES_PER_JOB
        while len(taken) < share and left_bytes > 0:
            taken.append(self._checks.popleft())
            left_bytes -= self._slot_bytes(taken[-1])
        return tuple(taken)

    def _sum_job(self) -> Job | None:
        sums = self._pulls.next_sums(VERIFY_BYTES_PER_JOB)
        return VerifyJob(tuple(sums)) if sums else None

    def _scrub_job(self, now: float) -> Job | None:
        if self._out or not self._limits.scrub_bytes_per_s:
            return None
        if not self._scrub_budget.allows(now):
            self._over.append(self._scrub_budget)
            return None
        if now < self._scrub_at:
            return None
        scrubs = self._pulls.next_scrubs(SCRUB_BYTES_PER_JOB)
        self._scrub_at = 0.0 if scrubs else now + SCRUB_LOOK_S
        self._scrub_budget.spend(sum(max(SCRUB_LEAST_BYTES, self._slot_bytes(scrub)) for scrub in scrubs))
        return ScrubJob(tuple(scrubs)) if scrubs else None

    def _assign_job(self) -> Job | None:
        ready = [assign for extent, assign in self._assigns.items() if extent not in self._assigns_out]
        for assign in ready:
            del self._assigns[assign.extent]
            self._assigns_out.add(assign.extent)
        return AssignJob(tuple(ready)) if ready else None

    def _delete_job(self) -> Job | None:
        count = min(len(self._deletes), DELETES_PER_JOB)
        return DeleteJob(tuple(self._deletes.popleft() for _ in range(count))) if count else None

    def _write_job(self, now: float, room: int) -> Job | None:
        if not self._budget.allows(now):
            self._over.append(self._budget)
            return None
        ready: list[StartWrite] = []
        waiting: list[StartWrite] = []
        left_bytes = BYTES_PER_JOB
        for write in self._writes(waiting):
            if len(ready) == room or left_bytes <= 0:
                self._held.appendleft(write)
                break
            if self._on_disk(write):
                ready.append(write)
                left_bytes -= self._slot_bytes(write)
            else:
                waiting.append(write)
        self._held.extendleft(reversed(waiting))
        if not ready:
            return self._assign_job()  # what the blocks just taken wait for
        self._budget.spend(sum(self._slot_bytes(write) for write in ready))
        return WriteJob(tuple(ready))

    def _writes(self, waiting: list[StartWrite]) -> Iterator[StartWrite]:
        """Those held, and then what the core has, as far as they are asked for; no more while some wait for their extents."""
        while True:
            while self._held:
                yield self._held.popleft()
            if waiting:
                return
            self._held.extend(self._pulls.next_writes(WRITES_PER_PULL))
            if not self._held:
                return

    def _prefetch_job(self, room: int) -> Job | None:
        return self._read_job(self._prefetch, room)

    # ---- extents

    def _on_disk(self, write: StartWrite) -> bool:
        """Whether the extent of its target holds slots of its size on disk too. One that could not be assigned is tried again."""
        extent = write.target_units // self._limits.extent_units
        if extent in self._assigns_failed:
            self._assigns[extent] = self._assigns_failed.pop(extent)
        return extent not in self._assigns and extent not in self._assigns_out

    def _assigned(self, job: AssignJob, results: Sequence[Moved]) -> list[TransferDone]:
        """Blocks held for an extent that could not be assigned fail as it did."""
        failed: dict[int, TransferResult] = {}
        for assign, moved in zip(job.items, results, strict=True):
            self._assigns_out.discard(assign.extent)
            if moved.result is not TransferResult.OK and assign.extent not in self._assigns:
                self._assigns_failed[assign.extent] = assign
                failed[assign.extent] = moved.result
        extent_units = self._limits.extent_units
        given_up: list[StartWrite] = []
        held: deque[StartWrite] = deque()
        for write in self._held:
            (given_up if write.target_units // extent_units in failed else held).append(write)
        self._held = held
        return [TransferDone(write.transfer, failed[write.target_units // extent_units]) for write in given_up]

    def _slot_bytes(self, item: StartRead | StartWrite | StartVerify) -> int:
        facts = self._namespaces.get(item.namespace)
        return facts.slot_units * UNIT_BYTES if facts else 0
