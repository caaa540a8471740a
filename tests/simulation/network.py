"""The simulated network: grpc's asyncio transport, client and server side, as far as it promises anything.

Messages of one direction of one call arrive in order or not at all; a call ends as a whole. What is sent is bytes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from tests.simulation.machine import Machine, Process

LATENCY_S = (2e-5, 5e-4)  # seconds: a Unix socket on a busy machine
NOTICE_S = (1e-4, 0.05)  # seconds until the other side's end is noticed
OK, CANCELLED, UNAVAILABLE = grpc.StatusCode.OK, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE


class Aborted(BaseException):
    """What `context.abort` raises in a handler."""


@dataclass(frozen=True)
class End:
    """The last thing that a side of a call hears."""

    code: grpc.StatusCode
    text: str = ""


class Inbox:
    """What has arrived for one side of a call."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._items: deque[bytes | End] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: bytes | End) -> None:
        if not self._process.alive:
            return
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> bytes | End:
        while not self._items:
            self._waiter = self._process.loop.create_future()
            await self._waiter
        if isinstance(self._items[0], End):
            return self._items[0]
        return self._items.popleft()


class Call:
    """One call between a client and a server, both sides."""

    def __init__(self, network: Network, method: str, client: Process, streaming: bool) -> None:
        self.method, self.client, self.server = method, client, network.serving
        self.streaming = streaming
        self.at_client = Inbox(client)
        self.at_server: Inbox | None = None
        self.over = False  # nothing travels any more
        self.task: asyncio.Task[None] | None = None
        self._network = network
        self._arrives_at = {True: 0.0, False: 0.0}  # by whether it goes to the server

    def to_server(self, act: Callable[[], None]) -> None:
        self._travel(True, self.server.process if self.server else None, act)

    def to_client(self, act: Callable[[], None]) -> None:
        self._travel(False, self.client, act)

    def _travel(self, up: bool, target: Process | None, act: Callable[[], None]) -> None:
        machine = self._network.machine
        self._arrives_at[up] = max(self._arrives_at[up], machine.now + machine.chance.uniform(*LATENCY_S))
        machine.after(self._arrives_at[up] - machine.now, lambda: None if self.over or not target or not target.alive else act())

    def end(self, code: grpc.StatusCode, text: str = "") -> None:
        """The transport gives it up: each side hears of it, sooner or later, or never."""
        if self.over:
            return
        self.over = True
        machine = self._network.machine
        machine.after(machine.chance.uniform(*NOTICE_S), lambda: self.at_client.put(End(code, text)))
        machine.after(machine.chance.uniform(*NOTICE_S), self._cancel_handler)

    def finish(self, code: grpc.StatusCode, text: str = "") -> None:
        """The server is done with it."""
        self.to_client(lambda: self._finished(End(code, text)))

    def _finished(self, end: End) -> None:
        self.over = True
        self.at_client.put(end)

    def _cancel_handler(self) -> None:
        if self.task is not None and self.server is not None and self.server.process.alive and not self.task.done():
            self.task.cancel()


class Network:
    """Who listens, and what is under way."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.serving: Server | None = None
        self.calls: list[Call] = []
        self.reply_loss = 0.0  # chance that a call is carried out and its answer lost

    def call(self, method: str, streaming: bool) -> Call:
        """Begin a call from the running process."""
        call = Call(self, method, self.machine.running, streaming)
        server = call.server
        if server is None or not server.process.alive:
            call.end(UNAVAILABLE, "connection refused")
            return call
        self.calls = [known for known in self.calls if not known.over]
        self.calls.append(call)
        call.at_server = Inbox(server.process)
        call.to_server(lambda: server.accept(call))
        return call

    def cut(self, client: Process | None = None) -> None:
        """Connections break: this client's, or all."""
        for call in self.calls:
            if client is None or call.client is client:
                call.end(UNAVAILABLE, "Socket closed")


# ---------------------------------------------------------------- the server's side


class Context:
    """A handler's `ServicerContext`."""

    def __init__(self, call: Call, serialize: Callable[[Any], bytes]) -> None:
        self._call, self._serialize = call, serialize

    def peer(self) -> str:
        return "unix:"

    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        self._call.finish(code, text)
        raise Aborted

    async def write(self, message: Any) -> None:
        data, call = self._serialize(message), self._call
        if call.over or call.server is None or not call.server.process.effect(f"sends {len(data)} bytes to {call.client}"):
            raise asyncio.CancelledError
        call.to_client(lambda: call.at_client.put(data))
        await asyncio.sleep(0)


class Server:
    """In the place of `grpc.aio.server`."""

    def __init__(self, network: Network, interceptors: Any = (), **_: Any) -> None:
        self.process = network.machine.running
        self._network = network
        self._interceptors = interceptors
        self._handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        pass

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self._handlers.update({f"/{service}/{name}": handler for name, handler in handlers.items()})

    def add_insecure_port(self, address: str) -> int:
        return 1

    async def start(self) -> None:
        for method, handler in self._handlers.items():
            for interceptor in self._interceptors:
                self._handlers[method] = await self._intercepted(interceptor, method, handler)
        self._network.serving = self

    async def _intercepted(self, interceptor: Any, method: str, handler: Any) -> Any:
        async def continuation(details: Any) -> Any:
            return handler

        class Details:
            pass

        details: Any = Details()
        details.method = method
        return await interceptor.intercept_service(continuation, details)

    async def stop(self, grace_s: float) -> None:
        self._network.serving = None
        mine = [call.task for call in self._network.calls if call.server is self and call.task]
        if mine:
            await asyncio.wait(mine, timeout=grace_s)
            for task in mine:
                task.cancel()

    def accept(self, call: Call) -> None:
        """A call has arrived."""
        call.task = self.process.loop.create_task(self._handle(call, self._handlers[call.method]))

    async def _handle(self, call: Call, handler: Any) -> None:
        context = Context(call, handler.response_serializer)
        act = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        try:
            if handler.request_streaming:
                reply = await act(self._requests(call, handler), context)
            else:
                assert call.at_server is not None
                data = await call.at_server.get()
                assert isinstance(data, bytes)
                reply = await act(handler.request_deserializer(data), context)
        except Aborted:
            return
        except asyncio.CancelledError:
            call.finish(CANCELLED)
            return
        if not handler.response_streaming:
            if self._network.reply_loss and self._network.machine.chance.random() < self._network.reply_loss:
                self._network.machine.note(f"the answer to {call.method} is lost")
                call.end(UNAVAILABLE, "Connection reset by peer")
                return
            data = handler.response_serializer(reply)
            if not self.process.effect(f"answers {call.method.rpartition('/')[2]}"):
                return
            call.to_client(lambda: call.at_client.put(data))
        call.finish(OK)

    async def _requests(self, call: Call, handler: Any) -> AsyncIterator[Any]:
        assert call.at_server is not None
        while isinstance(data := await call.at_server.get(), bytes):
            yield handler.request_deserializer(data)
        if data.code is not OK:
            raise asyncio.CancelledError


# ---------------------------------------------------------------- the client's side


class Channel:
    """In the place of `grpc.aio.insecure_channel`: what a generated stub asks of a channel."""

    def __init__(self, network: Network, *_: Any) -> None:
        self._network = network

    def unary_unary(self, method: str, *, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        async def call(request: Any, timeout: float | None = None) -> Any:
            data: bytes = request_serializer(request)
            return await Using(self._network, method, None, response_deserializer, timeout).ask([data])

        return call

    def unary_stream(self, method: str, *, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        def call(request: Any, timeout: float | None = None) -> Using:
            using = Using(self._network, method, None, response_deserializer, timeout)
            using.send(request_serializer(request))
            using.half_close()
            return using

        return call

    def stream_unary(self, method: str, *, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        async def call(messages: Any, timeout: float | None = None) -> Any:
            using = Using(self._network, method, None, response_deserializer, timeout)
            return await using.ask([request_serializer(message) for message in messages])

        return call

    def stream_stream(self, method: str, *, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        return lambda: Using(self._network, method, request_serializer, response_deserializer, None)

    async def close(self) -> None:
        self._network.cut(self._network.machine.running)


class Using:
    """A call as its client sees it."""

    def __init__(self, network: Network, method: str, serialize: Any, deserialize: Any, timeout: float | None) -> None:
        self._serialize, self._deserialize = serialize, deserialize
        self._call = network.call(method, serialize is not None)
        self._cancelled = False
        if timeout is not None:
            network.machine.running.loop.call_later(timeout, self._too_late)

    def send(self, data: bytes) -> None:
        call = self._call
        if not call.client.effect(f"sends {len(data)} bytes to {call.method.rpartition('/')[2]}"):
            return
        if (inbox := call.at_server) is not None:
            call.to_server(lambda: inbox.put(data))

    def half_close(self) -> None:
        call = self._call
        if (inbox := call.at_server) is not None:
            call.to_server(lambda: inbox.put(End(OK)))

    async def write(self, message: Any) -> None:
        if self._cancelled or self._call.over:
            raise asyncio.InvalidStateError("the call has ended")
        self.send(self._serialize(message))
        await asyncio.sleep(0)

    async def done_writing(self) -> None:
        self.half_close()

    def cancel(self) -> bool:
        first, self._cancelled = not self._cancelled, True
        if first:
            self._call.end(CANCELLED)
        return first

    async def ask(self, messages: list[bytes]) -> Any:
        """Send, and wait for the one answer."""
        for data in messages:
            self.send(data)
        self.half_close()
        try:
            return await anext(aiter(self))
        except asyncio.CancelledError:
            self.cancel()
            raise

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._messages()

    async def _messages(self) -> AsyncIterator[Any]:
        while isinstance(item := await self._call.at_client.get(), bytes):
            yield self._deserialize(item)
        if self._cancelled:
            raise asyncio.CancelledError
        if item.code is not OK:
            raise grpc.aio.AioRpcError(item.code, details=item.text)

    def _too_late(self) -> None:
        if not self._call.over:
            self._call.end(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
