"""`KVClient`: the store for programs with threads. Every call may be made from any thread; none waits without a deadline.

The steps of each call are in calls.py, reading.py and writing.py; here they are carried out, blocking. `aio.AsyncKVClient` is its twin.
"""

from __future__ import annotations

import inspect
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import grpc

from kvstore import errors
from kvstore.clients import calls, reading, requests, writing
from kvstore.clients.blocks import Tokens, require_tails
from kvstore.clients.blocksession import BlockSession
from kvstore.clients.channel import CALL_TIMEOUT_S, MAP_AGAIN_S, OPTIONS, error_of, target
from kvstore.clients.connections import Connections
from kvstore.clients.gpus import Gpus
from kvstore.clients.handles import Attached, LookupResult, Namespace, Watched
from kvstore.clients.lease import Lease
from kvstore.clients.life import Life
from kvstore.clients.link import Link, Unmapped
from kvstore.clients.pools import PoolTerms
from kvstore.clients.put import Put
from kvstore.clients.quick import QuickLookups
from kvstore.clients.requests import KEEP_ALL, Keep
from kvstore.clients.steps import Ask, Attach, Call, Command, MapPool, Pause, Receive, Send, Steps, Take, Tell, persistent, reopen
from kvstore.geometry import Geometry
from kvstore.hashing import Identity
from kvstore.kernels.driver import CudaDriver
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.kvstore_pb2_grpc import KVStoreStub

T = TypeVar("T")
GET_TIMEOUT_S = 5.0  # for blocks to come up from the disk: gigabytes do so in this time

log = logging.getLogger("kvstore.client")


class KVClient:
    """A connection to the daemon of this machine. Close it, or use it in a `with` block.

    address           the daemon's socket (a path, ~ too, or unix:PATH), or host:port; None takes KVSTORE_LISTEN, then `listen` in the
                      file that KVSTORE_CONFIG names, then the daemon's own default
    name              shown in the daemon's log and statistics
    guarantee_bytes   host memory that other sessions cannot take from this one;  limit_bytes  the most it may hold, 0 for no limit
    gpus              GPUs whose memory `get` and `put` are to use too, by their numbers in this process;  driver  None finds CUDA's
    It attaches on the first `get` or `put`, and again by itself after the daemon was restarted: leases held then raise StaleEpoch
    (or SessionEnded), new calls work. All errors are kvstore.errors. One that is dropped without `close` is closed a moment later.
    In a child of `fork` each call raises InvalidArgument, and closing does nothing to the parent's: make a client there. Memory that
    `get` and `put` handed out is not mapped in the child, so that touching it there ends the child (SIGSEGV).
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
        """Raises ConfigError where there is no driver for `gpus`, or no such GPU, or the file of settings is wrong.

        InvalidArgument for a name that is no text, or bytes that are no whole number from 0 on.
        """
        self._gpus = Gpus(gpus, driver)
        self.place = target(address)
        self._channel = grpc.insecure_channel(self.place, OPTIONS)
        self._stub = KVStoreStub(self._channel)
        self._quick = QuickLookups(self.place)
        self._hello = requests.hello(name, guarantee_bytes, limit_bytes, self._gpus.terms())
        self._attaching = threading.Lock()
        self._attached: Attached | None = None
        self._unmapped_until = 0.0  # blocks go over gRPC till then
        self._life = Life()
        self._open = Connections(self._channel, self._quick, self._gpus, self._life)
        weakref.finalize(self, self._open.dropped).atexit = False  # at the process's end the daemon sees for itself

    # ---- namespaces

    def open_namespace(
        self, identity: Identity, geometry: Geometry, shard: str = "", kv_group: str = "", keep: Keep = KEEP_ALL
    ) -> Namespace:
        """The namespace of these facts, made where it is new. Ranks whose bytes are equal open one `shard`."""
        namespace = Namespace(identity, geometry, requests.open_namespace(identity, geometry, shard, kv_group, keep))
        return self._run(persistent(lambda: reopen(namespace)))

    # ---- blocks

    def lookup(
        self, namespace: Namespace, hashes: bytes | None = None, *, tokens: Tokens | None = None, identity: Identity | None = None
    ) -> LookupResult:
        """How many leading blocks are here, and in which tier. Takes no lease and moves nothing.

        hashes   32 bytes a block;  or tokens  a prompt: of it at most `hashing.usable_blocks` count, as its last token is always computed
        identity where this request's adapter or salt differ from the namespace's
        """
        wanted = requests.prompt_or_hashes(namespace, hashes, tokens, identity)
        epoch, number = namespace.opened
        found = self._quick.look(number, epoch, wanted, CALL_TIMEOUT_S)
        return self._run(calls.lookup(namespace, wanted)) if found is None else LookupResult(len(found), found)

    @contextmanager
    def get(
        self,
        namespace: Namespace,
        hashes: bytes | None = None,
        *,
        tokens: Tokens | None = None,
        identity: Identity | None = None,
        timeout_s: float = GET_TIMEOUT_S,
        pool: int | None = None,
    ) -> Iterator[Lease]:
        """The leading blocks that the store has, readable until the `with` block ends. See `lookup` for what to give.

        Fewer blocks than asked, down to none, where some are missing, could not be read, or did not come within `timeout_s`.
        pool   one of the client's `gpus`: first the blocks in that GPU's memory (`device_views`), then what follows from host memory
        Raises InvalidArgument for a timeout outside 0 to 3600 seconds; it or ConfigError where there is no such pool.
        """
        wanted, begun = requests.prompt_or_hashes(namespace, hashes, tokens, identity), list[Lease]()
        try:
            lease = self._run(reading.get(namespace, wanted, timeout_s, pool, begun))
            yield lease
            self._leave(reading.close_lease(lease))
        except BaseException:  # an interrupt too, wherever it comes
            for each in begun:
                self._leave(reading.close_lease(each))
            raise

    @contextmanager
    def put(self, namespace: Namespace, hashes: bytes, parent: bytes | None = None, *, pool: int | None = None) -> Iterator[Put]:
        """Slots for those blocks of a chain that are not stored yet; see Put.

        hashes   32 bytes a block, consecutive;  parent  the hash before the first, None for the namespace's root
        pool     one of the client's `gpus`: the blocks go to that GPU's memory, and the daemon copies them down from there
        On a normal end of the `with` block the filled blocks are committed, and found by anybody from then on; on an exception none.
        Raises InvalidArgument and ConfigError where there is no such pool.
        """
        before, begun = namespace.root if parent is None else parent, list[Put]()
        try:
            put = self._run(writing.put(namespace, requests.checked_hashes(hashes), before, pool, begun))
            yield put
            self._life.check_process()
            self._leave(writing.finish_put(namespace, put))
        except BaseException:  # an interrupt too, wherever it comes
            for each in begun:
                self._leave(writing.abandon_put(each))
            raise

    def open_blocks(
        self, identity: Identity, geometry: Geometry, shard: str = "", *, tails: bool = False, pools: Sequence[PoolTerms] = ()
    ) -> BlockSession:
        """The store as a paged KV cache uses it, with a session of its own. Raises Unavailable where the arena cannot be mapped.

        `tails`: have token ids kept, so that an acquire finds partial tails; raises GeometryError where a block's layout has none.
        `pools`: the GPUs whose memory is to be used too; those that the daemon has are in the session's own `pools`.
        """
        self._life.check()
        if tails:
            require_tails(geometry)
        request = requests.open_namespace(identity, geometry, shard, "", KEEP_ALL, tails)
        hello = pb.Hello()
        hello.MergeFrom(self._hello)
        del hello.pools[:]  # of `get` and `put`
        hello.pools.extend(each.message() for each in pools)
        return BlockSession(self.place, geometry, request, hello)

    # ---- operations

    def prefetch(self, namespace: Namespace, hashes: bytes) -> tuple[int, int]:
        """Start bringing blocks into memory, without waiting: (started, already there)."""
        return self._run(calls.prefetch(namespace, requests.checked_hashes(hashes)))

    def pin(self, namespace: Namespace, hashes: bytes) -> int:
        """Wish that blocks be kept; returns how many were not pinned before."""
        return self._run(calls.pin(namespace, requests.checked_hashes(hashes), "Pin"))

    def unpin(self, namespace: Namespace, hashes: bytes) -> int:
        """End the wish; returns how many were pinned."""
        return self._run(calls.pin(namespace, requests.checked_hashes(hashes), "Unpin"))

    def clear(self, namespace: Namespace | None = None) -> pb.ClearReply:
        """Forget every block of a namespace, or of all, in every tier, for good."""
        return self._run(calls.clear(namespace))

    def stats(self) -> pb.StatsReply:
        """The daemon's figures."""
        return self._run(calls.stats())

    def namespaces(self) -> pb.ListNamespacesReply:
        """Every namespace, with its facts and how many blocks of it each tier has."""
        return self._run(calls.namespaces())

    def explain(
        self, namespace: Namespace, hashes: bytes | None = None, *, tokens: Tokens | None = None, identity: Identity | None = None
    ) -> pb.ExplainReply:
        """Why no more of a chain is found, and under which other facts more of it is. See `lookup` for what to give.

        With tokens other models' facts are tried too, and all with and without the prompt's adapter and salt; with hashes only namespaces
        where blocks have the same names.
        """
        return self._run(calls.explain(namespace, requests.explain(namespace, hashes, tokens, identity)))

    def watch(self, namespace: Namespace | None = None) -> Iterator[Watched]:
        """What is stored now, then what changes, until the caller stops.

        Raises ResourceExhausted where the caller is too slow, Unavailable where the daemon went away: watch again. SessionEnded where the
        client was closed.
        """
        self._life.check()
        if namespace is not None:
            self._run(reopen(namespace))
        epoch, number = namespace.opened if namespace is not None else ("", 0)
        request = pb.WatchRequest(namespace_id=number, epoch=epoch)
        try:
            stream = self._stub.Watch(request)
            try:
                for event in stream:
                    yield Watched.of(event)
            finally:
                stream.cancel()
        except (grpc.RpcError, ValueError) as error:
            raise self._error_of(error) from None

    def close(self) -> None:
        """End the session and the connection. Idempotent. Leases still held keep their memory until they are given back."""
        if self._life.forked:
            return  # session and connections are the parent's, which goes on
        with self._attaching:
            self._life.closed = True
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- carrying out

    def _run(self, steps: Steps[T]) -> T:
        self._life.check()
        return self._carried_out(steps)

    def _leave(self, steps: Steps[None]) -> None:
        """What ends a `with` block: of a closed client too, but never in a child process."""
        if not self._life.forked:
            self._carried_out(steps)

    def _carried_out(self, steps: Steps[T]) -> T:
        try:
            return self._advanced(steps, None)
        except BaseException as error:
            if inspect.getgeneratorstate(steps) != inspect.GEN_CLOSED:  # an interrupt between two steps: they clean up
                self._advanced(steps, error)
            raise

    def _advanced(self, steps: Steps[T], error: BaseException | None) -> T:
        try:
            command = next(steps) if error is None else steps.throw(error)
            while True:
                try:
                    result = self._do(command)
                except BaseException as fault:  # noqa: BLE001 — every fault belongs to the steps, which clean up and pass it on
                    command = steps.throw(fault)
                else:
                    command = steps.send(result)
        except StopIteration as done:
            result_of_steps: T = done.value
            return result_of_steps

    def _do(self, command: Command) -> Any:
        match command:
            case Attach():
                return self._attach()
            case Ask(attached, ops, timeout_s):
                return self._link_of(attached).ask(ops, timeout_s)
            case Tell(attached, ops):
                return self._link_of(attached).tell(ops)
            case Take(attached, op, timeout_s):
                return self._link_of(attached).take(op, timeout_s)
            case MapPool(attached, gpu):
                return self._gpus.mapped(attached, gpu)
            case Pause(seconds):
                self._life.check()
                return time.sleep(seconds)
            case Call(request=pb.LookupRequest() as asked) if (reply := self._quick.ask(asked, command.timeout_s)) is not None:
                return reply
        try:
            match command:
                case Call(method, request, timeout_s):
                    return getattr(self._stub, method)(request, timeout=timeout_s)
                case Receive(method, request, timeout_s):
                    return list(getattr(self._stub, method)(request, timeout=timeout_s))
                case Send(method, messages, timeout_s):
                    return getattr(self._stub, method)(messages(), timeout=timeout_s)
        except (grpc.RpcError, ValueError) as error:
            raise self._error_of(error) from None

    def _error_of(self, error: grpc.RpcError | ValueError) -> Exception:
        """The store's error for what a call raised; a ValueError is grpc's where the channel is closed."""
        if self._life.closed:
            return self._life.ended()
        return error_of(error, self.place) if isinstance(error, grpc.RpcError) else error

    def _link_of(self, attached: Attached) -> Link:
        link = self._open.link
        if link is None or attached is not self._attached:
            raise attached.error or self._life.ended()
        return link

    def _attach(self) -> Attached | None:
        with self._attaching:
            self._life.check()
            if time.monotonic() < self._unmapped_until:
                return None
            if self._open.link is not None and self._open.link.alive:
                return self._attached
            before = self._attached
            link = Link(self._stub, self.place, self._hello, before.arena if before else None)
            opened = link.open()
            if isinstance(opened, Unmapped):
                log.warning("no shared memory with the daemon at %s, blocks go over gRPC: %s", self.place, opened.error)
                self._unmapped_until = time.monotonic() + MAP_AGAIN_S
                return None
            if before is not None and before.session.epoch != opened.session.epoch:
                before.over(errors.StaleEpoch("the daemon was restarted; its earlier leases are gone, make new ones"))
            self._open.link, self._attached = link, opened
            return opened
