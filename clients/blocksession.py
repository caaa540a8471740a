"""`BlockSession`: one namespace of the daemon as a paged KV cache uses it (the `BlockStore` protocol), with a session of its own.

Any thread may call; only `acquire` and `reserve` wait. When the daemon goes away, slots in hand stay valid (their memory is kept for as
long as the old session's lock is held, which is until the last of them is given back); calls that need it raise Unavailable, and a new
session is made as soon as it is back (`kept.py`); where the daemon has an arena of another size by then, once nothing of the old one is in
hand, and `arena` is the new one from then on. A daemon that stands still is waited for once.

Operations with `pool=` are about slots in a GPU's memory, one of `pools`; the same session, and the same rules. A pool is of one run of
the daemon: after a restart calls with it raise Unavailable, `pools` has another, and that is to be mapped (`map_pool`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import grpc
import numpy as np
from numpy.typing import NDArray

from kvstore import errors
from kvstore.clients import requests
from kvstore.clients.answers import Answer, Failed, Slotted
from kvstore.clients.blocks import Prompt, Slots, Tokens
from kvstore.clients.channel import CALL_TIMEOUT_S, OPTIONS, error_of
from kvstore.clients.handles import OUTCOME_NAMES, STORED, Attached
from kvstore.clients.hbm import ImportedPool
from kvstore.clients.kept import Kept, Live
from kvstore.clients.link import Link, Unmapped
from kvstore.clients.pools import Pool, number_of
from kvstore.clients.steps import GRACE_S
from kvstore.geometry import Geometry
from kvstore.hashing import HASH_BYTES, token_bytes
from kvstore.kernels.driver import CudaDriver
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.kvstore_pb2_grpc import KVStoreStub

RESERVE_S = 5.0  # seconds for slots: a daemon has them in a millisecond, and an engine's step may wait for them

_Name = int | tuple[Pool, int]  # a slot's units, or a lease's id, in the arena or in a pool

_GONE = (errors.Unavailable, errors.StaleEpoch, errors.SessionEnded, errors.DeadlineExceeded)


def _name(number: int, pool: Pool | None) -> _Name:
    return number if pool is None else (pool, number)


def _names(units: NDArray[np.uint32], pool: Pool | None) -> Sequence[_Name]:
    numbers: list[int] = units.tolist()
    return numbers if pool is None else [(pool, number) for number in numbers]


@contextmanager
def _held(attached: Attached) -> Iterator[None]:
    """Keeps the session's lock while an answer may bring slots: the session's end, seen in between, would let it go with them."""
    attached.hold()
    try:
        yield
    finally:
        attached.drop()


class BlockSession:
    """See the module's text, and `clients.blocks.BlockStore` for the contract."""

    def __init__(self, place: str, geometry: Geometry, request: pb.OpenNamespaceRequest, hello: pb.Hello) -> None:
        self._place, self._geometry, self._request, self._hello = place, geometry, request, hello
        self._channel = grpc.insecure_channel(place, OPTIONS)
        self._stub = KVStoreStub(self._channel)
        self._idle = threading.Condition()  # guards everything below; notified when a commit is answered
        self._reserved: dict[_Name, tuple[Attached, int]] = {}  # by units: whose, and under which reservation
        self._leases: dict[_Name, set[Attached]] = {}
        self._pending = 0
        self._outcomes: Counter[str] = Counter()
        self._closed = False
        self._tails = False
        self._kept = Kept(place, self._connect)

    @property
    def _live(self) -> Live:
        return self._kept.live

    @property
    def geometry(self) -> Geometry:
        """The layout of this namespace's blocks."""
        return self._geometry

    @property
    def arena(self) -> NDArray[np.uint8]:
        """The whole DRAM arena, writable. Write only into slots that are reserved and not yet committed."""
        return self._live[1].arena.writable

    @property
    def tails(self) -> bool:
        """Whether the daemon keeps token ids; see BlockStore."""
        return self._tails

    @property
    def pools(self) -> Mapping[str, Pool]:
        """The pools of GPU memory that this session may use, by the GPU's UUID: those named in its Hello that the daemon has now."""
        return self._live[1].session.pools

    def map_pool(self, driver: CudaDriver, pool: Pool) -> ImportedPool:
        """A pool mapped in this process; the caller closes it, once nothing of it is in use. Raises Unavailable, ConfigError.

        Memory that goes with the daemon is closed when the session ends (`ImportedPool.outlives_owner` says whether it does).
        """
        _, attached, _ = self._ready(pool)
        imported = ImportedPool(driver, Path(pool.socket_path))
        attached.imports(imported)
        return imported

    @property
    def outcomes(self) -> dict[str, int]:
        """How many blocks were committed, by outcome (`stored`, `exists`, ...; `failed` for operations that did nothing)."""
        with self._idle:
            return dict(self._outcomes)

    def acquire(self, lease: int, hashes: bytes, timeout_s: float, prompt: Prompt | None = None, *, pool: Pool | None = None) -> Slots:
        """Lease the leading blocks that the store has, or that a pool has (none is brought there: see `clients.promotion`)."""
        live = self._ready(pool)
        link, attached, namespace_id = live
        asked = requests.checked_hashes(hashes[: requests.MAX_BLOCKS_PER_CALL * HASH_BYTES])
        op = requests.acquire(lease, namespace_id, asked, timeout_s, prompt if self._tails else None, pool=number_of(pool))
        if prompt is not None and not op.acquire.hashes and not op.acquire.token_ids:
            return Slots(np.zeros(0, np.uint32), np.zeros(0, np.uint32))
        with _held(attached):
            try:
                granting = link.take(op, timeout_s + GRACE_S)
            except _GONE as error:
                raise errors.Unavailable(str(error)) from error
            if isinstance(granting.error, _GONE):
                raise errors.Unavailable(str(granting.error)) from granting.error
            if not granting.settled and not granting.expected:  # not even an answer
                self._kept.stands_still(live, requests.release(lease, pool=number_of(pool)))
                raise errors.Unavailable(f"daemon at {self._place}: no answer within {timeout_s + GRACE_S:.1f} s; see its log")
            with self._idle:
                if granting.error is None:
                    self._remember(_name(lease, pool), attached)
        if not granting.settled:
            self._tell(attached, [requests.release(lease, keep_blocks=granting.blocks, pool=number_of(pool))])
        tail = granting.tail
        whole = granting.blocks - (tail is not None)
        return Slots(granting.units[0, :whole], granting.generations[0, :whole], tail)

    def reserve(self, count: int, *, pool: Pool | None = None) -> Slots:
        """Up to `count` slots to fill; see BlockStore."""
        live = self._ready(pool)
        with _held(live[1]):
            return self._reserve(live, count, pool)

    def _reserve(self, live: Live, count: int, pool: Pool | None) -> Slots:
        link, attached, namespace_id = live
        reservation = link.new_id()
        op = requests.reserve(reservation, namespace_id, count=min(count, requests.MAX_BLOCKS_PER_CALL), pool=number_of(pool))
        try:
            answer = link.ask([op], RESERVE_S)[0]
        except errors.DeadlineExceeded as error:
            self._kept.stands_still(live, requests.abandon(reservation, pool=number_of(pool)))
            raise errors.Unavailable(str(error)) from error
        except _GONE as error:
            raise errors.Unavailable(str(error)) from error
        if isinstance(answer, Failed) and isinstance(answer.error, _GONE):
            raise errors.Unavailable(str(answer.error)) from answer.error
        if not isinstance(answer, Slotted):
            return Slots(np.zeros(0, np.uint32), np.zeros(0, np.uint32))
        with self._idle:
            attached.hold(len(answer.units))
            self._reserved.update(dict.fromkeys(_names(answer.units, pool), (attached, reservation)))
        return Slots(answer.units, answer.generations)

    def commit(
        self, lease: int, slots: Slots, hashes: bytes, parent: bytes, tokens: Tokens | None = None, *, pool: Pool | None = None
    ) -> None:
        """Publish filled slots as consecutive blocks of one chain; see BlockStore."""
        size, step = 4 * self._geometry.block_tokens, requests.MAX_BLOCKS_PER_CALL
        ids = token_bytes(tokens) if tokens is not None and self._tails and size <= 4 * requests.MAX_TOKENS_PER_CALL else b""
        if ids:
            step = min(step, requests.MAX_TOKENS_PER_CALL // self._geometry.block_tokens)
        for start in range(0, len(slots), step):
            end = start + step
            before = hashes[(start - 1) * HASH_BYTES : start * HASH_BYTES] if start else parent
            part = Slots(slots.units[start:end], slots.generations[start:end])
            self._commit(lease, part, hashes[start * HASH_BYTES : end * HASH_BYTES], before, ids[start * size : end * size], pool)

    def abandon(self, slots: Slots, *, pool: Pool | None = None) -> None:
        """Give reserved slots back; see BlockStore."""
        groups: dict[tuple[Attached, int], list[int]] = {}
        with self._idle:
            for row, name in enumerate(_names(slots.units, pool)):
                if owner := self._reserved.pop(name, None):
                    groups.setdefault(owner, []).append(row)
        for (attached, reservation), rows in groups.items():  # of one reservation, so never more than a call takes
            self._tell(attached, [requests.abandon(reservation, (slots.units[rows], slots.generations[rows]), pool=number_of(pool))])
            attached.drop(len(rows))

    def release(self, lease: int, keep_blocks: int = 0, *, pool: Pool | None = None) -> None:
        """End a lease, or all of it past its first blocks; see BlockStore."""
        name = _name(lease, pool)
        with self._idle:
            holders = set(self._leases.get(name, ())) if keep_blocks else self._leases.pop(name, set())
        for attached in holders:
            self._tell(attached, [requests.release(lease, keep_blocks, pool=number_of(pool))])
            if not keep_blocks:
                attached.drop()

    def flush(self, timeout_s: float) -> bool:
        """Wait until every earlier commit has been answered; False when the timeout passed."""
        with self._idle:
            return self._idle.wait_for(lambda: self._pending == 0, timeout_s)

    def close(self) -> None:
        """Release everything. Idempotent."""
        with self._idle:
            first, self._closed = not self._closed, True
            for attached, _ in self._reserved.values():
                attached.drop()
            for holders in self._leases.values():
                for attached in holders:
                    attached.drop()
            self._reserved.clear()
            self._leases.clear()
        if first:
            self._kept.close()
            self._channel.close()

    # ----

    def _commit(self, lease: int, slots: Slots, hashes: bytes, parent: bytes, ids: bytes, pool: Pool | None) -> None:
        link, attached, namespace_id = self._live
        with self._idle:
            owned = [self._reserved.get(name, (None, 0))[0] is attached for name in _names(slots.units, pool)]
            count = owned.index(False) if False in owned else len(owned)
            self._outcomes["failed"] += len(slots) - count  # of a session that is over: they stay private
            if count == 0:
                return
            self._remember(_name(lease, pool), attached)
            self._pending += 1
        slots = Slots(slots.units[:count], slots.generations[:count])
        ids = ids[: 4 * count * self._geometry.block_tokens]
        words, named = (slots.units, slots.generations), hashes[: count * HASH_BYTES]
        op = requests.commit(lease, namespace_id, words, named, parent, ids, pool=number_of(pool))
        try:
            link.submit([op])[0].add_done_callback(partial(self._committed, slots, pool))
        except errors.KVStoreError as error:
            failed: Future[Answer] = Future()
            failed.set_result(Failed(error))
            self._committed(slots, pool, failed)

    def _remember(self, lease: _Name, attached: Attached) -> None:
        holders = self._leases.setdefault(lease, set())
        if attached not in holders:
            holders.add(attached)
            attached.hold()

    def _tell(self, attached: Attached, ops: list[pb.Op]) -> None:
        link, present, _ = self._live
        if attached is present and attached.error is None:
            try:
                link.tell(ops)
            except errors.SessionEnded:
                pass  # it ended meanwhile, and its holds with it
            except errors.KVStoreError:
                with self._idle:
                    self._outcomes["untold"] += 1

    def _committed(self, slots: Slots, pool: Pool | None, done: Future[Answer]) -> None:
        """A commit was answered; called by the session's thread."""
        answer = done.result()
        with self._idle:
            self._pending -= 1
            if isinstance(answer, Slotted):
                for name, outcome in zip(_names(slots.units, pool), answer.outcomes, strict=False):
                    self._outcomes[OUTCOME_NAMES[outcome]] += 1
                    owner = self._reserved.pop(name, None) if outcome == STORED else None
                    if owner is not None:
                        owner[0].drop()
            else:
                self._outcomes["failed"] += len(slots)
            self._idle.notify_all()

    def _ready(self, pool: Pool | None = None) -> Live:
        """The live session; a new one where the last is over. Raises Unavailable, soon again where the daemon was just tried.

        Also where `pool` is not of its epoch: that memory is nobody's any more.
        """
        live = self._kept.ready()
        if pool is not None and pool.epoch != live.attached.session.epoch:
            raise errors.Unavailable("the daemon was restarted, and its GPU memory is another by now; take it from `pools` and map it")
        return live

    def _require_empty_hands(self, before: Attached) -> None:
        """Slots are known by where they lie: while some of another arena are in hand, those of a new one could be taken for them.

        A session with pools stays with its arena, which is pinned for the GPU's copies. Raises Unavailable.
        """
        with self._idle:
            if before.held or self._reserved or self._leases or self._pending or self._hello.pools:
                what = "open its blocks again" if self._hello.pools else "it is used once nothing of the last one is in hand"
                raise errors.Unavailable(f"the daemon has an arena of another size now; {what}")

    def _connect(self, before: Attached | None) -> Live:
        link = Link(self._stub, self._place, self._hello, before.arena if before else None)
        try:
            opened = link.open()
            if isinstance(opened, Unmapped):
                raise errors.Unavailable(f"blocks need the arena in this process: {opened.error}")
            if before is not None and opened.arena is not before.arena:
                self._require_empty_hands(before)
            reply = self._stub.OpenNamespace(self._request, timeout=CALL_TIMEOUT_S)
            if reply.epoch != opened.session.epoch:
                raise errors.Unavailable("the daemon was restarted between two calls; try again")
            if reply.block_bytes != self._geometry.block_bytes:
                raise errors.InternalFault(f"the daemon has blocks of {reply.block_bytes} bytes, this client {self._geometry.block_bytes}")
        except grpc.RpcError as error:
            link.close()
            raise errors.Unavailable(str(error_of(error, self._place))) from None
        except errors.KVStoreError:
            link.close()
            raise
        self._tails = reply.tails and self._request.tails
        return Live(link, opened, reply.namespace_id)
