"""Runs the demoter on the event loop: its copies in threads, a few a GPU, so that one that hangs keeps no other GPU's waiting."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from kvstore.cache.messages import TransferResult
from kvstore.checksum import block_checksum
from kvstore.daemon.demoter import JOBS_PER_POOL, Block, DemoteJob, Demoter
from kvstore.daemon.jobs import Moved, Namespaces
from kvstore.daemon.lanes import Lanes
from kvstore.errors import KVStoreError
from kvstore.geometry import UNIT_BYTES

LAST_COPIES_S = 1.0  # seconds for copies that are under way at the end: a GPU that is well takes milliseconds

_FAILED = Moved(TransferResult.FAILED)

log = logging.getLogger(__name__)


class Demotion:
    """Its methods are called on the loop; `settle` is called when copies have ended and the caches are told."""

    def __init__(self, demoter: Demoter, memory: memoryview, facts: Namespaces, settle: Callable[[], None]) -> None:
        """`memory`: the dram arena."""
        self.demoter = demoter
        self.counts: Counter[str] = Counter()  # blocks by result
        self.moved_bytes = 0
        self._memory, self._facts, self._settle = memory, facts, settle
        self._loop = asyncio.get_running_loop()
        self._lanes = {pool.number: Lanes(JOBS_PER_POOL, self._run, self._deliver) for pool in demoter.pools}
        self._stopped = False

    def kick(self) -> None:
        """Start whatever can be started now."""
        if not self._stopped:
            for job in self.demoter.next_jobs(self._loop.time()):
                self._lanes[job.pool.number].submit(job)

    def longest_out_s(self, pool: int) -> float:
        """For how long the oldest copy of a pool has been under way."""
        return self.demoter.longest_out_s(pool, self._loop.time())

    def close(self, deadline: float) -> bool:
        """No more copies; waits for those under way, a second past the deadline (monotonic) if need be.

        False where one did not end: the memory must stay mapped.
        """
        self._stopped = True
        ends_at = max(deadline, time.monotonic() + LAST_COPIES_S)
        ended = [lanes.close(max(0.0, ends_at - time.monotonic())) for lanes in self._lanes.values()]
        return all(ended)

    # ---- in a lane

    def _run(self, job: DemoteJob) -> list[Moved]:
        """Neighbours in the pool in one call; where that fails, one for each, so that a fault costs only itself."""
        results: dict[Block, Moved] = {}
        try:
            for run in _runs(job.items, self._facts[job.namespace].slot_units):
                whole = self._copied(job, run)
                if len(run) > 1 and whole[0].result is not TransferResult.OK:
                    whole = [self._copied(job, [block])[0] for block in run]
                results.update(zip(run, whole, strict=True))
        except Exception:  # a thread's edge: a lane that died would take the pool's copies with it
            log.exception("%s: a copy down failed", job.pool.name)
        return [results.get(block, _FAILED) for block in job.items]

    def _copied(self, job: DemoteJob, run: Sequence[Block]) -> list[Moved]:
        facts = self._facts[job.namespace]
        starts = [block.target[0] * UNIT_BYTES for block in run]
        try:
            job.pool.tier.read(run[0].units * UNIT_BYTES, [self._memory[at : at + facts.slot_units * UNIT_BYTES] for at in starts])
        except KVStoreError as error:
            log.debug("%s: %s", job.pool.name, error)  # the tier's health says it
            return [_FAILED] * len(run)
        views = [self._memory[at : at + facts.block_bytes] for at in starts]
        sums = [block_checksum(facts.digest, block.hash, view) for block, view in zip(run, views, strict=True)]
        return [Moved(TransferResult.OK, each) for each in sums]

    def _deliver(self, job: DemoteJob, results: list[Moved]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._finished, job, results)
        except RuntimeError:
            return  # the loop is closed: nobody is left to be told

    # ---- on the loop

    def _finished(self, job: DemoteJob, results: list[Moved]) -> None:
        self.counts.update(moved.result.value for moved in results)
        self.moved_bytes += len(results) * self._facts[job.namespace].slot_units * UNIT_BYTES
        self.demoter.finished(job, results, self._loop.time())
        self._settle()


def _runs(blocks: Sequence[Block], slot_units: int) -> Iterator[list[Block]]:
    """Those that lie next to each other in the pool together."""
    run: list[Block] = []
    for block in sorted(blocks, key=lambda each: each.units):
        if run and block.units != run[-1].units + slot_units:
            yield run
            run = []
        run.append(block)
    if run:
        yield run
