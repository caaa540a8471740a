"""What watchers are sent: each has a bounded queue of its own, and one that is too slow is told to watch again. On the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator

from kvstore import errors
from kvstore.cache.messages import Notice
from kvstore.daemon.namespaces import KnownNamespace, Namespaces
from kvstore.proto import kvstore_pb2 as pb

MAX_QUEUED_BYTES = 8 * 2**20  # 8 MiB of events a watcher: 131,072 blocks stored while it did not read
MAX_WATCHERS = 64  # a router or two, and people who look
MAX_EVENT_BYTES = 2**20  # 1 MiB of hashes and parents in an event: far below the largest message

Snapshot = Callable[[int], Iterator[list[tuple[str, bytes, bytes]]]]  # by namespace, in pieces: (tier, hashes, parents)


class Watcher:
    """One stream. Events queue up from its beginning, so that none is lost while the snapshot is sent."""

    def __init__(self, epoch: str, tenant: str, namespace: int) -> None:
        self.tenant = tenant
        self.namespace = namespace
        self._epoch = epoch
        self._queue: deque[pb.WatchEvent] = deque()
        self._queued_bytes = 0
        self._sequence = 0
        self._ready = asyncio.Event()
        self._overflown = False

    def push(self, event: pb.WatchEvent) -> None:
        """Queue one event, or give up where the queue is full."""
        size_bytes = event.ByteSize()
        if self._overflown or self._queued_bytes + size_bytes > MAX_QUEUED_BYTES:
            self._overflown = True
            self._queue.clear()
        else:
            self._queued_bytes += size_bytes
            own = pb.WatchEvent()
            own.CopyFrom(event)
            self._queue.append(own)
        self._ready.set()

    async def events(self, namespaces: list[KnownNamespace], snapshot: Snapshot) -> AsyncGenerator[pb.WatchEvent, None]:
        """The snapshot, then what happens. Raises ResourceExhausted when the watcher does not keep up."""
        for namespace in namespaces:
            for found in snapshot(namespace.id):
                for tier, hashes, parents in found:
                    for event in _pieces("snapshot", namespace, tier, hashes, parents):
                        yield self._numbered(event)
                await asyncio.sleep(0)  # a large cache has long stretches without blocks of this namespace
        yield self._numbered(pb.WatchEvent(kind="snapshot_end"))
        while True:
            while self._queue:
                event = self._queue.popleft()
                self._queued_bytes -= event.ByteSize()
                yield self._numbered(event)
            if self._overflown:
                raise errors.ResourceExhausted(f"the watcher is more than {MAX_QUEUED_BYTES} bytes of notices behind; watch again")
            self._ready.clear()
            await self._ready.wait()

    def _numbered(self, event: pb.WatchEvent) -> pb.WatchEvent:
        self._sequence += 1
        event.epoch, event.sequence = self._epoch, self._sequence
        return event


class Notices:
    """All watchers."""

    def __init__(self, epoch: str, namespaces: Namespaces) -> None:
        self._epoch = epoch
        self._namespaces = namespaces
        self._watchers: dict[Watcher, None] = {}  # a set in order of arrival: a simulation replays exactly

    def __len__(self) -> int:
        return len(self._watchers)

    def watch(self, tenant: str, namespace: int) -> Watcher:
        """A new watcher; `namespace` 0: of all that the tenant has. Raises ResourceExhausted. End it with `forget`."""
        if len(self._watchers) >= MAX_WATCHERS:
            raise errors.ResourceExhausted(f"{MAX_WATCHERS} watchers are attached, which is the most; end one")
        watcher = Watcher(self._epoch, tenant, namespace)
        self._watchers[watcher] = None
        return watcher

    def forget(self, watcher: Watcher) -> None:
        """This one is gone."""
        self._watchers.pop(watcher, None)

    def publish(self, notice: Notice) -> None:
        """Queue a notice for everybody whom it concerns."""
        of = self._namespaces.get(notice.namespace)
        if of is None:
            return
        tier = notice.tier.name.lower() if notice.tier is not None else ""
        for watcher in self._watchers:
            if watcher.tenant == of.tenant and watcher.namespace in (0, of.id):
                for event in _pieces(notice.kind, of, tier, notice.hashes, notice.parents):
                    watcher.push(event)


def _pieces(kind: str, of: KnownNamespace, tier: str, hashes: bytes, parents: bytes) -> Iterator[pb.WatchEvent]:
    """Events of bounded size."""
    step = MAX_EVENT_BYTES // 2 // 32 * 32
    for start in range(0, max(len(hashes), 1), step):
        yield pb.WatchEvent(
            kind=kind,
            namespace_id=of.id,
            digest=of.digest,
            tier=tier,
            hashes=hashes[start : start + step],
            parents=parents[start : start + step],
        )
