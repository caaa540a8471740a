"""The one place where the cache's decisions are carried out. Every input goes in through `Hub.cache`, then `settle` is called.

On the event loop only. Marks come before anything that tells a client of a slot: a daemon that starts again after a crash must know
what the processes of this one may touch.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

from kvstore import errors
from kvstore.cache.core import Cache, CacheStats, TierFigures
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
from kvstore.cache.recovery import Cleared
from kvstore.daemon.corruption import CorruptionLog
from kvstore.daemon.demoter import Demoter
from kvstore.daemon.demotion import Demotion
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
        self.demotion: Demotion | None = None
        self._demoters: dict[str, int] = {}  # the daemon's own session of each tenant, that copies down
        self._dram = dram
        self._loop = asyncio.get_running_loop()
        self._grantees: dict[int, Grantee] = {}
        self._corruption = CorruptionLog()
        self._clears: dict[int, asyncio.Future[None]] = {}
        self._last_clear = 0
        self._clearing: set[asyncio.Task[Any]] = set()
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
            self._settle_pools(self.pools)
        if self.transfers is not None:
            self.transfers.kick_soon()

    def _settle_pools(self, pools: Pools) -> None:
        if pools.settle():
            self._active_at = self.now
        if self.demotion is not None:
            self.demotion.kick()
            while pools.settle():  # leases that it asked for
                self.demotion.kick()
            self._carry_out(self.cache.drain(), None)

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
                    self._corruption.tell(decision, self.now)
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

    def join_group(self, session: int, name: str, namespaces: tuple[int, ...]) -> Done | Refused:
        """Become a member of a group, in dram's core and in those of the session's pools: in all, or in none."""
        cores: list[Cache] = [self.cache, *(self.pools.of(session) if self.pools is not None else ())]
        for core in cores:
            if refused := core.refuses_group(session, name, namespaces):
                return refused
        answer, *_ = [core.join_group(session, name, namespaces) for core in cores]
        self.settle()
        return answer

    def join(self, session: int, grantee: Grantee) -> None:
        """From now on this one is told of the session's grants."""
        self._grantees[session] = grantee

    def detach(self, session: int) -> None:
        """The client has unmapped everything: all holds end now."""
        self.cache.detach(session)
        if self.pools is not None:
            self.pools.detach(session)
        self.settle()

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
        self._corruption.look(self.now)
        for session in self.sessions.gone():
            self.cache.process_gone(session)
            if self.pools is not None:
                self.pools.process_gone(session, self.now)
            self.sessions.forget(session)
        if len(freed := self.sessions.survivors_gone()):
            self.cache.survivors_gone(freed)
        if self.pools is not None:
            for pool in self.pools.collect(self.now):
                self._lost(pool)
        if self.now - self._active_at > IDLE_S:
            for cache in self.caches():
                for broken in cache.check():
                    log.error("a rule of the cache is broken; please report this line and what went before: %s", broken)

    # ---- calls that decide nothing

    def snapshot(self, namespace: int) -> Iterator[list[tuple[str, bytes, bytes]]]:
        """All blocks of a namespace, in pieces with other work between them: (tier, packed hashes, packed parents)."""
        for piece in self.cache.snapshot(namespace):
            yield [(tier.name.lower(), hashes, parents) for tier, hashes, parents in piece]
        if self.pools is not None:
            for found in self.pools.snapshot(namespace):
                yield [("hbm", hashes, parents) for hashes, parents in found]

    # ---- GPU memory

    def use_pools(self, pools: Iterable[GpuPool]) -> None:
        """From now on blocks can be in these GPUs' memory too. Before any namespace is open."""
        self.pools = Pools(pools, self._granted_in, self.notices.publish)
        self.namespaces.also = self.pools.open
        everywhere = list(self.pools.all.values())
        demoter = Demoter(everywhere, self.cache, self._demoter_of)
        self.pools.stored = demoter.stored
        self.demotion = Demotion(demoter, self._dram.memory, self.namespaces.facts, self.settle)

    def _lost(self, pool: GpuPool) -> None:
        """A GPU's context is gone: the daemon goes on without it."""
        log.error("%s: %s; nothing is found there any more, and nothing is put there until the daemon is restarted", pool.name, pool.lost)
        if self.demotion is not None:
            self.demotion.demoter.give_up(pool)

    def _demoter_of(self, tenant: str) -> int:
        """The session under which the daemon copies a tenant's blocks down; 0 where no more sessions may attach."""
        if tenant in self._demoters or self.pools is None or self.demotion is None:
            return self._demoters.get(tenant, 0)
        known = self.sessions.begin(tenant, "(daemon: copies from GPU memory)", maps_arena=False)
        attach = Attach(known.id, tenant, own=True)
        if isinstance(self.attach(attach, dict.fromkeys(self.pools.all, Terms(0, 0))), Refused):
            self.sessions.forget(known.id)
            return 0
        self.join(known.id, self.demotion.demoter)
        self._demoters[tenant] = known.id
        return known.id

    def _granted_in(self, pool: int, granted: Granted) -> None:
        if grantee := self._grantees.get(granted.session):
            grantee.granted(granted, pool)

    def figures(self) -> tuple[CacheStats, dict[str, TierFigures]]:
        """Of dram's core, with the counters of pools; and of every tier, by its name."""
        whole = self.cache.stats()
        tiers = {tier.name.lower(): figures for tier, figures in whole.tiers.items()}
        if self.pools is None:
            return whole, tiers
        counters = Counter(whole.counters)
        counters.update(self.pools.counters())
        if self.demotion is not None:
            counters.update(self.demotion.demoter.counts)
        return replace(whole, counters=dict(counters)), self.pools.figures() | tiers

    def caches(self) -> tuple[Cache, ...]:
        """Dram's core, and those of pools."""
        return (self.cache, *(self.pools.caches() if self.pools is not None else ()))

    async def clear(self, namespaces: tuple[int, ...]) -> tuple[Cleared, int, asyncio.Future[None]]:
        """Remove all blocks: (what went, bytes in GPU memory, a future that is done when the disk has forgotten them).

        It goes on to its end though nobody waits for it any more.
        """
        task = asyncio.create_task(self._clear(namespaces))
        self._clearing.add(task)
        task.add_done_callback(self._clearing.discard)
        return await asyncio.shield(task)

    async def _clear(self, namespaces: tuple[int, ...]) -> tuple[Cleared, int, asyncio.Future[None]]:
        hbm, start = Cleared(0, 0, 0, 0), 1
        removed = hbm
        if self.pools is not None:
            for piece in self.pools.clear_pieces(namespaces, self.cache):
                hbm = hbm.and_also(piece)
                await self._pause()
        while start:
            piece, start = self.cache.clear_piece(namespaces, start)
            removed = removed.and_also(piece)
            await self._pause()
        if self.pools is not None:
            hbm = hbm.and_also(self.pools.clear(namespaces, self.cache))
            self.pools.settle()  # watchers hear of it before they hear that all is cleared
        self._last_clear += 1
        finished = self._clears[self._last_clear] = self._loop.create_future()
        removed = removed.and_also(self.cache.clear(self._last_clear, namespaces))
        self.settle()
        both = replace(removed, blocks=removed.blocks + hbm.blocks, held_blocks=removed.held_blocks + hbm.held_blocks)
        return both, hbm.dram_bytes, finished

    async def _pause(self) -> None:
        """Carry out what a piece of long work has decided, and let others have their turn."""
        self.settle()
        await asyncio.sleep(0)
