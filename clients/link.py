"""One session carried by a gRPC stream and a thread that reads it: the blocking shell of session.py.

Any thread may call; `submit` takes microseconds and never waits for the network. The reading thread alone receives; grpc's own thread
sends what is queued, as few batches as it keeps up with. `close` or the stream's end finishes both.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc

from kvstore import errors
from kvstore.clients.answers import Answer
from kvstore.clients.arena import Arena, SessionLock
from kvstore.clients.channel import error_of
from kvstore.clients.handles import Attached
from kvstore.clients.pools import lease_name
from kvstore.clients.session import Answered, AnsweredAll, Event, Granting, Opened, Over, Session, Settled, State, Welcomed
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.kvstore_pb2_grpc import KVStoreStub

T = TypeVar("T")
ATTACH_TIMEOUT_S = 10.0  # two round trips and two maps; a daemon that takes longer is not serving


@dataclass(frozen=True)
class Unmapped:
    """The arena cannot be mapped in this process, and why."""

    error: errors.KVStoreError


def map_arena(welcome: pb.Welcome, previous: Arena | None) -> tuple[Arena, SessionLock]:
    """Do what a Welcome asks for. The previous map is kept where it is of the same file. Raises Unavailable or FormatError."""
    arena = Arena(welcome.arena_path, welcome.arena_header_bytes, welcome.arena_bytes)
    if previous is not None and previous.inode == arena.inode:
        arena = previous  # its pages are in this process's tables already
    return arena, SessionLock(welcome.session_path)


def ended_error(session: Session, error: errors.KVStoreError) -> errors.KVStoreError:
    """What using a hold of this session raises once the session is over."""
    if isinstance(error, errors.StaleEpoch | errors.SessionEnded):
        return error
    return errors.SessionEnded(f"session {session.id} is over ({error}); its leases are gone, make new ones")


class _Awaited(Generic[T]):
    """A value that one thread waits for. A future would do, but an interrupt in its `result` can leave its lock taken for ever."""

    def __init__(self) -> None:
        self.value: T | None = None
        self._gate = threading.Lock()
        self._gate.acquire()

    def set_result(self, value: T) -> None:
        """It is there; said once."""
        self.value = value
        self._gate.release()

    def within(self, timeout_s: float) -> T | None:
        """The value, or None when the time is up."""
        self._gate.acquire(timeout=max(timeout_s, 0.0))
        return self.value


class _Answers:
    """The answers to operations that somebody waits for together: one wait for all, since one for each costs more than the answer."""

    def __init__(self, count: int) -> None:
        self.all = _Awaited[list[Answer]]()
        self.first = 0  # ticket of the first; the others' follow it
        self._found: list[Answer | None] = [None] * count
        self._left = count
        self._guard = threading.Lock()

    def arrived(self, ticket: int, answers: Sequence[Answer]) -> None:
        """The answers to some of them, that with this ticket and those after it; on any thread."""
        place = ticket - self.first
        with self._guard:
            self._found[place : place + len(answers)] = answers
            self._left -= len(answers)
            whole = not self._left
        if whole:
            self.all.set_result([each for each in self._found if each is not None])


class Link:
    """See the module's text. Made attached or not at all: the constructor only starts, `open` waits."""

    def __init__(self, stub: KVStoreStub, place: str, hello: pb.Hello, previous: Arena | None = None) -> None:
        self._place = place
        self._previous = previous
        self._session = Session()
        self._lock = threading.RLock()  # taken as it is, in C: an interrupt inside a Condition's own `with` leaves it locked for ever
        self._wake = threading.Condition(self._lock)
        self._answers: dict[int, Future[Answer] | _Answers] = {}
        self._settling: dict[int, Future[Granting] | _Awaited[Granting]] = {}
        self._opened: Future[Attached | Unmapped] = Future()
        self._attached: Attached | None = None
        self._closing = False
        self._pid = os.getpid()
        self._session.hello(hello)
        self._stream = stub.Attach(self._outgoing())
        self._reader = threading.Thread(target=self._read, name="kvstore-session", daemon=True)
        self._reader.start()

    def open(self, timeout_s: float = ATTACH_TIMEOUT_S) -> Attached | Unmapped:
        """Wait until the session is open. Raises Unavailable, or what the daemon refused it with."""
        try:
            return self._opened.result(timeout_s)
        except BaseException as error:  # a caller who was interrupted too: nobody else knows of this session
            self.close()
            if isinstance(error, FutureTimeout):
                raise errors.DeadlineExceeded(f"daemon at {self._place}: no session within {timeout_s} s; see its log") from None
            raise

    @property
    def alive(self) -> bool:
        """The session is open, in the process that opened it."""
        return self._attached is not None and self._attached.error is None and self._pid == os.getpid()

    def tell(self, ops: list[pb.Op]) -> None:
        """Queue operations whose answers nobody waits for. Raises the session's error where it is over."""
        with self._lock:
            self._session.submit(ops)
            self._wake.notify()

    def submit(self, ops: list[pb.Op]) -> list[Future[Answer]]:
        """Queue operations; each future gets its answer, `Failed` where the session ends first."""
        futures: list[Future[Answer]] = [Future() for _ in ops]
        with self._lock:
            self._answers.update(zip(self._session.submit(ops), futures, strict=True))
            self._wake.notify()
        return futures

    def ask(self, ops: list[pb.Op], timeout_s: float) -> list[Answer]:
        """Queue operations and wait for all answers. Raises DeadlineExceeded."""
        if not ops:
            return []
        answers = _Answers(len(ops))
        with self._lock:
            tickets = self._session.submit(ops)
            answers.first = tickets[0]
            self._answers.update(dict.fromkeys(tickets, answers))
            self._wake.notify()
        found = answers.all.within(timeout_s)
        if found is None:
            raise errors.DeadlineExceeded(f"daemon at {self._place}: no answer within {timeout_s} s; see its log")
        return found

    def take(self, op: pb.Op, timeout_s: float) -> Granting:
        """Queue an Acquire and wait until its lease is settled, or the time is up: then with what was granted by then."""
        lease, settled = lease_name(op.acquire.lease, op.pool), _Awaited[Granting]()
        try:
            self._begin(op, settled)
            settled.within(timeout_s)
            return self.granted(lease)
        except BaseException:  # an interrupt
            self.granted(lease)
            raise

    def begin(self, op: pb.Op) -> Future[Granting]:
        """Queue an Acquire; the future is done once its lease is settled. `granted` ends it, and must follow in any case."""
        future: Future[Granting] = Future()
        self._begin(op, future)
        return future

    def _begin(self, op: pb.Op, settling: Future[Granting] | _Awaited[Granting]) -> None:
        with self._lock:
            self._session.submit([op])
            self._settling[lease_name(op.acquire.lease, op.pool)] = settling
            self._wake.notify()

    def granted(self, lease: int) -> Granting:
        """What a lease (a `lease_name`) that was begun has by now. Later grants are of no interest: release what was not settled."""
        with self._lock:
            future = self._settling.pop(lease, None)
            granting = self._session.granting(lease)
            self._session.forget(lease)
        if isinstance(future, Future):
            granting = future.result() if future.done() else granting
        elif future is not None:
            granting = future.value or granting
        return granting or Granting(0, error=errors.SessionEnded("the session ended; attach again"))

    def new_id(self) -> int:
        """An id for a lease or a reservation."""
        return self._session.new_id()

    def close(self) -> None:
        """End the session: in order where nothing is held, otherwise its slots stay until the last hold is dropped. Idempotent."""
        attached = self._attached
        with self._lock:
            orderly = not self._closing and attached is not None and not attached.held and self._session.state is State.OPEN
            if orderly:
                self._session.detach()
            self._closing = True
            self._wake.notify_all()
        if self._pid != os.getpid():
            return
        if orderly:
            self._reader.join(timeout=1.0)
        self._stream.cancel()
        self._end(errors.SessionEnded("the client was closed"))

    # ---- the two threads

    def _outgoing(self) -> Iterator[pb.ClientMessage]:
        while True:
            with self._lock:
                while (message := self._session.next_message()) is None and not self._closing:
                    self._wake.wait()
            if message is None:
                return
            yield message

    def _read(self) -> None:
        error: errors.KVStoreError = errors.Unavailable(f"daemon at {self._place}: it closed the session")
        try:
            for message in self._stream:
                with self._lock:
                    events = self._session.receive(message)
                self._carry_out(events)
        except grpc.RpcError as fault:
            error = error_of(fault, self._place)
        except Exception as fault:  # noqa: BLE001 — a thread's edge: whatever breaks here must reach those who wait
            error = errors.InternalFault(f"reading the session: {fault!r}")
        self._end(error)

    def _end(self, error: errors.KVStoreError) -> None:
        with self._lock:
            events = self._session.lost(error)
            self._closing = True
            self._wake.notify_all()
        self._carry_out(events)

    def _carry_out(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Answered(ticket, answer):
                    self._answered(ticket, answer)
                case AnsweredAll(tickets, answers):
                    waiting = list(map(self._answers.get, tickets))
                    together = waiting[0]
                    if isinstance(together, _Answers) and waiting.count(together) == len(tickets):
                        for ticket in tickets:
                            del self._answers[ticket]
                        together.arrived(tickets[0], answers)
                    else:
                        for ticket, answer in zip(tickets, answers, strict=True):
                            self._answered(ticket, answer)
                case Settled(lease, granting):
                    if settling := self._settling.get(lease):
                        settling.set_result(granting)
                case Welcomed(welcome):
                    self._map(welcome)
                case Opened():
                    with contextlib.suppress(InvalidStateError):  # closed meanwhile
                        self._opened.set_result(self._attached or Unmapped(errors.Unavailable("no arena was offered")))
                case Over(error):
                    self._over(error)

    def _answered(self, ticket: int, answer: Answer) -> None:
        waiting = self._answers.pop(ticket, None)
        if isinstance(waiting, _Answers):
            waiting.arrived(ticket, [answer])
        elif waiting is not None:
            waiting.set_result(answer)

    def _map(self, welcome: pb.Welcome) -> None:
        try:
            (arena, lock), self._previous = map_arena(welcome, self._previous), None  # which is another daemon's by now, mostly
        except errors.KVStoreError as error:
            with contextlib.suppress(InvalidStateError):  # closed meanwhile
                self._opened.set_result(Unmapped(error))
            self._end(error)
            self._stream.cancel()
            return
        self._attached = Attached(self._session, arena, lock)
        with self._lock:
            self._session.locked()
            self._wake.notify()

    def _over(self, error: errors.KVStoreError) -> None:
        if self._attached is not None:
            self._attached.over(ended_error(self._session, error))
        with contextlib.suppress(InvalidStateError):  # it was open
            self._opened.set_exception(error)
