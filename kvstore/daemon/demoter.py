"""Copies down from GPU memory: which of the blocks that were committed in a pool go to dram next. Sans-I/O; on the event loop.

Every block that becomes visible in a pool, and is not in dram, is queued. The next ones are held by leases of the daemon's own session, up
to a share of the pool; the rest wait, and may be evicted meanwhile. A block gets a slot in dram when its copy begins, its checksum there
when its bytes have arrived, and from there it goes to disk as any other. What cannot be done now is tried again, not for ever.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstore.cache.core import Cache
from kvstore.cache.messages import (
    HASH_BYTES,
    UNIT_BYTES,
    Abandon,
    Acquire,
    BlockOutcome,
    Commit,
    Committed,
    Granted,
    KeepKind,
    Notice,
    Refused,
    Release,
    Reserve,
    Reserved,
    TransferResult,
    unpack_hashes,
)
from kvstore.daemon.jobs import Moved
from kvstore.daemon.pools import GpuPool

HELD_SHARE = 4  # a quarter of a pool may be held for copies down: the rest is for those who compute
MAX_RUNS = 8192  # leases: half of what a session may have
MAX_QUEUED = 65_536  # blocks that wait for their copy: some MB of hashes
BLOCKS_PER_JOB = 32  # blocks: of small ones enough to pay for a thread's hand-over
BYTES_PER_JOB = 16 << 20  # 16 MiB: under a millisecond of a bus. One block at least
JOBS_PER_POOL = 2  # copies of one pool under way at once: while one takes checksums the other copies
RETRY_S = 0.5  # seconds until a block is tried again that could not be copied now
MAX_TRIES = 20  # times: ten seconds, after which its place in dram is not worth waiting for


@dataclass(eq=False)
class _Run:
    """Neighbours of one chain, held together by one lease once `granted`."""

    pool: GpuPool
    namespace: int
    hashes: list[bytes]
    parents: list[bytes]
    lease: int = 0
    left: int = 0  # blocks whose copy has neither been made nor been given up


@dataclass(eq=False)
class Block:
    """One block of a run, held at `units` of its pool. `target`: its slot in dram (units, generation) once it has one."""

    run: _Run
    hash: bytes
    parent: bytes
    units: int
    tries: int = 0
    target: tuple[int, int] = (0, 0)


@dataclass(frozen=True, eq=False)
class DemoteJob:
    """Blocks of one namespace to copy from a pool to their slots in dram, one after another."""

    pool: GpuPool
    namespace: int
    items: tuple[Block, ...]
    reservation: int


@dataclass
class _Queue:
    """Of one pool."""

    waiting: deque[_Run] = field(default_factory=deque)  # not held
    asked: dict[int, _Run] = field(default_factory=dict)  # by lease: being granted
    ready: deque[Block] = field(default_factory=deque)  # held
    later: deque[tuple[float, Block]] = field(default_factory=deque)  # held, and when to try again
    out: dict[DemoteJob, float] = field(default_factory=dict)  # and since when
    held_bytes: int = 0
    runs: int = 0  # held, each by a lease
    queued: int = 0  # blocks in all of these


class Demoter:
    """See the module's text. `own` answers the daemon's own session of a tenant, attached everywhere; 0 where there is none to be had."""

    def __init__(self, pools: Sequence[GpuPool], dram: Cache, own: Callable[[str], int]) -> None:
        self.counts: Counter[str] = Counter()
        self._dram, self._own = dram, own
        self._queues = {pool.number: _Queue() for pool in pools}
        self.pools = tuple(pools)
        self._last_id = 0

    @property
    def idle(self) -> bool:
        """Nothing is queued or under way."""
        return not any(queue.queued for queue in self._queues.values())

    @property
    def waiting(self) -> int:
        """Blocks that are queued, or on their way."""
        return sum(queue.queued for queue in self._queues.values())

    def longest_out_s(self, pool: int, now: float) -> float:
        """For how long the oldest copy of a pool has been under way."""
        return now - min(self._queues[pool].out.values(), default=now)

    # ---- in

    def stored(self, pool: GpuPool, notice: Notice) -> None:
        """Blocks became visible in a pool. Those that dram has too came from there."""
        hashes = unpack_hashes(notice.hashes)
        missing = np.flatnonzero(~self._dram.has(notice.namespace, hashes)).tolist()
        cut = [slice(HASH_BYTES * at, HASH_BYTES * (at + 1)) for at in missing]
        names, parents = [notice.hashes[each] for each in cut], [notice.parents[each] for each in cut]
        queue = self._queues[pool.number]
        room = max(0, MAX_QUEUED - queue.queued)
        self._drop(len(names) - room)
        queue.queued += min(room, len(names))
        whole = self._dram.state.keep(notice.namespace).kind is KeepKind.ALL  # else a lease on neighbours has holes
        start = 0
        for end in range(1, min(room, len(names)) + 1):
            if end < min(room, len(names)) and whole and parents[end] == names[end - 1]:
                continue
            queue.waiting.append(_Run(pool, notice.namespace, names[start:end], parents[start:end]))
            start = end
        self._hold(queue)

    def granted(self, granted: Granted, pool: int = 0) -> None:
        """The lease on a run: those of its blocks that were not evicted meanwhile."""
        queue = self._queues[pool]
        run = queue.asked.pop(granted.lease, None)
        if run is None:
            return
        units = granted.units[0].tolist()
        missed = len(run.hashes) - len(units)
        self._drop(missed)
        queue.queued -= missed
        queue.held_bytes -= missed * self._slot_bytes(run)
        run.left = len(units)
        queue.ready.extend(Block(run, *each) for each in zip(run.hashes, run.parents, units, strict=False))
        if not units:
            self._release(queue, run)

    def ended(self, reason: str) -> None:
        """The daemon's own session does not end before it."""

    # ---- out

    def next_jobs(self, now: float) -> list[DemoteJob]:
        """The copies to start now; call after anything happened, and a few times a second."""
        jobs: list[DemoteJob] = []
        for queue in self._queues.values():
            while queue.later and queue.later[0][0] <= now:
                queue.ready.append(queue.later.popleft()[1])
            self._hold(queue)
            while queue.ready and len(queue.out) < JOBS_PER_POOL and (job := self._job(queue, now)):
                queue.out[job] = now
                jobs.append(job)
        return jobs

    def finished(self, job: DemoteJob, results: Sequence[Moved], now: float) -> None:
        """A job's copies are made, or not. What the pool no longer has where it was copied from is not made visible: it was cleared, and
        a block of that name that lies elsewhere by now is another one.
        """
        queue = self._queues[job.pool.number]
        del queue.out[job]
        there = job.pool.cache.units(job.namespace, unpack_hashes(b"".join(block.hash for block in job.items)))
        good = []
        for block, moved, units in zip(job.items, results, there.tolist(), strict=True):
            if moved.result is not TransferResult.OK or moved.checksum is None:
                self.counts["failed_from_hbm"] += 1
                self._again(queue, block, now)
            elif units == block.units:
                good.append((block, moved.checksum))
            else:
                self._done(queue, block)
        self._commit(job, good)
        for block, _ in good:
            self._done(queue, block)

    def give_up(self, pool: GpuPool) -> None:
        """Its GPU is lost: nothing more comes from there. Copies that are under way end by themselves."""
        queue = self._queues[pool.number]
        blocks = [*queue.ready, *(block for _, block in queue.later)]
        queue.ready.clear()
        queue.later.clear()
        for block in blocks:
            self._drop(1)
            self._done(queue, block)
        waiting = sum(len(run.hashes) for run in queue.waiting)
        queue.waiting.clear()
        queue.queued -= waiting
        self._drop(waiting)

    # ---- steps

    def _hold(self, queue: _Queue) -> None:
        """Ask for leases on what waits, as far as the share goes."""
        while queue.waiting and queue.runs < MAX_RUNS:
            run = queue.waiting[0]
            share = run.pool.cache.state.dram.capacity_bytes // HELD_SHARE
            fit = max((share - queue.held_bytes) // self._slot_bytes(run), 0 if queue.held_bytes else 1)
            if not fit:
                return
            queue.waiting.popleft()
            if fit < len(run.hashes):
                rest = _Run(run.pool, run.namespace, run.hashes[fit:], run.parents[fit:])
                queue.waiting.appendleft(rest)
                run = _Run(run.pool, run.namespace, run.hashes[:fit], run.parents[:fit])
            self._ask(queue, run)

    def _ask(self, queue: _Queue, run: _Run) -> None:
        run.lease = self._new_id()
        session, cache = self._session(run), run.pool.cache
        request = Acquire(session, run.lease, unpack_hashes(b"".join(run.hashes)), cache.state.now, run.namespace)
        answer = cache.acquire(request, cache.state.now) if session else None
        if answer is None or isinstance(answer, Refused) or not answer.expected:
            cache.release(Release(session, run.lease))
            queue.queued -= len(run.hashes)
            self._drop(len(run.hashes))
            return
        queue.asked[run.lease] = run
        queue.runs += 1
        queue.held_bytes += len(run.hashes) * self._slot_bytes(run)

    def _job(self, queue: _Queue, now: float) -> DemoteJob | None:
        """The next blocks of one namespace, with slots in dram; None where none of these could get one now."""
        first = queue.ready[0].run
        most = min(BLOCKS_PER_JOB, max(1, BYTES_PER_JOB // self._slot_bytes(first)))
        taken: list[Block] = []
        while queue.ready and len(taken) < most and queue.ready[0].run.namespace == first.namespace:
            taken.append(queue.ready.popleft())
        reservation, session = self._new_id(), self._session(first)
        names = unpack_hashes(b"".join(block.hash for block in taken))
        answer = self._dram.reserve(Reserve(session, reservation, first.namespace, hashes=names))
        if not isinstance(answer, Reserved):
            for block in taken:
                self._again(queue, block, now)
            return None
        items = []
        columns = [each.tolist() for each in (answer.outcomes, answer.units, answer.generations)]
        for block, outcome, *slot in zip(taken, *columns, strict=True):
            if outcome == BlockOutcome.SLOT:
                block.target = (slot[0], slot[1])
                items.append(block)
            elif outcome == BlockOutcome.EXISTS:
                self._done(queue, block)
            else:
                self._again(queue, block, now)
        return DemoteJob(first.pool, first.namespace, tuple(items), reservation) if items else None

    def _commit(self, job: DemoteJob, good: list[tuple[Block, tuple[int, int]]]) -> None:
        """Make what arrived visible in dram, and give back the slots of the rest."""
        session, blocks = self._session(job.items[0].run), [block for block, _ in good]
        if good:
            units, generations = np.array([block.target for block in blocks], np.uint32).T
            hashes, parents = (unpack_hashes(b"".join(each)) for each in ([b.hash for b in blocks], [b.parent for b in blocks]))
            sums = np.array([checksum for _, checksum in good], np.uint64)
            lease, tokens = self._new_id(), job.pool.cache.tokens(job.namespace, hashes)
            answer = self._dram.commit(Commit(session, lease, job.namespace, units, generations, hashes, parents, sums, tokens))
            self._dram.release(Release(session, lease))
            if isinstance(answer, Committed):
                self.counts["demoted_from_hbm"] += int((answer.outcomes == BlockOutcome.STORED).sum())
        self._dram.abandon(Abandon(session, job.reservation))

    def _again(self, queue: _Queue, block: Block, now: float) -> None:
        block.tries += 1
        if block.tries < MAX_TRIES and not block.run.pool.lost:
            queue.later.append((now + RETRY_S, block))
        else:
            self._drop(1)
            self._done(queue, block)

    def _done(self, queue: _Queue, block: Block) -> None:
        """Nothing is to be done about this block any more."""
        queue.queued -= 1
        queue.held_bytes -= self._slot_bytes(block.run)
        block.run.left -= 1
        if not block.run.left:
            self._release(queue, block.run)

    def _release(self, queue: _Queue, run: _Run) -> None:
        queue.runs -= 1
        run.pool.cache.release(Release(self._session(run), run.lease))

    def _drop(self, count: int) -> None:
        """So many are only in GPU memory, and stay there until they are evicted."""
        if count > 0:
            self.counts["dropped_from_hbm"] += count

    def _session(self, run: _Run) -> int:
        return self._own(self._dram.state.spec(run.namespace).tenant)

    def _slot_bytes(self, run: _Run) -> int:
        return self._dram.state.spec(run.namespace).slot_units * UNIT_BYTES

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id
