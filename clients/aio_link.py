"""One session carried by a gRPC stream on an event loop: the asynchronous shell of session.py. All of it runs on that loop."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from kvstore import errors
from kvstore.clients.answers import Answer
from kvstore.clients.arena import Arena
from kvstore.clients.channel import error_of
from kvstore.clients.handles import Attached
from kvstore.clients.link import ATTACH_TIMEOUT_S, Unmapped, ended_error, map_arena
from kvstore.clients.pools import lease_name
from kvstore.clients.session import Answered, AnsweredAll, Event, Granting, Opened, Over, Session, Settled, State, Welcomed
from kvstore.proto import kvstore_pb2 as pb

if TYPE_CHECKING:
    from kvstore.proto.kvstore_pb2_grpc import KVStoreAsyncStub


class AsyncLink:
    """See the module's text. The constructor only starts, `open` waits."""

    def __init__(self, stub: KVStoreAsyncStub, place: str, hello: pb.Hello, previous: Arena | None = None) -> None:
        self._place = place
        self._previous = previous
        self._session = Session()
        self._wake = asyncio.Event()
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._settling: dict[int, asyncio.Future[Granting]] = {}
        self._opened: asyncio.Future[Attached | Unmapped] = asyncio.get_running_loop().create_future()
        self._attached: Attached | None = None
        self._closing = False
        self._session.hello(hello)
        self._stream = stub.Attach()
        self._tasks = (asyncio.create_task(self._send()), asyncio.create_task(self._read()))
        self._wake.set()

    async def open(self, timeout_s: float = ATTACH_TIMEOUT_S) -> Attached | Unmapped:
        """Wait until the session is open. Raises Unavailable, or what the daemon refused it with."""
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._opened)
        except BaseException as error:  # a caller that was cancelled too: nobody else knows of this session
            await self.close()
            if isinstance(error, TimeoutError):
                raise errors.DeadlineExceeded(f"daemon at {self._place}: no session within {timeout_s} s; see its log") from None
            raise

    @property
    def alive(self) -> bool:
        """The session is open."""
        return self._attached is not None and self._attached.error is None

    def tell(self, ops: list[pb.Op]) -> None:
        """Queue operations whose answers nobody waits for. Raises the session's error where it is over."""
        self._session.submit(ops)
        self._wake.set()

    async def ask(self, ops: list[pb.Op], timeout_s: float) -> list[Answer]:
        """Queue operations and wait for all answers. Raises DeadlineExceeded."""
        loop = asyncio.get_running_loop()
        futures = {ticket: loop.create_future() for ticket in self._session.submit(ops)}
        self._answers.update(futures)
        self._wake.set()
        try:
            async with asyncio.timeout(timeout_s):
                return [await future for future in futures.values()]
        except TimeoutError:
            raise errors.DeadlineExceeded(f"daemon at {self._place}: no answer within {timeout_s} s; see its log") from None
        finally:
            for ticket in futures:
                self._answers.pop(ticket, None)

    async def take(self, op: pb.Op, timeout_s: float) -> Granting:
        """Queue an Acquire and wait until its lease is settled, or the time is up: then with what was granted by then."""
        lease = lease_name(op.acquire.lease, op.pool)
        self._session.submit([op])
        granting = self._session.granting(lease)
        self._settling[lease] = asyncio.get_running_loop().create_future()
        self._wake.set()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    granting = await self._settling[lease]
        finally:
            del self._settling[lease]
            self._session.forget(lease)
        return granting or Granting(0, error=errors.SessionEnded("the session ended; attach again"))

    async def close(self) -> None:
        """End the session: in order where nothing is held, otherwise its slots stay until the last hold is dropped. Idempotent."""
        attached = self._attached
        if not self._closing and attached is not None and not attached.held and self._session.state is State.OPEN:
            self._session.detach()
            self._closing = True
            self._wake.set()
            await asyncio.wait(self._tasks, timeout=1.0)
        self._closing = True
        self._stream.cancel()
        self._end(errors.SessionEnded("the client was closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- the two tasks

    async def _send(self) -> None:
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):  # the reading task hears of it too
            while True:
                while (message := self._session.next_message()) is not None:
                    await self._stream.write(message)
                if self._closing:
                    await self._stream.done_writing()
                    return
                self._wake.clear()
                await self._wake.wait()

    async def _read(self) -> None:
        error: errors.KVStoreError = errors.Unavailable(f"daemon at {self._place}: it closed the session")
        try:
            async for message in self._stream:
                self._carry_out(self._session.receive(message))
        except grpc.RpcError as fault:
            error = error_of(fault, self._place)
        except asyncio.CancelledError:
            error = errors.SessionEnded("the client was closed")
        except Exception as fault:  # noqa: BLE001 — a task's edge: whatever breaks here must reach those who wait
            error = errors.InternalFault(f"reading the session: {fault!r}")
        self._end(error)

    def _end(self, error: errors.KVStoreError) -> None:
        self._carry_out(self._session.lost(error))
        self._closing = True
        self._wake.set()

    def _carry_out(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Answered(ticket, answer):
                    self._answered(ticket, answer)
                case AnsweredAll(tickets, answers):
                    for ticket, answer in zip(tickets, answers, strict=True):
                        self._answered(ticket, answer)
                case Settled(lease, granting):
                    if (settling := self._settling.get(lease)) and not settling.done():
                        settling.set_result(granting)
                case Welcomed(welcome):
                    self._map(welcome)
                case Opened():
                    self._resolve(self._attached or Unmapped(errors.Unavailable("no arena was offered")))
                case Over(error):
                    if self._attached is not None:
                        self._attached.over(ended_error(self._session, error))
                    self._resolve(error)

    def _answered(self, ticket: int, answer: Answer) -> None:
        if (future := self._answers.get(ticket)) and not future.done():
            future.set_result(answer)

    def _map(self, welcome: pb.Welcome) -> None:
        try:
            (arena, lock), self._previous = map_arena(welcome, self._previous), None
        except errors.KVStoreError as error:
            self._resolve(Unmapped(error))
            self._end(error)
            self._stream.cancel()
            return
        self._attached = Attached(self._session, arena, lock)
        self._session.locked()
        self._wake.set()

    def _resolve(self, outcome: Attached | Unmapped | errors.KVStoreError) -> None:
        if self._opened.done():
            return
        if isinstance(outcome, errors.KVStoreError):
            self._opened.set_exception(outcome)
            self._opened.exception()  # taken: nobody may be waiting any more
        else:
            self._opened.set_result(outcome)
