"""The edge of every call: messages parsed, the caller's tenant, errors as gRPC statuses, and counts and times by method and code."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from kvstore import errors

UNIX_TENANT = "default"  # whoever may open the socket is of one trust domain

log = logging.getLogger(__name__)


class CallMeter(Protocol):
    """Where calls are counted."""

    def call_ended(self, method: str, code: str, seconds: float) -> None:
        """A call of this method ended with this status."""


def tenant_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Who is charged, and whose namespaces may be seen: known from the socket that the call came by."""
    return UNIX_TENANT


def status_of(error: errors.KVStoreError) -> tuple[grpc.StatusCode, str]:
    """A store's error as it travels."""
    return grpc.StatusCode[error.code], errors.to_text(error)


@dataclass(frozen=True)
class Malformed:
    """Stands for a message whose bytes are none of its type."""

    why: str


def _parsing(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """A parser that never raises: grpc would take that for a fault of ours."""

    def tried(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            return Malformed(str(error))

    return tried


def _whole(message: Any) -> Any:
    """The message. Raises InvalidArgument where its bytes were none."""
    if isinstance(message, Malformed):
        raise errors.InvalidArgument(f"the message cannot be read: {message.why}; use the daemon's own kvstore.proto")
    return message


async def _each_whole(messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for message in messages:
        yield _whole(message)


class Edge:
    """Takes the service's handlers in the server's place and passes them on wrapped, once: an interceptor would wrap at every call."""

    def __init__(self, server: grpc.aio.Server, meter: CallMeter) -> None:
        self._server = server
        self._meter = meter

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """See grpc.aio.Server. The generated code gives the same handlers by name too, which are the ones that are passed on."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """See grpc.aio.Server."""
        wrapped = {method: self.wrap(method, handler) for method, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, wrapped),))
        self._server.add_registered_method_handlers(service, wrapped)

    def wrap(self, method: str, handler: Any) -> Any:
        """A handler that counts its calls, and answers with statuses where `handler` raises."""
        handler = handler._replace(request_deserializer=_parsing(handler.request_deserializer))
        kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        acts = {kind: act for kind in kinds if (act := getattr(handler, kind)) is not None}
        return handler._replace(**{kind: self._wrapped(method, act, streams=kind.startswith("stream")) for kind, act in acts.items()})

    def _wrapped(self, method: str, act: Callable[[Any, Any], Awaitable[Any]], *, streams: bool) -> Callable[[Any, Any], Awaitable[Any]]:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            started_at = time.monotonic()
            code, text = grpc.StatusCode.CANCELLED, ""
            try:
                reply = await act(_each_whole(request) if streams else _whole(request), context)
                code = grpc.StatusCode.OK
                return reply
            except errors.KVStoreError as error:
                code, text = status_of(error)
            except asyncio.CancelledError:
                raise
            except grpc.aio.InternalError as error:  # the caller has gone, which grpc has not noticed yet: nobody waits for the rest
                log.debug("%s: the caller has gone", method, exc_info=True)
                raise asyncio.CancelledError from error
            except Exception as error:  # an RPC's edge: a fault of ours must fail this call, not the daemon
                log.exception("%s: unexpected", method)
                code, text = status_of(errors.InternalFault(f"{error!r}; please report it"))
            finally:
                seconds = time.monotonic() - started_at
                asyncio.get_running_loop().call_soon(self._meter.call_ended, method, code.name, seconds)  # after the answer has left
            try:
                return await context.abort(code, text)
            except grpc.aio.InternalError as error:  # likewise
                raise asyncio.CancelledError from error

        return call
