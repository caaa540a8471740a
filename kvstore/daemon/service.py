"""The service: each call is checked, translated, put to the cache, and answered. Nothing is decided here. On the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio
import numpy as np
from numpy.typing import NDArray

from kvstore import __version__, errors
from kvstore.cache.core import TierFigures
from kvstore.cache.messages import HASH_BYTES, MAX_BLOCKS_PER_BATCH, Looked, Refused
from kvstore.config import Settings
from kvstore.daemon import wire
from kvstore.daemon.byte_calls import ByteCalls, in_time
from kvstore.daemon.explaining import Asked, Few, explain, list_namespaces
from kvstore.daemon.hub import Hub
from kvstore.daemon.namespaces import KnownNamespace
from kvstore.daemon.rpc import UNIX_TENANT, tenant_of
from kvstore.daemon.streams import SessionLimits, SessionStream
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.kvstore_pb2_grpc import KVStoreServicer
from kvstore.tiers.base import Health
from kvstore.tiers.dram import DramTier

CLEAR_TIMEOUT_S = 60.0  # seconds until a Clear is told that the disk does not keep up; the blocks cannot be found any more even so
NO_FIGURES = TierFigures(0, {}, 0, 0)  # of a tier that was asked for and is not there: its health says why
PREFETCH_S = 30.0  # seconds that a guess is worth waiting for

Context = grpc.aio.ServicerContext[Any, Any]
Remember = Callable[[KnownNamespace], Awaitable[None]]


class Service(KVStoreServicer):
    """See the module's text, and kvstore.proto for the calls."""

    def __init__(self, hub: Hub, dram: DramTier, settings: Settings, remember: Remember, health: Callable[[], dict[str, Health]]) -> None:
        """`remember` returns when a namespace's facts are on disk; `health` answers every tier's."""
        self.block_counts: Counter[tuple[str, str]] = Counter()  # by operation and outcome
        self.bytes = ByteCalls(hub, dram.memory)
        self._wondering = Few()
        self._hub = hub
        self._dram = dram
        self._settings = settings
        self._remember = remember
        self._health = health
        self._streams: dict[SessionStream, None] = {}  # a set in order of arrival: a simulation replays exactly
        self._started_at = time.monotonic()

    # ---- namespaces, groups, sessions

    async def OpenNamespace(self, request: pb.OpenNamespaceRequest, context: Context) -> pb.OpenNamespaceReply:  # noqa: N802
        namespace = self._hub.namespaces.open(tenant_of(context), request)
        await self._remember(namespace)
        geometry = namespace.geometry
        return pb.OpenNamespaceReply(
            epoch=self._hub.epoch,
            namespace_id=namespace.id,
            digest=namespace.digest,
            slot_bytes=geometry.slot_bytes,
            block_bytes=geometry.block_bytes,
            tails=namespace.tails,
        )

    async def JoinGroup(self, request: pb.JoinGroupRequest, context: Context) -> pb.JoinGroupReply:  # noqa: N802
        self._check_epoch(request.epoch)
        if len(request.namespace_ids) > wire.MAX_GROUP_MEMBERS:
            raise errors.LimitExceeded(f"{len(request.namespace_ids)} namespaces in a group, the most is {wire.MAX_GROUP_MEMBERS}")
        session = self._hub.sessions.get(request.session)
        if session is None or session.tenant != tenant_of(context) or session.ended:
            raise errors.SessionEnded(f"session {request.session} is not attached; attach first")
        answer = self._hub.join_group(session.id, wire.text_of(request.group, "group"), tuple(request.namespace_ids))
        if isinstance(answer, Refused):
            raise wire.refusal(answer)
        return pb.JoinGroupReply(epoch=self._hub.epoch)

    async def Attach(self, request_iterator: AsyncIterator[pb.ClientMessage], context: Context) -> None:  # noqa: N802
        limits = SessionLimits(self._settings.acquire_timeout_s, self._settings.session.limit_bytes)
        stream = SessionStream(self._hub, self._dram, tenant_of(context), limits, self.block_counts)
        self._streams[stream] = None
        try:
            await stream.serve(request_iterator, context.write)
        finally:
            del self._streams[stream]

    def shut_down_streams(self) -> None:
        """Tell every session that the daemon stops."""
        for stream in list(self._streams):
            stream.shut_down()

    # ---- blocks

    async def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupReply:  # noqa: N802
        self._check_epoch(request.epoch)
        if not request.group:
            codes = self._leading(tenant_of(context), request.namespace_id, request.hashes)
            return pb.LookupReply(epoch=self._hub.epoch, blocks=len(codes), tiers=[codes])
        found = self._lookup(tenant_of(context), request.namespace_id, wire.text_of(request.group, "group"), request.hashes)
        return pb.LookupReply(epoch=self._hub.epoch, blocks=found.blocks, tiers=[tiers.tobytes() for tiers in found.tiers])

    def look(self, namespace_id: int, epoch: str, hashes: bytes) -> bytes:
        """`Lookup` of one namespace for a caller on this machine: the tiers of the leading blocks that are here."""
        self._check_epoch(epoch)
        return self._leading(UNIX_TENANT, namespace_id, hashes)

    def _leading(self, tenant: str, namespace_id: int, hashes: bytes) -> bytes:
        """The tiers of the leading blocks of one namespace."""
        whole = len(hashes) % HASH_BYTES == 0 and 0 < len(hashes) <= HASH_BYTES * MAX_BLOCKS_PER_BATCH
        if not whole or self._hub.pools is not None:
            found = self._lookup(tenant, namespace_id, "", hashes)
            return found.tiers[0][: found.blocks].tobytes()
        codes = self._hub.cache.leading(tenant, namespace_id, hashes)
        if isinstance(codes, Refused):
            raise wire.refusal(codes)
        return codes

    def _lookup(self, tenant: str, namespace_id: int, group: str, hashes: bytes) -> Looked:
        keys = wire.hashes_of(hashes)
        dram, *pools = self._hub.caches()
        found = dram.lookup(tenant, namespace_id, group, keys, pools)
        if isinstance(found, Refused):
            raise wire.refusal(found)
        return found

    async def Read(self, request: pb.ReadRequest, context: Context) -> None:  # noqa: N802
        namespace = self._namespace(request.epoch, request.namespace_id, context)
        timeout_s = wire.seconds_of(request.timeout_s, "timeout_s", self._settings.acquire_timeout_s)
        async with contextlib.aclosing(self.bytes.read(namespace, wire.hashes_of(request.hashes), timeout_s)) as pieces:
            async for piece in pieces:
                await in_time(context.write(piece), "the client has not read")

    async def Write(self, request_iterator: AsyncIterator[pb.BlockBytes], context: Context) -> pb.WriteReply:  # noqa: N802
        def find(piece: pb.BlockBytes) -> KnownNamespace:
            return self._namespace(piece.epoch, piece.namespace_id, context)

        outcomes = await self.bytes.write(aiter(request_iterator), find)
        return pb.WriteReply(epoch=self._hub.epoch, outcomes=outcomes)

    # ---- operations

    async def Prefetch(self, request: pb.PrefetchRequest, context: Context) -> pb.PrefetchReply:  # noqa: N802
        namespace = self._namespace(request.epoch, request.namespace_id, context)
        hub = self._hub
        started, present = hub.cache.prefetch(namespace.id, wire.hashes_of(request.hashes), hub.now + PREFETCH_S)
        hub.settle()
        return pb.PrefetchReply(epoch=hub.epoch, started_blocks=started, present_blocks=present)

    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PinReply:  # noqa: N802
        namespace = self._namespace(request.epoch, request.namespace_id, context)
        hashes = wire.hashes_of(request.hashes)
        return self._pinned([cache.pin(namespace.id, hashes) for cache in self._hub.caches()])

    async def Unpin(self, request: pb.PinRequest, context: Context) -> pb.PinReply:  # noqa: N802
        namespace = self._namespace(request.epoch, request.namespace_id, context)
        hashes = wire.hashes_of(request.hashes)
        return self._pinned([cache.unpin(namespace.id, hashes) for cache in self._hub.caches()])

    async def Clear(self, request: pb.ClearRequest, context: Context) -> pb.ClearReply:  # noqa: N802
        if request.namespace_id:
            namespaces = [self._namespace(request.epoch, request.namespace_id, context)]
        else:
            namespaces = self._hub.namespaces.of_tenant(tenant_of(context))
        cleared, hbm_bytes, finished = await self._hub.clear(tuple(each.id for each in namespaces))
        try:
            await asyncio.wait_for(finished, CLEAR_TIMEOUT_S)
        except TimeoutError:
            raise errors.DeadlineExceeded(
                f"{cleared.blocks} blocks are cleared, but the disk has not forgotten them within {CLEAR_TIMEOUT_S:g} s; clear again"
            ) from None
        return pb.ClearReply(
            epoch=self._hub.epoch,
            blocks=cleared.blocks,
            dram_bytes=cleared.dram_bytes,
            nvme_bytes=cleared.nvme_bytes,
            held_blocks=cleared.held_blocks,
            hbm_bytes=hbm_bytes,
        )

    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsReply:  # noqa: N802
        tenant, health = tenant_of(context), self._health()
        figures, tiers = self._hub.figures()
        reply = pb.StatsReply(
            epoch=self._hub.epoch,
            version=__version__,
            uptime_s=time.monotonic() - self._started_at,
            index_capacity_blocks=figures.index_capacity_blocks,
            index_used_blocks=figures.index_used_blocks,
            counters=figures.counters,
            scrub_passes=figures.scrub_passes,
            waiting_writes=figures.waiting_writes,
            scrub_pass_s=figures.scrub_pass_s,
            tail_blocks=figures.tail_blocks,
            tail_bytes=figures.tail_bytes,
            tail_capacity_bytes=figures.tail_capacity_bytes,
        )
        for name, state in health.items():
            numbers = tiers.get(name, NO_FIGURES)
            reply.tiers.add(
                tier=name,
                capacity_bytes=numbers.capacity_bytes,
                class_bytes=numbers.class_bytes,
                blocks=numbers.blocks,
                held_bytes=numbers.held_bytes,
                health=state.state.value,
                health_reason=state.reason,
            )
        for session in figures.sessions:
            known = self._hub.sessions.get(session.session)
            if session.tenant == tenant and known is not None:
                reply.sessions.add(
                    session=session.session,
                    client=known.client,
                    tenant=tenant,
                    held_bytes=session.held_bytes,
                    leases=session.leases,
                    reserved_slots=session.reserved_slots,
                    ended=session.ended,
                    hbm_held_bytes=self._hub.pools.held_bytes(session.session) if self._hub.pools is not None else 0,
                )
        return reply

    async def Watch(self, request: pb.WatchRequest, context: Context) -> None:  # noqa: N802
        hub, tenant = self._hub, tenant_of(context)
        if request.namespace_id:
            namespaces = [self._namespace(request.epoch, request.namespace_id, context)]
        else:
            namespaces = hub.namespaces.of_tenant(tenant)
        watcher = hub.notices.watch(tenant, request.namespace_id)
        try:
            async with contextlib.aclosing(watcher.events(namespaces, hub.snapshot)) as events:
                async for event in events:
                    await in_time(context.write(event), "the watcher has not read")
        finally:
            hub.notices.forget(watcher)

    async def ListNamespaces(self, request: pb.ListNamespacesRequest, context: Context) -> pb.ListNamespacesReply:  # noqa: N802
        if request.after:
            self._check_epoch(request.epoch)
        async with self._wondering.one():
            return await list_namespaces(self._hub, tenant_of(context), request.after)

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainReply:  # noqa: N802
        namespace, asked = self._namespace(request.epoch, request.namespace_id, context), Asked.of(request)
        async with self._wondering.one():
            return await explain(self._hub, namespace, asked)

    # ----

    def _pinned(self, changed: list[NDArray[np.bool_]]) -> pb.PinReply:
        """A block counts once, in however many tiers it is."""
        return pb.PinReply(epoch=self._hub.epoch, blocks=int(np.count_nonzero(np.logical_or.reduce(changed))))

    def _check_epoch(self, epoch: str) -> None:
        if epoch != self._hub.epoch:
            raise errors.StaleEpoch(f"the request is of epoch {epoch!r}, the daemon's is {self._hub.epoch!r}; open its namespaces again")

    def _namespace(self, epoch: str, namespace: int, context: Context) -> KnownNamespace:
        self._check_epoch(epoch)
        return self._hub.namespaces.require(tenant_of(context), namespace)
