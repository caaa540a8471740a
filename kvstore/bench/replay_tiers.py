"""A trace through the real cache core, over tiers that hold no bytes: what a daemon of this size would have found, moved and evicted.

Time is the trace's own. A prompt leases what is stored when it arrives, waits for the blocks that come up from nvme, then commits the rest
of its blocks and lets go; computing and decoding take no time. Nvme is two lanes, one of reads and one of writes: a transfer ends its own
bytes' time after the one before it in its lane. Records are deleted at once. Every block has one slot of one unit, so that capacities are
counted in blocks and no trace is too large for the addresses.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore.bench.replay_machine import Machine
from kvstore.bench.replay_optimum import Foresight
from kvstore.bench.replay_trace import BLOCK_TOKENS, Request, Trace
from kvstore.cache.core import Cache
from kvstore.cache.messages import (
    UNIT_BYTES,
    Abandon,
    Acquire,
    Attach,
    BlockOutcome,
    Commit,
    Committed,
    Decision,
    Granted,
    NamespaceSpec,
    Refused,
    Release,
    Reserve,
    Reserved,
    StartDelete,
    StartRead,
    StartWrite,
    Tier,
    TransferDone,
    TransferResult,
)
from kvstore.cache.state import CacheSizes
from kvstore.errors import InternalFault

QUEUE_DEPTH = 16  # writes under way at once: the daemon's default
OPTIMUM = "optimum"  # the policy that knows the future; only here

_SESSION = 1  # the only one
_TENANT = "replay"
_ROOT = np.zeros((1, 4), np.uint64)
_SPARE_ROWS = 8  # index rows: the fingerprint's, and those that a commit wants free
_CHECKSUM = (1, 1)  # no bytes, so any will do


@dataclass(frozen=True)
class Setup:
    """One row of the table: how many blocks each tier holds, and who is evicted."""

    dram_blocks: int
    nvme_blocks: int = 0
    eviction: str = "lru"
    nvme_write: str = "through"


@dataclass
class Outcome:
    """What came of one replay. Blocks are counted as the trace counts them, a last one that is not full like the others."""

    dram_hit_blocks: int = 0
    nvme_hit_blocks: int = 0
    stored_blocks: int = 0
    cold_s: float = 0.0  # to the first token, summed over all requests
    warm_s: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)


@dataclass
class _Lane:
    """One direction of the disk."""

    seconds_per_block: float
    free_at: float = 0.0

    def ends_at(self, now: float) -> float:
        self.free_at = max(now, self.free_at) + self.seconds_per_block
        return self.free_at


@dataclass
class _Waiting:
    """A request between its arrival and its last grant."""

    request: Request
    in_dram: NDArray[np.bool_]  # which of the blocks found were in dram on arrival
    granted: int = 0


class Replay:
    """Feeds one trace into one cache. `after_step` is called when the cache has settled after each event; tests look at the rules there."""

    def __init__(self, trace: Trace, setup: Setup, machine: Machine, after_step: Callable[[Cache], None] | None = None) -> None:
        self.trace, self.machine = trace, machine
        self.outcome = Outcome()
        self._after_step = after_step
        self._foresight = Foresight(trace) if setup.eviction == OPTIMUM else None
        self.cache = Cache(_sizes(trace, setup), self._foresight.policy if self._foresight else None)
        namespace = self.cache.open_namespace(NamespaceSpec(_TENANT, bytes(32), 1, UNIT_BYTES, block_tokens=BLOCK_TOKENS))
        if isinstance(namespace, Refused):
            raise InternalFault(f"replay: {namespace.text}")
        self._namespace = namespace
        self.cache.attach(Attach(_SESSION, _TENANT), 0.0)
        self._reads = _Lane(machine.block_bytes / machine.nvme_read_bytes_per_s)
        self._writes = _Lane(machine.block_bytes / machine.nvme_write_bytes_per_s)
        self._writing: set[int] = set()  # transfers
        self._events: list[tuple[float, int]] = []  # (ends at, transfer), a heap
        self._deadlines: deque[tuple[float, int]] = deque()  # (at, lease) of the requests that wait
        self._waiting: dict[int, _Waiting] = {}  # by lease
        self._disk = bool(setup.nvme_blocks)
        self._now = 0.0

    def run(self) -> Outcome:
        """All of the trace, and the writes that are still under way at its end."""
        for number, request in enumerate(self.trace.requests):
            self._pass_time(request.at_s)
            self._arrive(number, request)
            self._settle()
        self._pass_time(float("inf"))
        self.outcome.counters = self.cache.stats().counters
        return self.outcome

    # ---- time

    def _pass_time(self, until: float) -> None:
        """Everything that happens before `until`, in order."""
        while True:
            transfer_at = self._events[0][0] if self._events else float("inf")
            deadline_at = self._deadlines[0][0] if self._deadlines else float("inf")
            at = min(transfer_at, deadline_at)
            if at > until or at == float("inf"):
                return
            self._now = at
            if transfer_at <= deadline_at:
                transfer = heapq.heappop(self._events)[1]
                self._writing.discard(transfer)
                self.cache.transfer_done(TransferDone(transfer, TransferResult.OK, _CHECKSUM), at)
            else:
                lease = self._deadlines.popleft()[1]
                if lease not in self._waiting:
                    continue
                self.cache.tick(at)
            self._settle()

    def _settle(self) -> None:
        """Carry out decisions until there are none."""
        while decisions := [*self.cache.drain(), *self._pulled()]:
            for decision in decisions:
                self._carry_out(decision)
        if self._after_step:
            self._after_step(self.cache)

    def _pulled(self) -> list[StartWrite]:
        """What the disk takes on now of the blocks to be written."""
        room = QUEUE_DEPTH - len(self._writing) if self._disk else 0
        return self.cache.next_writes(room) if room else []

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Granted(lease=lease):
                self._waiting[lease].granted += decision.units.shape[1]
                if decision.ended is not None:
                    self._finish(lease, self._waiting.pop(lease))
            case StartRead():
                heapq.heappush(self._events, (self._reads.ends_at(self._now), decision.transfer))
            case StartWrite():
                self._writing.add(decision.transfer)
                heapq.heappush(self._events, (self._writes.ends_at(self._now), decision.transfer))
            case StartDelete():
                self.cache.transfer_done(TransferDone(decision.transfer, TransferResult.OK), self._now)
            case _:
                pass

    # ---- one request

    def _arrive(self, number: int, request: Request) -> None:
        self._now = request.at_s
        hashes = self.trace.hashes[request.blocks]
        if self._foresight:
            self._foresight.arrives(number)
        looked = self.cache.lookup(_TENANT, self._namespace, "", hashes)
        if isinstance(looked, Refused):
            raise InternalFault(f"replay: {looked.text}")
        lease, deadline_at = number + 1, self._now + self.machine.acquire_timeout_s
        self._waiting[lease] = _Waiting(request, looked.tiers[0] == Tier.DRAM)
        acquired = self.cache.acquire(Acquire(_SESSION, lease, hashes, deadline_at, self._namespace), self._now)
        if isinstance(acquired, Refused):
            raise InternalFault(f"replay: {acquired.text}")
        self._deadlines.append((deadline_at, lease))

    def _finish(self, lease: int, done: _Waiting) -> None:
        """All that will be granted is: count it, store the rest, let go."""
        request, outcome = done.request, self.outcome
        from_dram = int(np.count_nonzero(done.in_dram[: done.granted]))
        outcome.dram_hit_blocks += from_dram
        outcome.nvme_hit_blocks += done.granted - from_dram
        outcome.cold_s += self.machine.cold_s(request.input_tokens)
        outcome.warm_s += self.machine.warm_s(request.input_tokens, done.granted, self._now - request.at_s)
        if done.granted < len(request.blocks):
            self._store(lease, request, done.granted)
        self.cache.release(Release(_SESSION, lease))

    def _store(self, lease: int, request: Request, first: int) -> None:
        """Commit the blocks from `first` on, as many as there is room for."""
        hashes = self.trace.hashes[request.blocks]
        reserved = self.cache.reserve(Reserve(_SESSION, lease, self._namespace, len(hashes) - first))
        got = int(np.count_nonzero(reserved.outcomes == BlockOutcome.SLOT)) if isinstance(reserved, Reserved) else 0
        if not isinstance(reserved, Reserved) or not got:
            return
        parents = hashes[first - 1 : first] if first else _ROOT
        new = hashes[first : first + got]
        commit = Commit(_SESSION, lease, self._namespace, reserved.units[:got], reserved.generations[:got], new, parents)
        committed = self.cache.commit(commit)
        stored = int(np.count_nonzero(committed.outcomes == BlockOutcome.STORED)) if isinstance(committed, Committed) else 0
        self.outcome.stored_blocks += stored
        if stored < got:  # somebody else was faster, or the index is full of held blocks
            self.cache.abandon(Abandon(_SESSION, lease))


def _sizes(trace: Trace, setup: Setup) -> CacheSizes:
    """One extent a tier: all blocks are of one size. Silence ends no session here."""
    return CacheSizes(
        dram_bytes=setup.dram_blocks * UNIT_BYTES,
        dram_extent_bytes=setup.dram_blocks * UNIT_BYTES,
        nvme_bytes=setup.nvme_blocks * UNIT_BYTES,
        nvme_extent_bytes=setup.nvme_blocks * UNIT_BYTES,
        index_blocks=max(trace.distinct_blocks, setup.dram_blocks, setup.nvme_blocks) + _SPARE_ROWS,
        nvme_write=setup.nvme_write,
        seed=1,
        silence_s=float("inf"),
        eviction="lru" if setup.eviction == OPTIMUM else setup.eviction,
    )
