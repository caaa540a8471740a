"""Attach: one stream is one session. Messages are handled as they come, and answered through a bounded queue.

    Hello → Welcome → (the client maps and locks) Locked → Ready → batches and grants → Detach, or whatever ends the stream
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import numpy as np

from kvstore import errors
from kvstore.cache.messages import (
    Abandon,
    Acquire,
    Acquired,
    Attach,
    BlockOutcome,
    Claim,
    Commit,
    Committed,
    Granted,
    Outcome,
    Refused,
    Release,
    Reserve,
    Reserved,
)
from kvstore.daemon import wire
from kvstore.daemon.bounds import PACKED, check_batch, check_length
from kvstore.daemon.hub import Hub
from kvstore.daemon.pool_calls import core_in, pool_offers, pool_terms
from kvstore.daemon.runs import carry_out, each_of, singles_of
from kvstore.daemon.sessions import Attached
from kvstore.proto import kvstore_pb2 as pb
from kvstore.tiers.dram import DramTier

OUTCOMES = {int(outcome): outcome.name.lower() for outcome in BlockOutcome}
MAX_OUTBOUND_MESSAGES = 4096  # messages to a client that does not read: minutes of a decoding engine's
MAX_OUTBOUND_BYTES = 16 * 2**20  # 16 MiB: thousands of grants of whole prompts
LOCK_TIMEOUT_S = 30.0  # seconds from Welcome to Locked: mapping hundreds of GiB takes less than one
FAREWELL_S = 2.0  # seconds for the last messages to leave before the stream is cut

log = logging.getLogger(__name__)
Send = Callable[[pb.ServerMessage], Awaitable[None]]


class Outbound:
    """Messages on their way to one client."""

    def __init__(self, epoch: str) -> None:
        self._epoch = epoch
        self._queue: deque[tuple[pb.ServerMessage, int]] = deque()  # and their bytes
        self._bytes = 0
        self._ready = asyncio.Event()
        self.closed = False
        self.closing = asyncio.Event()

    def push(self, message: pb.ServerMessage) -> bool:
        """Queue one; False where the queue is full. After `close` nothing is queued."""
        if self.closed:
            return True
        size_bytes = message.ByteSize()
        if len(self._queue) >= MAX_OUTBOUND_MESSAGES or self._bytes + size_bytes > MAX_OUTBOUND_BYTES:
            return False
        message.epoch = self._epoch
        self._queue.append((message, size_bytes))
        self._bytes += size_bytes
        self._ready.set()
        return True

    def close(self, last: pb.ServerMessage | None = None) -> None:
        """Nothing more but this; what is queued still leaves first, unless it is too much."""
        if self.closed:
            return
        if last is not None:
            if len(self._queue) >= MAX_OUTBOUND_MESSAGES or self._bytes > MAX_OUTBOUND_BYTES // 2:
                self._queue.clear()
            last.epoch = self._epoch
            self._queue.append((last, 0))
        self.closed = True
        self.closing.set()
        self._ready.set()

    async def drain_into(self, send: Send) -> None:
        """Send until closed and empty."""
        while True:
            while self._queue:
                message, size_bytes = self._queue.popleft()
                self._bytes -= size_bytes
                await send(message)
            if self.closed:
                return
            self._ready.clear()
            await self._ready.wait()


@dataclass(frozen=True)
class SessionLimits:
    """What the daemon's settings allow any session."""

    longest_wait_s: float
    limit_bytes: int  # 0: none


class SessionStream:
    """One Attach call. It is the session's `Grantee`."""

    def __init__(self, hub: Hub, dram: DramTier, tenant: str, limits: SessionLimits, counts: Counter[tuple[str, str]]) -> None:
        """`counts`: block outcomes by (operation, outcome), for metrics."""
        self._hub = hub
        self._dram = dram
        self._tenant = tenant
        self._limits = limits
        self._counts = counts
        self._out = Outbound(hub.epoch)
        self._session: Attached | None = None
        self._error: errors.KVStoreError | None = None
        self._at_once: list[pb.Grant] | None = None  # while a batch is carried out: what it grants

    async def serve(self, incoming: AsyncIterator[pb.ClientMessage], send: Send) -> None:
        """Until either side ends. However it ends, the session does too."""
        reader = asyncio.create_task(self._read(incoming))
        writer = asyncio.create_task(self._out.drain_into(send))
        closing = asyncio.create_task(self._out.closing.wait())  # a client that does not read keeps both of them waiting
        try:
            await asyncio.wait({reader, writer, closing}, return_when=asyncio.FIRST_COMPLETED)
            self._end()
            self._out.close()
            done, _ = await asyncio.wait({writer}, timeout=FAREWELL_S)
            if not done and self._error is not None:
                raise self._error  # the client does not read: the call's status tells it why
        finally:
            for task in (reader, writer, closing):
                task.cancel()
            self._end()
            await asyncio.gather(reader, writer, closing, return_exceptions=True)

    def _end(self) -> None:
        if self._session is not None and not self._session.ended:
            self._hub.end_session(self._session.id, "its stream ended without Detach")

    # ---- as the session's grantee

    def granted(self, granted: Granted, pool: int = 0) -> None:
        """Send a grant: with the answer of the batch that is being carried out, or by itself."""
        grants = wire.grants_of(granted, pool)
        if self._at_once is not None:
            self._at_once.extend(grants)
            return
        for grant in grants:
            self._push(pb.ServerMessage(grant=grant))

    def ended(self, reason: str) -> None:
        """Say so, and close."""
        self._fail(errors.SessionEnded(reason))

    def shut_down(self) -> None:
        """The daemon stops."""
        self._fail(errors.Unavailable("the daemon is shutting down; attach again when it is back"))

    # ---- messages

    async def _read(self, incoming: AsyncIterator[pb.ClientMessage]) -> None:
        deadline = asyncio.get_running_loop().call_later(LOCK_TIMEOUT_S, self._not_locked)
        try:
            async for message in incoming:
                self._receive(message)
                if self._out.closed:
                    return
        except errors.KVStoreError as error:
            self._fail(error)
        except Exception as error:  # a session's edge: a fault of ours must end this session, not the daemon
            log.exception("session %s: unexpected", self._session.id if self._session else "(none)")
            self._fail(errors.InternalFault(f"{error!r}"))
        finally:
            deadline.cancel()

    def _receive(self, message: pb.ClientMessage) -> None:
        kind = message.WhichOneof("kind")
        session = self._session
        if session is None:
            if kind != "hello":
                raise errors.InvalidArgument(f"the first message is {kind}; begin with hello")
            self._hello(message.hello)
            return
        self._hub.cache.heard(session.id, self._hub.now)
        match kind:
            case "locked" if not session.locked:
                self._hub.sessions.confirm_lock(session)
                self._push(pb.ServerMessage(ready=pb.Ready()))
            case "batch":
                if not session.locked:
                    raise errors.InvalidArgument("operations before Ready; take the lock, send Locked and wait for Ready")
                self._batch(session, message.batch)
            case "detach":
                self._hub.detach(session.id)
            case _:
                raise errors.InvalidArgument(f"{kind} does not belong here in a session's stream")

    def _hello(self, hello: pb.Hello) -> None:
        hub = self._hub
        client = wire.text_of(hello.client, "client")
        old = hub.sessions.resumable(hello.resume_session, hello.resume_token, self._tenant) if hello.resume_session else None
        terms = pool_terms(hub.pools, hello, self._limits.limit_bytes)
        session = hub.sessions.begin(self._tenant, client, maps_arena=hello.maps_arena)
        limit_bytes = min(filter(None, (hello.limit_bytes, self._limits.limit_bytes)), default=0)
        attach = Attach(session.id, self._tenant, hello.guarantee_bytes, limit_bytes, old.id if old else 0)
        answer = hub.attach(attach, terms)
        if isinstance(answer, Refused):
            hub.sessions.forget(session.id)
            raise wire.refusal(answer)
        self._session = session
        if old is not None:
            hub.sessions.take_over(old, session)
        hub.join(session.id, self)
        log.info("session %d attached", session.id, extra={"client": client, "tenant": self._tenant, "resumes": hello.resume_session})
        welcome = pb.Welcome(session=session.id, resume_token=session.token, pools=pool_offers(hub.pools, terms), each=True)
        if hello.maps_arena:
            welcome.arena_path, welcome.arena_bytes = str(self._dram.path), self._dram.capacity_bytes
            welcome.arena_header_bytes, welcome.session_path = self._dram.header_bytes, str(session.files[-1].path)
        hub.settle(lambda: self._push(pb.ServerMessage(welcome=welcome)))
        if not hello.maps_arena:
            session.locked = True
            self._push(pb.ServerMessage(ready=pb.Ready()))

    def _batch(self, session: Attached, batch: pb.Batch) -> None:
        check_length(batch)
        ops = list(batch.ops)  # each is read several times: made into an object once
        kinds = check_batch(batch, ops)
        of = session.id
        replies = [self._each(of, op, kind) if kind in PACKED else self._operate(of, op) for op, kind in zip(ops, kinds, strict=True)]
        at_once: list[pb.Grant] = []
        self._at_once = at_once
        try:
            self._hub.settle()
        finally:
            self._at_once = None
        for message in wire.batch_messages(batch.number, replies, at_once):
            self._push(message)

    def _each(self, session: int, op: pb.Op, kind: str) -> wire.Reply:
        """The answer to a packed operation."""
        single = PACKED[kind]
        try:
            each = each_of(op, session)
        except errors.KVStoreError as error:
            self._counts[single, error.code.lower()] += 1
            return wire.error_reply(error)
        answers = carry_out(self._hub.cache, each)
        if answers is None:
            return pb.OpReply(each=pb.EachReply(replies=[self._operate(session, one) for one in singles_of(each)]))
        reply, outcomes = answers
        for name, count in outcomes.items():
            self._counts[single, name] += count
        return reply

    def _operate(self, session: int, op: pb.Op) -> pb.OpReply:
        kind = op.WhichOneof("kind") or "none"
        try:
            request = wire.input_of(op, session, self._hub.now, self._limits.longest_wait_s)
            cache = self._hub.cache
            if op.pool:
                cache, kind = core_in(self._hub.pools, op.pool, request), f"{kind}_hbm"
        except errors.KVStoreError as error:
            self._counts[kind, error.code.lower()] += 1
            return wire.error_reply(error)
        outcome: Outcome
        match request:
            case Acquire():
                outcome = cache.acquire(request, self._hub.now)
                if isinstance(outcome, Acquired):
                    whole = outcome.expected - (outcome.tail_tokens > 0)
                    self._counts[kind, "block_hit"] += whole
                    self._counts[kind, "block_miss"] += len(request.hashes) - whole
            case Claim():
                outcome = cache.claim(request)
            case Reserve():
                outcome = cache.reserve(request)
            case Commit():
                outcome = cache.commit(request)
            case Abandon():
                outcome = cache.abandon(request)
            case Release():
                outcome = cache.release(request)
        self._count(kind, outcome)
        return wire.reply_of(outcome, request.reservation if isinstance(request, Reserve | Abandon) else request.lease)

    def _count(self, kind: str, outcome: Outcome) -> None:
        match outcome:
            case Reserved(outcomes=outcomes) | Committed(outcomes=outcomes):
                counts = np.bincount(outcomes)
                for code in np.flatnonzero(counts).tolist():
                    self._counts[kind, OUTCOMES[code]] += int(counts[code])
            case Refused(code, _):
                self._counts[kind, code.lower()] += 1
            case _:
                self._counts[kind, "ok"] += 1

    def _push(self, message: pb.ServerMessage) -> None:
        if not self._out.push(message):
            self._fail(errors.ResourceExhausted("the client does not read its stream: too many messages wait for it; attach again"))

    def _not_locked(self) -> None:
        if self._session is None or not self._session.locked:
            self._fail(errors.DeadlineExceeded(f"no Hello and Locked within {LOCK_TIMEOUT_S:g} s; attach again"))

    def _fail(self, error: errors.KVStoreError) -> None:
        """Close the stream for this reason, which is the first one."""
        self._error = self._error or error
        self._out.close(pb.ServerMessage(ended=pb.Ended(code=error.code, text=errors.to_text(error))))
