"""The three ways to be a client, behind one face: with threads, on an event loop, and with all bytes over gRPC."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeVar, cast

import pytest

from kvstore import errors
from kvstore.clients import aio, aio_link, client, link
from kvstore.clients.handles import LookupResult, Namespace, Watched
from kvstore.clients.lease import Lease
from kvstore.clients.put import Put
from kvstore.clients.requests import KEEP_ALL, Keep
from kvstore.geometry import Geometry
from kvstore.hashing import Identity
from kvstore.proto import kvstore_pb2 as pb

T = TypeVar("T")
KINDS = ("threads", "loop", "bytes")


class Client(Protocol):
    """The calls that all kinds have."""

    def open_namespace(
        self, identity: Identity, geometry: Geometry, shard: str = "", kv_group: str = "", keep: Keep = KEEP_ALL
    ) -> Namespace: ...
    def lookup(self, namespace: Namespace, hashes: bytes | None = None, **more: Any) -> LookupResult: ...
    def get(self, namespace: Namespace, hashes: bytes | None = None, **more: Any) -> AbstractContextManager[Lease]: ...
    def put(self, namespace: Namespace, hashes: bytes, parent: bytes | None = None) -> AbstractContextManager[Put]: ...
    def prefetch(self, namespace: Namespace, hashes: bytes) -> tuple[int, int]: ...
    def pin(self, namespace: Namespace, hashes: bytes) -> int: ...
    def unpin(self, namespace: Namespace, hashes: bytes) -> int: ...
    def clear(self, namespace: Namespace | None = None) -> pb.ClearReply: ...
    def stats(self) -> pb.StatsReply: ...
    def namespaces(self) -> pb.ListNamespacesReply: ...
    def explain(self, namespace: Namespace, hashes: bytes | None = None, **more: Any) -> pb.ExplainReply: ...
    def watch(self, namespace: Namespace | None = None) -> Iterator[Watched]: ...
    def close(self) -> None: ...


class OnLoop:
    """AsyncKVClient on an event loop in a thread, each call awaited there."""

    def __init__(self, address: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._client = self._run(self._made(address))

    async def _made(self, address: str) -> aio.AsyncKVClient:
        return aio.AsyncKVClient(address)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    @contextmanager
    def _entered(self, manager: AbstractAsyncContextManager[T]) -> Iterator[T]:
        value = self._run(_enter(manager))
        try:
            yield value
        except BaseException as error:  # the body may raise anything, and the manager decides
            if not self._run(_exit(manager, error)):
                raise
        else:
            self._run(_exit(manager, None))

    def get(self, *args: Any, **more: Any) -> AbstractContextManager[Lease]:
        return self._entered(self._client.get(*args, **more))

    def put(self, *args: Any, **more: Any) -> AbstractContextManager[Put]:
        return self._entered(self._client.put(*args, **more))

    def watch(self, namespace: Namespace | None = None) -> Iterator[Watched]:
        events: AsyncIterator[Watched] = self._client.watch(namespace)
        while True:
            try:
                yield self._run(_next(events))
            except StopAsyncIteration:
                return

    def close(self) -> None:
        if not self._loop.is_closed():
            self._run(self._client.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)

        def run(*args: Any, **more: Any) -> Any:
            if self._loop.is_closed():
                raise errors.SessionEnded("the test's loop is closed")
            return self._run(call(*args, **more))

        return run


async def _enter(manager: AbstractAsyncContextManager[T]) -> T:
    return await manager.__aenter__()


async def _exit(manager: AbstractAsyncContextManager[T], error: BaseException | None) -> bool | None:
    return await manager.__aexit__(type(error) if error else None, error, None)


async def _next(events: AsyncIterator[T]) -> T:
    return await anext(events)


def make(kind: str, address: str, monkeypatch: pytest.MonkeyPatch) -> Client:
    """A client of this kind. `bytes` is one whose process cannot map the arena."""
    if kind == "loop":
        return cast(Client, OnLoop(address))
    if kind == "bytes":
        for module in (link, aio_link):
            monkeypatch.setattr(module, "map_arena", _cannot_map)
    return cast(Client, client.KVClient(address))


def _cannot_map(*_: object) -> None:
    raise errors.Unavailable("another machine has no shared memory with this one")
