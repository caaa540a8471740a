"""Read and Write: the bytes of blocks for clients that cannot map the arena. The daemon holds the leases and slots for them.

Bytes are copied and summed in threads; here, on the event loop, is only who may read or write what. A call that is cut off gives its
slots back as soon as the copy in progress has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import TypeVar

import numpy as np

from kvstore import errors
from kvstore.cache.messages import (
    MAX_BLOCKS_PER_BATCH,
    Abandon,
    Acquire,
    Attach,
    BlockOutcome,
    Commit,
    Committed,
    Granted,
    Hashes,
    KeepKind,
    Refused,
    Release,
    Reserve,
    Reserved,
    unpack_hashes,
)
from kvstore.checksum import block_checksum
from kvstore.daemon import wire
from kvstore.daemon.hub import Hub
from kvstore.daemon.namespaces import KnownNamespace
from kvstore.geometry import UNIT_BYTES
from kvstore.proto import kvstore_pb2 as pb

PIECE_BYTES = 2**20  # 1 MiB: a quarter of the largest message
WINDOW_BYTES = 64 * 2**20  # 64 MiB leased at once for one reader, so that a slow one keeps little from others
MIN_WINDOW_BLOCKS = 4  # so that reads from the disk overlap with sending
GRANT_GRACE_S = 5.0  # seconds past a lease's own deadline: its last grant comes with the next tick
HOLE = -1  # in the place of units: the namespace does not keep this block
PIECE_TIMEOUT_S = 30.0  # seconds for a client to send, or take, one piece: a slow network moves one in a second
COPY_THREADS = 2  # threads: memcpy from two cores fills what a network takes

T = TypeVar("T")


def pack_checksum(checksum: tuple[int, int]) -> bytes:
    """16 bytes, low word first."""
    return np.array(checksum, "<u8").tobytes()


class InnerSession:
    """The daemon's own session for one tenant: it holds what Read and Write are about, and lasts as long as the daemon."""

    def __init__(self, hub: Hub, tenant: str) -> None:
        """Raises ResourceExhausted where no more sessions may attach."""
        self._hub = hub
        self._ids = count(1)
        self._waiting: dict[int, tuple[asyncio.Future[list[int]], list[int]]] = {}
        known = hub.sessions.begin(tenant, "(daemon: Read and Write)", maps_arena=False)
        answer = hub.cache.attach(Attach(known.id, tenant, own=True), hub.now)
        if isinstance(answer, Refused):
            hub.sessions.forget(known.id)
            raise wire.refusal(answer)
        self.id = known.id
        hub.join(known.id, self)
        hub.settle()

    def new_id(self) -> int:
        """For a lease or a reservation."""
        return next(self._ids)

    def granted(self, granted: Granted, pool: int = 0) -> None:
        """Collect the units of a lease until no more will come."""
        future, units = self._waiting.get(granted.lease, (None, []))
        units.extend(np.where(granted.generations[0] > 0, granted.units[0].astype(np.int64), HOLE).tolist())
        if granted.ended is not None and future is not None and not future.done():
            future.set_result(units)

    def ended(self, reason: str) -> None:
        """Whoever waits gets nothing."""
        for future, _ in self._waiting.values():
            if not future.done():
                future.set_result([])

    async def lease(self, namespace: int, hashes: Hashes, timeout_s: float) -> tuple[int, list[int]]:
        """Lease the leading blocks: (lease, units of those that could be had, HOLE where none is kept). End it with `release`."""
        lease = self.new_id()
        future: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiting[lease] = (future, [])
        try:
            answer = self._hub.cache.acquire(Acquire(self.id, lease, hashes, self._hub.now + timeout_s, namespace), self._hub.now)
            if isinstance(answer, Refused):
                raise wire.refusal(answer)
            self._hub.settle()
            if answer.expected == 0:
                return lease, []
            return lease, await asyncio.wait_for(future, timeout_s + GRANT_GRACE_S)
        except TimeoutError:
            self.release(lease)
            raise errors.DeadlineExceeded(f"no block within {timeout_s} s; try again") from None
        except BaseException:
            self.release(lease)
            raise
        finally:
            del self._waiting[lease]

    def release(self, lease: int) -> None:
        """Give a lease back."""
        self._hub.cache.release(Release(self.id, lease))
        self._hub.settle()


class ByteCalls:
    """Carries out Read and Write."""

    def __init__(self, hub: Hub, memory: memoryview) -> None:
        """`memory`: the dram arena."""
        self._hub = hub
        self._memory = memory
        self._inner: dict[str, InnerSession] = {}
        self._threads = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="bytes")

    def close(self) -> None:
        """Wait for the copies in progress; no more are made."""
        self._threads.shutdown()

    async def read(self, namespace: KnownNamespace, hashes: Hashes, timeout_s: float) -> AsyncGenerator[pb.BlockBytes, None]:
        """The leading blocks, piece by piece, in order."""
        inner = self._session_of(namespace.tenant)
        window = max(MIN_WINDOW_BLOCKS, WINDOW_BYTES // (namespace.geometry.slot_bytes))
        if namespace.keep.kind is not KeepKind.ALL:
            window = len(hashes)  # what it keeps is at the end of the whole, and little
        for start in range(0, len(hashes), window):
            part = hashes[start : start + window]
            lease, units = await inner.lease(namespace.id, part, timeout_s)
            try:
                for at, key in zip(units, part, strict=False):
                    async for piece in self._block(namespace, at, key.tobytes()):
                        yield piece
            finally:
                inner.release(lease)
            if len(units) < len(part):
                return

    async def _block(self, namespace: KnownNamespace, units: int, key: bytes) -> AsyncGenerator[pb.BlockBytes, None]:
        if units == HOLE:
            yield pb.BlockBytes(namespace_id=namespace.id, epoch=self._hub.epoch, hash=key, last=True)
            return
        view = self._slot(namespace, units)
        checksum = pack_checksum(await self._threaded(lambda: block_checksum(namespace.digest, key, view)))
        for start in range(0, len(view), PIECE_BYTES):
            last = start + PIECE_BYTES >= len(view)
            data = await self._threaded(partial(bytes, view[start : start + PIECE_BYTES]))
            piece = pb.BlockBytes(namespace_id=namespace.id, epoch=self._hub.epoch, hash=key, offset_bytes=start, data=data)
            piece.last, piece.checksum = last, checksum if last else b""
            yield piece

    async def write(self, pieces: AsyncIterator[pb.BlockBytes], find: Callable[[pb.BlockBytes], KnownNamespace]) -> bytes:
        """Store blocks as they arrive; one outcome a block, NONE after the first that could not be stored.

        `find` answers a piece's namespace, or raises. Raises InvalidArgument for pieces out of order, Corruption for a wrong checksum,
        DeadlineExceeded where the next piece does not come: a slot is not kept for a client that has stopped.
        """
        pieces = _coming(pieces)
        outcomes = bytearray()
        stopped = False
        while (first := await anext(pieces, None)) is not None:
            block = _Incoming(self, find(first), first)
            outcomes.append(await block.receive(first, pieces, skip=stopped))
            stopped = stopped or outcomes[-1] not in (BlockOutcome.STORED, BlockOutcome.EXISTS, BlockOutcome.IN_FLIGHT)
            if len(outcomes) > MAX_BLOCKS_PER_BATCH:
                raise errors.LimitExceeded(f"more than {MAX_BLOCKS_PER_BATCH} blocks in one Write; split it")
        return bytes(outcomes)

    # ---- for one block

    def reserve(self, namespace: KnownNamespace, key: bytes) -> tuple[int, BlockOutcome, int, int]:
        """A slot for one block: (reservation, outcome, units, generation)."""
        inner = self._session_of(namespace.tenant)
        reservation = inner.new_id()
        answer = self._hub.cache.reserve(Reserve(inner.id, reservation, namespace.id, hashes=unpack_hashes(key)))
        self._hub.settle()
        if not isinstance(answer, Reserved):
            raise wire.refusal(answer)
        return reservation, BlockOutcome(int(answer.outcomes[0])), int(answer.units[0]), int(answer.generations[0])

    def commit(self, namespace: KnownNamespace, slot: tuple[int, int], block: pb.BlockBytes, checksum: tuple[int, int]) -> BlockOutcome:
        """Make a block visible. `slot`: units and generation."""
        inner = self._session_of(namespace.tenant)
        units, generation = (np.array([word], np.uint32) for word in slot)
        sums = np.array([checksum], np.uint64)
        lease = inner.new_id()
        request = Commit(inner.id, lease, namespace.id, units, generation, unpack_hashes(block.hash), unpack_hashes(block.parent), sums)
        answer = self._hub.cache.commit(request)
        self._hub.cache.release(Release(inner.id, lease))
        self._hub.settle()
        if not isinstance(answer, Committed):
            raise wire.refusal(answer)
        return BlockOutcome(int(answer.outcomes[0]))

    def abandon(self, namespace: KnownNamespace, reservation: int) -> None:
        """Give back what is left of a reservation."""
        self._hub.cache.abandon(Abandon(self._session_of(namespace.tenant).id, reservation))
        self._hub.settle()

    async def store_piece(self, namespace: KnownNamespace, units: int, piece: pb.BlockBytes) -> None:
        """Copy a piece into its slot."""
        view = self._slot(namespace, units)[piece.offset_bytes : piece.offset_bytes + len(piece.data)]
        await self._threaded(lambda: np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(piece.data, np.uint8)))

    async def checksum(self, namespace: KnownNamespace, units: int, key: bytes) -> tuple[int, int]:
        """Of the bytes in a slot."""
        return await self._threaded(lambda: block_checksum(namespace.digest, key, self._slot(namespace, units)))

    def _slot(self, namespace: KnownNamespace, units: int) -> memoryview:
        start = units * UNIT_BYTES
        return self._memory[start : start + namespace.geometry.block_bytes]

    def _session_of(self, tenant: str) -> InnerSession:
        if tenant not in self._inner:
            self._inner[tenant] = InnerSession(self._hub, tenant)
        return self._inner[tenant]

    async def _threaded(self, act: Callable[[], T]) -> T:
        """Do it in a thread. A caller that is cancelled goes on only when the thread has left the memory alone."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, act)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait({future})
            raise


async def in_time(step: Awaitable[T], what: str) -> T:
    """A client's part in one piece. Raises DeadlineExceeded: nothing is kept for one that has stopped."""
    try:
        async with asyncio.timeout(PIECE_TIMEOUT_S):
            return await step
    except TimeoutError:
        raise errors.DeadlineExceeded(f"{what} for {PIECE_TIMEOUT_S:g} s; try again") from None


async def _coming(pieces: AsyncIterator[pb.BlockBytes]) -> AsyncIterator[pb.BlockBytes]:
    """Each piece as it comes, in time."""
    while (piece := await in_time(anext(pieces, None), "no piece came")) is not None:
        yield piece


class _Incoming:
    """One block on its way in."""

    def __init__(self, calls: ByteCalls, namespace: KnownNamespace, first: pb.BlockBytes) -> None:
        if len(first.hash) != 32 or len(first.parent) != 32:
            raise errors.InvalidArgument("hash and parent of a block have 32 bytes each")
        self._calls = calls
        self._namespace = namespace
        self._first = first
        self._reservation = 0
        self._slot = (0, 0)

    async def receive(self, first: pb.BlockBytes, pieces: AsyncIterator[pb.BlockBytes], *, skip: bool) -> BlockOutcome:
        """Take all pieces of this block; with `skip`, or where it needs no slot, they are read past."""
        outcome = BlockOutcome.NONE
        if not skip:
            self._reservation, outcome, *slot = self._calls.reserve(self._namespace, self._first.hash)
            self._slot = (slot[0], slot[1])
        try:
            last = await self._pieces(first, pieces, keep=outcome is BlockOutcome.SLOT)
            if outcome is BlockOutcome.SLOT:
                outcome = await self._commit(last)
            return outcome
        finally:
            if self._reservation:
                self._calls.abandon(self._namespace, self._reservation)

    async def _pieces(self, first: pb.BlockBytes, pieces: AsyncIterator[pb.BlockBytes], *, keep: bool) -> pb.BlockBytes:
        size_bytes = self._namespace.geometry.block_bytes
        at, piece = 0, first
        while True:
            end = at + len(piece.data)
            wrong = not piece.data or piece.offset_bytes != at or end > size_bytes or piece.last != (end == size_bytes)
            if wrong or piece.hash != self._first.hash:
                raise errors.InvalidArgument(
                    f"a piece at {piece.offset_bytes} with {len(piece.data)} bytes where {at} of {size_bytes} have arrived; "
                    "send each block's pieces in order, the last one marked"
                )
            if keep:
                await self._calls.store_piece(self._namespace, self._slot[0], piece)
            if piece.last:
                return piece
            at = end
            following = await anext(pieces, None)
            if following is None:
                raise errors.InvalidArgument(f"the stream ended after {at} of a block's {size_bytes} bytes")
            piece = following

    async def _commit(self, last: pb.BlockBytes) -> BlockOutcome:
        found = await self._calls.checksum(self._namespace, self._slot[0], self._first.hash)
        if pack_checksum(found) != last.checksum:
            raise errors.Corruption(f"block {self._first.hash.hex()[:16]} arrived other than its checksum says; send it again")
        return self._calls.commit(self._namespace, self._slot, self._first, found)
