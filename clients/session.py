"""The client's side of one session, without I/O: what to send next, what a message from the daemon means, who waits for it.

A shell owns the stream. It sends what `next_message` gives, hands each received message to `receive`, tells `lost` when the stream
ends, and carries out the events that come back. Nothing here blocks or reads a clock; a shell calls it under one lock or on one loop.

    FRESH ─hello→ GREETED ─Welcome→ LOCKING ─locked→ CONFIRMING ─Ready→ OPEN        any ─Ended, lost, close→ OVER
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore import errors
from kvstore.clients.answers import Answer, Expected, Failed, read_answers
from kvstore.clients.blocks import Tail
from kvstore.clients.packing import Queued, as_they_are, packed
from kvstore.clients.pools import Pool, lease_name
from kvstore.proto import kvstore_pb2 as pb

MAX_OPS_PER_BATCH = 1024  # the daemon refuses more; 128 sequences of a decode step need at most a few each
MAX_TOKENS_PER_BATCH = 524_288  # token ids, likewise: half of the largest message
MAX_BLOCKS_PER_BATCH = 8192  # the daemon's bound on all operations of a batch together: 256 KiB of hashes
MAX_QUEUED_OPS = 65_536  # operations submitted and not yet sent: far past any step, reached only when the daemon does not read


class State(StrEnum):
    FRESH = "fresh"
    GREETED = "greeted"
    LOCKING = "locking"
    CONFIRMING = "confirming"
    OPEN = "open"
    OVER = "over"


# What each message from the daemon does in each state; a pair that is not here breaks the protocol.
_TRANSITIONS: dict[tuple[State, str], State] = {
    (State.GREETED, "welcome"): State.LOCKING,
    (State.LOCKING, "ready"): State.OPEN,  # where no arena is mapped, nothing needs to be locked
    (State.CONFIRMING, "ready"): State.OPEN,
    (State.OPEN, "reply"): State.OPEN,
    (State.OPEN, "grant"): State.OPEN,
    **{(state, "ended"): State.OVER for state in State},
}


@dataclass
class Granting:
    """What a lease has been granted so far. `units` and `generations` [members, n] grow in chain order."""

    asked: int
    units: NDArray[np.uint32] = field(default_factory=lambda: np.zeros((1, 0), np.uint32))
    generations: NDArray[np.uint32] = field(default_factory=lambda: np.zeros((1, 0), np.uint32))
    ended: str = ""  # why no more will come; "" while more may
    error: errors.KVStoreError | None = None
    expected: int = 0  # blocks that the lease was to have
    tail_tokens: int = 0  # not 0: the last expected block is a donor, of which so many tokens are usable

    @property
    def tail(self) -> Tail | None:
        """The donor of a partial tail, once it is readable: the last block."""
        if not self.tail_tokens or self.blocks < self.expected:
            return None
        return Tail(int(self.units[0, -1]), int(self.generations[0, -1]), self.tail_tokens)

    @property
    def blocks(self) -> int:
        """Leading blocks that are readable."""
        return int(self.units.shape[1])

    @property
    def settled(self) -> bool:
        """Nothing more will come."""
        return bool(self.ended) or self.error is not None


# ---------------------------------------------------------------- events: what the shell must now do


@dataclass(frozen=True)
class Welcomed:
    """Map the arena and take the lock, then call `locked`."""

    welcome: pb.Welcome


@dataclass(frozen=True)
class Opened:
    """Operations may be submitted."""


class Answered(NamedTuple):
    """The operation with this ticket has its answer."""

    ticket: int
    answer: Answer


class AnsweredAll(NamedTuple):
    """Those with these tickets, which follow each other, have theirs: they were sent packed."""

    tickets: Sequence[int]
    answers: Sequence[Answer]


@dataclass(frozen=True)
class Settled:
    """Nothing more will be granted under this lease (a `lease_name`)."""

    lease: int
    granting: Granting


@dataclass(frozen=True)
class Over:
    """The session has ended; every waiter has had its event before this one."""

    error: errors.KVStoreError


Event = Welcomed | Opened | Answered | AnsweredAll | Settled | Over


class Session:
    """The protocol of one attached session; see the module's text."""

    def __init__(self) -> None:
        self.state = State.FRESH
        self.epoch = ""
        self.id = 0
        self.pools: dict[str, Pool] = {}  # by the GPU's UUID: those asked for that the daemon has
        self.error: errors.KVStoreError | None = None
        self._pack = as_they_are
        self._control: deque[pb.ClientMessage] = deque()
        self._queued: deque[Queued] = deque()
        self._queued_slots = 0  # anonymous ones that queued operations ask for
        self._sent: dict[int, list[Sequence[int]]] = {}  # by batch number: the tickets of each operation that was sent
        self._leases: dict[int, int] = {}  # ticket of an Acquire -> its lease; here and below leases go by `lease_name`
        self._granting: dict[int, Granting] = {}
        self._last_ticket = 0
        self._last_batch = 0
        self._ids = itertools.count(1)

    # ---- the shell's side

    def hello(self, message: pb.Hello) -> None:
        """Begin. Raises SessionEnded when this session has begun before."""
        if self.state is not State.FRESH:
            raise errors.SessionEnded(f"hello in state {self.state}; make a new session")
        self.state = State.GREETED
        self._control.append(pb.ClientMessage(hello=message))

    def locked(self) -> None:
        """The lock of the session's file is held."""
        if self.state is State.LOCKING:
            self.state = State.CONFIRMING
            self._control.append(pb.ClientMessage(locked=pb.Locked()))

    def detach(self) -> None:
        """Ask for an orderly end; the shell closes its side of the stream after it."""
        if self.state not in (State.FRESH, State.OVER):
            self._control.append(pb.ClientMessage(detach=pb.Detach()))

    def new_id(self) -> int:
        """An id for a lease or a reservation of this session. The one method that needs no lock."""
        return next(self._ids)

    def submit(self, ops: list[pb.Op]) -> list[int]:
        """Queue operations, to be sent in this order with whatever else is queued. Returns a ticket for each.

        Raises the session's error where it is over or not yet open, ResourceExhausted where too many are queued.
        """
        if self.state is not State.OPEN:
            raise self.error or errors.SessionEnded(f"the session is {self.state}; attach first")
        if len(self._queued) + len(ops) > MAX_QUEUED_OPS:
            raise errors.ResourceExhausted(f"{len(self._queued)} operations wait to be sent; the daemon does not read, try again later")
        tickets = []
        for op in ops:
            self._last_ticket += 1
            tickets.append(self._last_ticket)
            kind = op.WhichOneof("kind") or "none"
            self._queued.append((self._last_ticket, op, kind))
            if kind == "reserve":
                self._queued_slots += op.reserve.count
            elif kind == "acquire":
                lease = lease_name(op.acquire.lease, op.pool)
                self._leases[self._last_ticket] = lease
                self._granting[lease] = Granting(len(op.acquire.hashes) // 32)
        return tickets

    def granting(self, lease: int) -> Granting | None:
        """What an acquired lease (a `lease_name`) has so far; None once `forget` was called, or for a lease made otherwise."""
        return self._granting.get(lease)

    def forget(self, lease: int) -> None:
        """Later grants of this lease (a `lease_name`) are of no interest: it was released."""
        self._granting.pop(lease, None)

    def next_message(self) -> pb.ClientMessage | None:
        """The next message to send: what is queued, as one batch within its limits. None: nothing to send now."""
        if self._control:
            return self._control.popleft()
        if not self._queued:
            return None
        self._last_batch += 1
        queued = list(itertools.islice(self._queued, MAX_OPS_PER_BATCH))
        ops, tickets = self._pack(queued)
        message = pb.ClientMessage(batch={"number": self._last_batch, "ops": ops})
        size_bytes = message.ByteSize()
        if self._queued_slots + size_bytes // 32 > MAX_BLOCKS_PER_BATCH or size_bytes // 4 > MAX_TOKENS_PER_BATCH:
            del queued[_fitting(queued) :]  # else so short a message is within the limits
            ops, tickets = self._pack(queued)
            message = pb.ClientMessage(batch={"number": self._last_batch, "ops": ops})
        for _, op, kind in queued:
            self._queued.popleft()
            if kind == "reserve":
                self._queued_slots -= op.reserve.count
        self._sent[self._last_batch] = tickets
        return message

    # ---- the daemon's side

    def receive(self, message: pb.ServerMessage) -> list[Event]:
        """What one message means."""
        kind = message.WhichOneof("kind") or "nothing"
        after = _TRANSITIONS.get((self.state, kind))
        if after is None or (self.epoch and message.epoch != self.epoch):
            return self.lost(errors.InternalFault(f"the daemon sent {kind} in state {self.state}, epoch {message.epoch!r}"))
        if after is State.OVER:
            return self.lost(errors.from_code(message.ended.code, message.ended.text))
        self.state = after
        match kind:
            case "welcome":
                self.epoch, self.id = message.epoch, message.welcome.session
                self._pack = packed if message.welcome.each else as_they_are
                self.pools = {offer.uuid: Pool.offered(message.epoch, offer) for offer in message.welcome.pools}
                return [Welcomed(message.welcome)]
            case "ready":
                return [Opened()]
            case "reply":
                return self._replied(message.reply)
            case _:
                return self._granted(message.grant)

    def lost(self, error: errors.KVStoreError) -> list[Event]:
        """The session is over. Every operation without an answer fails with `error`, every unsettled lease too."""
        if self.state is State.OVER:
            return []
        self.state, self.error = State.OVER, error
        waiting = [ticket for sent in self._sent.values() for tickets in sent for ticket in tickets]
        waiting += [ticket for ticket, _, _ in self._queued]
        events: list[Event] = [Answered(ticket, Failed(error)) for ticket in waiting]
        for lease, granting in self._granting.items():
            if not granting.settled:
                granting.error = error
                events.append(Settled(lease, granting))
        self._sent.clear()
        self._queued.clear()
        self._control.clear()
        self._granting.clear()
        self._leases.clear()
        return [*events, Over(error)]

    def _replied(self, reply: pb.BatchReply) -> list[Event]:
        sent = self._sent.get(reply.number)
        if sent is None or reply.first_op + len(reply.replies) > len(sent):
            return self.lost(errors.InternalFault(f"the daemon answered batch {reply.number}, which was not sent"))
        events: list[Event] = []
        for tickets, op_reply in zip(sent[reply.first_op :], reply.replies, strict=False):
            answers = read_answers(op_reply, len(tickets))
            if len(tickets) > 1:
                events.append(AnsweredAll(tickets, answers))
                continue
            events.append(Answered(tickets[0], answers[0]))
            if self._leases and (lease := self._leases.pop(tickets[0], 0)) in self._granting:
                events.extend(self._acquire_answered(lease, answers[0]))
        if reply.first_op + len(reply.replies) == len(sent):
            del self._sent[reply.number]
        for grant in reply.grants:
            events.extend(self._granted(grant))
        return events

    def _acquire_answered(self, lease: int, answer: Answer) -> list[Event]:
        granting = self._granting[lease]
        if isinstance(answer, Failed):
            granting.error = answer.error
        elif isinstance(answer, Expected):
            granting.expected, granting.tail_tokens = answer.blocks, answer.tail_tokens
            if answer.blocks == 0:
                granting.ended = answer.reason
        return [Settled(lease, granting)] if granting.settled else []

    def _granted(self, grant: pb.Grant) -> list[Event]:
        lease = lease_name(grant.lease, grant.pool)
        granting = self._granting.get(lease)
        if granting is None or granting.settled:
            return []
        members = max(grant.members, 1)
        units = np.frombuffer(grant.units, "<u4").reshape(members, -1)
        generations = np.frombuffer(grant.generations, "<u4").reshape(members, -1)
        if granting.blocks == 0:
            granting.units, granting.generations = units, generations
        elif units.shape[1]:
            granting.units = np.concatenate([granting.units, units], axis=1)
            granting.generations = np.concatenate([granting.generations, generations], axis=1)
        granting.ended = grant.ended
        return [Settled(lease, granting)] if grant.ended else []


def _fitting(queued: Sequence[Queued]) -> int:
    """How many of these operations, one at least, a batch within its limits may have."""
    blocks = tokens = 0
    for count, (_, op, _) in enumerate(queued):
        blocks += op.reserve.count + (len(op.reserve.hashes) + len(op.acquire.hashes) + len(op.commit.hashes)) // 32
        tokens += (len(op.acquire.token_ids) + len(op.commit.token_ids)) // 4
        if count and (blocks > MAX_BLOCKS_PER_BATCH or tokens > MAX_TOKENS_PER_BATCH):
            return count
    return len(queued)
