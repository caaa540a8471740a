"""`AsyncKVClient`: the store for asyncio programs. One event loop owns a client.

The steps of each call are in calls.py, reading.py and writing.py; here they are carried out with await. `client.KVClient` is its twin.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import grpc
import grpc.aio

from kvstore import errors
from kvstore.clients import calls, reading, requests, writing
from kvstore.clients.aio_link import AsyncLink
from kvstore.clients.aio_quick import AsyncQuickLookups
from kvstore.clients.blocks import Tokens
from kvstore.clients.channel import MAP_AGAIN_S, OPTIONS, error_of, target
from kvstore.clients.connections import AsyncConnections
from kvstore.clients.gpus import Gpus
from kvstore.clients.handles import Attached, LookupResult, Namespace, Watched
from kvstore.clients.lease import Lease
from kvstore.clients.life import Life
from kvstore.clients.link import Unmapped
from kvstore.clients.put import Put
from kvstore.clients.requests import KEEP_ALL, Keep
from kvstore.clients.steps import Ask, Attach, Call, Command, MapPool, Pause, Receive, Send, Steps, Take, Tell, persistent, reopen
from kvstore.geometry import Geometry
from kvstore.hashing import Identity
from kvstore.kernels.driver import CudaDriver
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.kvstore_pb2_grpc import KVStoreStub

if TYPE_CHECKING:
    from kvstore.proto.kvstore_pb2_grpc import KVStoreAsyncStub

T = TypeVar("T")
GET_TIMEOUT_S = 5.0  # for blocks to come up from the disk: gigabytes do so in this time

log = logging.getLogger("kvstore.client")


class AsyncKVClient:
    """A connection to the daemon of this machine, made and used on one event loop. See KVClient, whose calls it has with await.

    A program that forks while one is open has GRPC_ENABLE_FORK_SUPPORT=0 in its environment: what grpc itself does in the child otherwise
    may end it (SIGSEGV).
    """

    def __init__(
        self,
        address: str | os.PathLike[str] | None = None,
        *,
        name: str = "",
        guarantee_bytes: int = 0,
        limit_bytes: int = 0,
        gpus: Sequence[int] = (),
        driver: CudaDriver | None = None,
    ) -> None:
        """As KVClient. Raises InvalidArgument outside an event loop."""
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            raise errors.InvalidArgument("no event loop runs here; make the client inside the coroutine that uses it") from None
        self._gpus = Gpus(gpus, driver)
        self.place = target(address)
        self._channel = grpc.aio.insecure_channel(self.place, OPTIONS)
        self._stub = cast("KVStoreAsyncStub", KVStoreStub(cast(Any, self._channel)))
        self._hello = requests.hello(name, guarantee_bytes, limit_bytes, self._gpus.terms())
        self._quick = AsyncQuickLookups(self.place)
        self._attaching = asyncio.Lock()
        self._attached: Attached | None = None
        self._unmapped_until = 0.0  # blocks go over gRPC till then
        self._life = Life()
        self._open = AsyncConnections(self._channel, self._quick, self._gpus, self._life, self._loop)
        weakref.finalize(self, self._open.dropped).atexit = False  # at the process's end the daemon sees for itself

    # ---- namespaces

    async def open_namespace(
        self, identity: Identity, geometry: Geometry, shard: str = "", kv_group: str = "", keep: Keep = KEEP_ALL
    ) -> Namespace:
        """The namespace of these facts, made where it is new. Ranks whose bytes are equal open one `shard`."""
        namespace = Namespace(identity, geometry, requests.open_namespace(identity, geometry, shard, kv_group, keep))
        return await self._run(persistent(lambda: reopen(namespace)))

    # ---- blocks

    async def lookup(
        self, namespace: Namespace, hashes: bytes | None = None, *, tokens: Tokens | None = None, identity: Identity | None = None
    ) -> LookupResult:
        """How many leading blocks are here, and in which tier. Takes no lease and moves nothing. See KVClient.lookup."""
        return await self._run(calls.lookup(namespace, requests.prompt_or_hashes(namespace, hashes, tokens, identity)))

    @asynccontextmanager
    async def get(
        self,
        namespace: Namespace,
        hashes: bytes | None = None,
        *,
        tokens: Tokens | None = None,
        identity: Identity | None = None,
        timeout_s: float = GET_TIMEOUT_S,
        pool: int | None = None,
    ) -> AsyncIterator[Lease]:
        """The leading blocks that the store has, readable until the `async with` block ends. See KVClient.get."""
        wanted, begun = requests.prompt_or_hashes(namespace, hashes, tokens, identity), list[Lease]()
        try:
            lease = await self._run(reading.get(namespace, wanted, timeout_s, pool, begun))
            yield lease
            await self._leave(reading.close_lease(lease))
        except BaseException:  # an interrupt too, wherever it comes
            for each in begun:
                await self._leave(reading.close_lease(each))
            raise

    @asynccontextmanager
    async def put(
        self, namespace: Namespace, hashes: bytes, parent: bytes | None = None, *, pool: int | None = None
    ) -> AsyncIterator[Put]:
        """Slots for those blocks of a chain that are not stored yet. See KVClient.put."""
        before, begun = namespace.root if parent is None else parent, list[Put]()
        try:
            put = await self._run(writing.put(namespace, requests.checked_hashes(hashes), before, pool, begun))
            yield put
            self._life.check_process()
            await self._leave(writing.finish_put(namespace, put))
        except BaseException:  # an interrupt too, wherever it comes
            for each in begun:
                await self._leave(writing.abandon_put(each))
            raise

    # ---- operations

    async def prefetch(self, namespace: Namespace, hashes: bytes) -> tuple[int, int]:
        """Start bringing blocks into memory, without waiting: (started, already there)."""
        return await self._run(calls.prefetch(namespace, requests.checked_hashes(hashes)))

    async def pin(self, namespace: Namespace, hashes: bytes) -> int:
        """Wish that blocks be kept; returns how many were not pinned before."""
        return await self._run(calls.pin(namespace, requests.checked_hashes(hashes), "Pin"))

    async def unpin(self, namespace: Namespace, hashes: bytes) -> int:
        """End the wish; returns how many were pinned."""
        return await self._run(calls.pin(namespace, requests.checked_hashes(hashes), "Unpin"))

    async def clear(self, namespace: Namespace | None = None) -> pb.ClearReply:
        """Forget every block of a namespace, or of all, in every tier, for good."""
        return await self._run(calls.clear(namespace))

    async def stats(self) -> pb.StatsReply:
        """The daemon's figures."""
        return await self._run(calls.stats())

    async def namespaces(self) -> pb.ListNamespacesReply:
        """Every namespace, with its facts and how many blocks of it each tier has."""
        return await self._run(calls.namespaces())

    async def explain(
        self, namespace: Namespace, hashes: bytes | None = None, *, tokens: Tokens | None = None, identity: Identity | None = None
    ) -> pb.ExplainReply:
        """Why no more of a chain is found, and under which other facts more of it is. See KVClient.explain."""
        return await self._run(calls.explain(namespace, requests.explain(namespace, hashes, tokens, identity)))

    async def watch(self, namespace: Namespace | None = None) -> AsyncIterator[Watched]:
        """What is stored now, then what changes, until the caller stops. See KVClient.watch."""
        self._check()
        if namespace is not None:
            await self._run(reopen(namespace))
        epoch, number = namespace.opened if namespace is not None else ("", 0)
        request = pb.WatchRequest(namespace_id=number, epoch=epoch)
        try:
            stream = self._stub.Watch(request)
            try:
                async for event in stream:
                    yield Watched.of(event)
            finally:
                stream.cancel()
        except (grpc.RpcError, grpc.aio.UsageError, asyncio.CancelledError) as error:
            raise self._error_of(error) from None

    async def close(self) -> None:
        """End the session and the connection. Idempotent. Leases still held keep their memory until they are given back."""
        if self._life.forked:
            return  # session and connections are the parent's, which goes on
        self._check_loop()
        async with self._attaching:
            self._life.closed = True
        await self._open.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- carrying out

    def _check(self) -> None:
        self._life.check()
        self._check_loop()

    def _check_loop(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise errors.InvalidArgument("this client was made on another event loop; make one on each")

    async def _run(self, steps: Steps[T]) -> T:
        self._check()
        return await self._carried_out(steps)

    async def _leave(self, steps: Steps[None]) -> None:
        """What ends an `async with` block: of a closed client too, but never in a child process."""
        if not self._life.forked:
            await self._carried_out(steps)

    async def _carried_out(self, steps: Steps[T]) -> T:
        try:
            command = next(steps)
            while True:
                try:
                    result = await self._done(command)
                except BaseException as error:  # noqa: BLE001 — every fault belongs to the steps, which clean up and pass it on
                    command = steps.throw(error)
                else:
                    command = steps.send(result)
        except StopIteration as done:
            result_of_steps: T = done.value
            return result_of_steps

    async def _done(self, command: Command) -> Any:
        try:
            return await self._do(command)
        except (grpc.RpcError, grpc.aio.UsageError, asyncio.CancelledError) as error:
            raise self._error_of(error) from None

    def _error_of(self, error: grpc.RpcError | grpc.aio.UsageError | asyncio.CancelledError) -> BaseException:
        """The store's error for what a call raised: closing the channel cancels its calls, which nobody asked of the task."""
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and (not self._life.closed or (task is not None and task.cancelling())):
            return error
        if self._life.closed:
            return self._life.ended()
        return error_of(error, self.place) if isinstance(error, grpc.RpcError) else error

    async def _do(self, command: Command) -> Any:
        match command:
            case Attach():
                return await self._attach()
            case Ask(attached, ops, timeout_s):
                return await self._link_of(attached).ask(ops, timeout_s)
            case Tell(attached, ops):
                return self._link_of(attached).tell(ops)
            case Take(attached, op, timeout_s):
                return await self._link_of(attached).take(op, timeout_s)
            case MapPool(attached, gpu):
                return await asyncio.to_thread(self._gpus.mapped, attached, gpu)
            case Pause(seconds):
                self._life.check()
                return await asyncio.sleep(seconds)
        self._life.check()
        match command:
            case Call(request=pb.LookupRequest() as asked) if (reply := await self._quick.ask(asked, command.timeout_s)) is not None:
                return reply
            case Call(method, request, timeout_s):
                return await getattr(self._stub, method)(request, timeout=timeout_s)
            case Receive(method, request, timeout_s):
                return [message async for message in getattr(self._stub, method)(request, timeout=timeout_s)]
            case Send(method, messages, timeout_s):
                return await getattr(self._stub, method)(messages(), timeout=timeout_s)

    def _link_of(self, attached: Attached) -> AsyncLink:
        link = self._open.link
        if link is None or attached is not self._attached:
            raise attached.error or self._life.ended()
        return link

    async def _attach(self) -> Attached | None:
        async with self._attaching:
            self._life.check()
            if time.monotonic() < self._unmapped_until:
                return None
            if self._open.link is not None and self._open.link.alive:
                return self._attached
            before = self._attached
            link = AsyncLink(self._stub, self.place, self._hello, before.arena if before else None)
            opened = await link.open()
            if isinstance(opened, Unmapped):
                log.warning("no shared memory with the daemon at %s, blocks go over gRPC: %s", self.place, opened.error)
                self._unmapped_until = time.monotonic() + MAP_AGAIN_S
                return None
            if before is not None and before.session.epoch != opened.session.epoch:
                before.over(errors.StaleEpoch("the daemon was restarted; its earlier leases are gone, make new ones"))
            self._open.link, self._attached = link, opened
            return opened
