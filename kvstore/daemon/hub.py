"""The one place where the cache's decisions are carried out. Every input goes in through `Hub.cache`, then `settle` is called.

On the event loop only. Marks come before anything that tells a client of a slot: a daemon that starts again after a crash must know
what the processes of this one may touch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from kvstore import errors
from kvstore.cache.core import Cache
from kvstore.cache.messages import (
    AssignExtent,
    Attach,
    ClearFinished,
    Corrupted,
    Decision,
    Done,
    Granted,
    Mark,
    Notice,
    Refused,
    SessionEnded,
    StartDelete,
    StartRead,
    StartVerify,
    StartWrite,
    Tier,
    TransferDone,
)
from kvstore.daemon.namespaces import Namespaces
from kvstore.daemon.notices import Notices
from kvstore.daemon.pools import GpuPool, Pools, Terms
from kvstore.daemon.sessions import Sessions
from kvstore.daemon.transfers import Transfers
from kvstore.tiers.dram import DramTier

IDLE_S = 1.0  # seconds without a decision, after which the cache checks itself

log = logging.getLogger(__name__)


class Grantee(Protocol):
    """Whoever is told of a session's grants: its stream, or a call that reads for a client elsewhere."""

    def granted(self, granted: Granted, pool: int = 0) -> None:
        """More blocks of a lease are readable, in a pool's memory or (0) in dram."""

    def ended(self, reason: str) -> None:
        """The session is over."""


class Hub:
    """See the module's text."""

    def __init__(self, cache: Cache, dram: DramTier, epoch: str) -> None:
        self.cache = cache
        self.epoch = epoch
        self.namespaces = Namespaces(cache)
        self.sessions = Sessions(dram)
        self.notices = Notices(epoch, self.namespaces)
        self.transfers: Transfers | None = None  # none until the daemon is put together
        self.pools: Pools | None = None  # none without GPUs
        self._dram = dram
        self._loop = asyncio.get_running_loop()
        self._grantees: dict[int, Grantee] = {}
        self._clears: dict[int, asyncio.Future[None]] = {}
        self._last_clear = 0
        self._active_at = self.now

    @property
    def now(self) -> float:
        """The loop's clock, which all inputs use."""
        return self._loop.time()

    # ---- decisions

    def settle(self, before_grants: Callable[[], None] | None = None) -> None:
        """Carry out all decisions. `before_grants` runs after slots are marked and before any grant goes out."""
        decisions = self.cache.drain()
        if decisions:
            self._active_at = self.now
        self._carry_out(decisions, before_grants)
        if self.pools is not None:
            self.pools.settle()
        if self.transfers is not None:
            self.transfers.kick()

    def next_writes(self, limit: int) -> list[StartWrite]:
        """For the mover: blocks to copy down now."""
        writes = self.cache.next_writes(limit)
        self._carry_out(self.cache.drain(), None)
        return writes

    def transferred(self, reports: list[TransferDone]) -> None:
        """For the mover: what became of transfers."""
        for report in reports:
            self.cache.transfer_done(report, self.now)
        self._carry_out(self.cache.drain(), None)

    def _carry_out(self, decisions: list[Decision], before_grants: Callable[[], None] | None) -> None:
        for decision in decisions:
            if isinstance(decision, Mark):
                self._mark(decision)
        if before_grants is not None:
            before_grants()
        for decision in decisions:
            match decision:
                case Granted():
                    if grantee := self._grantees.get(decision.session):
                        grantee.granted(decision)
                case AssignExtent(tier=Tier.DRAM):
                    self._dram.extent_assigned(decision.extent, decision.slot_units)
                case StartRead() | StartVerify() | StartDelete() | AssignExtent():
                    if self.transfers is not None:
                        self.transfers.add(decision)
                case Notice():
                    self.notices.publish(decision)
                case SessionEnded(session, reason, _):
                    self._ended(session, reason)
                case ClearFinished(clear):
                    if (waiting := self._clears.pop(clear, None)) and not waiting.done():
                        waiting.set_result(None)
                case Corrupted():
                    self._log_corruption(decision)
                    if self.pools is not None:
                        self.pools.forget(decision.namespace, decision.hash)

    def _mark(self, mark: Mark) -> None:
        try:
            self.sessions.mark(mark)
        except errors.ResourceExhausted as error:
            # What cannot be marked must not be granted: the session ends, and its stream drops what it was about to send.
            log.error("session %d: %s", mark.session, error)
            self._loop.call_soon(self.end_session, mark.session, str(error))
            if grantee := self._grantees.pop(mark.session, None):
                grantee.ended(str(error))

    def _log_corruption(self, corrupted: Corrupted) -> None:
        log.error(
            "corrupt block %s in %s at unit %d, found by %s: removed everywhere; %s",
            corrupted.hash.hex(),
            corrupted.tier.name.lower(),
            corrupted.units,
            corrupted.found_by,
            _advice(corrupted),
            extra={"namespace": corrupted.namespace, "story": corrupted.story},
        )

    # ---- sessions

    def attach(self, request: Attach, terms: Mapping[int, Terms]) -> Done | Refused:
        """Attach a session in dram's core and in those of pools (`terms`, by number): in all, or in none."""
        others = self.pools.attaches(request, terms) if self.pools is not None else []
        for cache, each in others:
            if refused := cache.refuses(each):
                return refused
        answer = self.cache.attach(request, self.now)
        if not isinstance(answer, Refused):
            for cache, each in others:
                cache.attach(each, self.now)
        return answer

    def join(self, session: int, grantee: Grantee) -> None:
        """From now on this one is told of the session's grants."""
        self._grantees[session] = grantee

    def end_session(self, session: int, reason: str) -> None:
        """The session's stream is gone, or must go."""
        self.cache.session_lost(session, reason)
        self.settle()

    def _ended(self, session: int, reason: str) -> None:
        known = self.sessions.get(session)
        if known is not None:
            known.ended = True
            log.info("session %d ended: %s", session, reason, extra={"client": known.client, "tenant": known.tenant})
        if grantee := self._grantees.pop(session, None):
            grantee.ended(reason)
        if self.pools is not None:
            self.pools.session_ended(session, reason)

    def beat(self) -> None:
        """An open stream is a sign of life: grpc's own keep-alive closes it when the other side is silent for too long."""
        for session in self._grantees:
            self.cache.heard(session, self.now)

    def collect(self) -> None:
        """Free what the dead have left. A few times a second."""
        for session in self.sessions.gone():
            self.cache.process_gone(session)
            if self.pools is not None:
                self.pools.process_gone(session, self.now)
            self.sessions.forget(session)
        if len(freed := self.sessions.survivors_gone()):
            self.cache.survivors_gone(freed)
        if self.pools is not None:
            self.pools.collect(self.now)
        if self.now - self._active_at > IDLE_S:
            for cache in (self.cache, *(self.pools.caches() if self.pools is not None else ())):
                for broken in cache.check():
                    log.error("a rule of the cache is broken; please report this line and what went before: %s", broken)

    # ---- calls that decide nothing

    def snapshot(self, namespace: int) -> Iterator[tuple[str, bytes, bytes]]:
        """All blocks of a namespace, in pieces: (tier, packed hashes, packed parents)."""
        for tier, hashes, parents in self.cache.snapshot(namespace):
            yield tier.name.lower(), hashes, parents
        if self.pools is not None:
            for hashes, parents in self.pools.snapshot(namespace):
                yield "hbm", hashes, parents

    def use_pools(self, pools: Iterable[GpuPool]) -> Pools:
        """From now on blocks can be in these GPUs' memory too. Before any namespace is open."""
        self.pools = Pools(pools, self._granted_in, self.notices.publish)
        self.namespaces.also = self.pools.open
        return self.pools

    def _granted_in(self, pool: int, granted: Granted) -> None:
        if grantee := self._grantees.get(granted.session):
            grantee.granted(granted, pool)

    def start_clear(self, namespaces: tuple[int, ...]) -> tuple[int, int, int, int, asyncio.Future[None]]:
        """Remove all blocks: (blocks, dram bytes, nvme bytes, still held, a future that is done when the disk has forgotten them)."""
        self._last_clear += 1
        finished: asyncio.Future[None] = self._loop.create_future()
        self._clears[self._last_clear] = finished
        cleared = self.cache.clear(self._last_clear, namespaces)
        self.settle()
        return cleared.blocks, cleared.dram_bytes, cleared.nvme_bytes, cleared.held_blocks, finished


def _advice(corrupted: Corrupted) -> str:
    if corrupted.tier is Tier.DRAM:
        if not corrupted.quarantine:
            return "a client wrote other bytes than its checksum says"
        return "its slot is in quarantine: a process wrote into memory that was not its own, or the memory is bad"
    if not corrupted.quarantine:
        return "the last stop was not clean, so its write may have been cut short"
    return "its slot is in quarantine; check the disk"
