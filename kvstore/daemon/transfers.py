"""Runs the mover on the event loop: decisions in, jobs out to the lanes, their results back into the cache."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from kvstore.cache.messages import AssignExtent, StartDelete, StartRead, StartVerify, TransferDone
from kvstore.daemon.copier import Copier
from kvstore.daemon.jobs import Job, Moved, Namespaces, ReadJob, ScrubJob, VerifyJob, WriteJob
from kvstore.daemon.lanes import Lanes
from kvstore.daemon.mover import Mover, MoverLimits, Pulls
from kvstore.geometry import UNIT_BYTES


class Transfers:
    """Between dram and nvme, and looks at what lies there; without a disk just looks.

    Its methods are called on the loop; `report` takes what the cache is to be told.
    """

    def __init__(
        self,
        limits: MoverLimits,
        namespaces: Namespaces,
        copier: Copier,
        pulls: Pulls,
        report: Callable[[list[TransferDone]], None],
    ) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()  # by kind and result; a scrub's result is the core's to judge
        self.moved_bytes: Counter[str] = Counter()  # by kind
        self._namespaces = namespaces
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._mover = Mover(limits, namespaces, pulls)
        self._lanes = Lanes(limits.lanes, copier.run, self._deliver)
        self._wake: asyncio.TimerHandle | None = None
        self._due = False  # whether a kick is to come
        self._stopped = False

    def add(self, decision: StartRead | StartVerify | StartDelete | AssignExtent) -> None:
        """Queue one decision; `kick` starts it, or `kick_soon`."""
        self._mover.add(decision)

    def kick_soon(self) -> None:
        """`kick` once what is ready to run by now has run: an answer that waits to be sent leaves first."""
        if not self._due:
            self._due = True
            self._loop.call_soon(self.kick)

    def kick(self) -> None:
        """Start whatever can be started now."""
        self._due = False
        if self._stopped:
            return
        now = self._loop.time()
        for job in self._mover.next_jobs(now):
            self._lanes.submit(job)
        wake_at = self._mover.wake_at()
        if self._wake is not None:
            self._wake.cancel()
        self._wake = self._loop.call_at(max(wake_at, now + 0.001), self.kick) if wake_at is not None else None

    @property
    def idle(self) -> bool:
        """Nothing queued or under way."""
        return self._mover.idle

    @property
    def blocks_out(self) -> int:
        """Blocks being copied now."""
        return self._mover.blocks_out

    @property
    def reads_queued(self) -> int:
        """Blocks that wait to be copied up."""
        return self._mover.reads_queued

    def longest_out_s(self) -> float:
        """For how long the oldest job has been out."""
        return self._mover.longest_out_s(self._loop.time())

    def close(self, timeout_s: float) -> bool:
        """No more jobs; waits for those under way. False where one did not end: the memory must stay mapped."""
        self._stopped = True
        if self._wake is not None:
            self._wake.cancel()
        return self._lanes.close(timeout_s)

    def _deliver(self, job: Job, results: list[Moved]) -> None:
        """Called by a lane."""
        try:
            self._loop.call_soon_threadsafe(self._finished, job, results)
        except RuntimeError:
            return  # the loop is closed: nobody is left to be told

    def _finished(self, job: Job, results: Sequence[Moved]) -> None:
        self._count(job, results)
        reports = self._mover.finished(job, results, self._loop.time())
        self._report(reports)
        self.kick()

    def _count(self, job: Job, results: Sequence[Moved]) -> None:
        kind = type(job).__name__.removesuffix("Job").lower()
        if not isinstance(job, ScrubJob):
            self.counts.update((kind, moved.result.value) for moved in results)
        if isinstance(job, ReadJob | WriteJob | VerifyJob | ScrubJob):
            units = sum(facts.slot_units for item in job.items if (facts := self._namespaces.get(item.namespace)))
            self.moved_bytes[kind] += units * UNIT_BYTES
