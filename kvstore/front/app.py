"""The routes: requests are passed on as they are, and faults of the front door itself are said as OpenAI's clients expect them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvstore.errors import Unavailable
from kvstore.front.metrics import CONTENT_TYPE, Metrics
from kvstore.front.relay import Answer, Limits, Relay
from kvstore.front.upstream import Asked
from kvstore.front.workers import Workers

MAX_BODY_BYTES = 8 << 20  # bytes: what a worker takes by default
BODY_S = 60.0  # seconds for a client to send its request
MAX_OPEN = 1024  # requests under way: each may hold a whole body
PASSED_ON = ("authorization", "content-type")  # headers that a worker should see
_RETRY = {"Retry-After": "1"}

log = logging.getLogger(__name__)


class App:
    """The front door's state and routes."""

    def __init__(self, workers: Workers, limits: Limits) -> None:
        self._workers = workers
        self._metrics = Metrics(workers)
        self._relay = Relay(workers, limits, self._metrics)
        self._open = 0
        relayed = [("/v1/completions", "POST"), ("/v1/chat/completions", "POST"), ("/v1/models", "GET"), ("/v1/models/{name:path}", "GET")]
        self.asgi = Starlette(
            routes=[
                *(Route(path, self._counted, methods=[method]) for path, method in relayed),
                Route("/health", self._health, methods=["GET"]),
                Route("/metrics", self._show_metrics, methods=["GET"]),
            ],
            exception_handlers={HTTPException: _unrouted},
        )

    async def _counted(self, request: Request) -> Response:
        self._open += 1
        response: Response | None = None
        try:
            response = await self._relayed(request)
        finally:
            if not isinstance(response, _Passed):  # a stream is under way until it ends
                self._open -= 1
        self._metrics.answered(response.status_code)
        return response

    def _stream_ended(self) -> None:
        self._open -= 1

    async def _relayed(self, request: Request) -> Response:
        if self._open > MAX_OPEN:
            return _fault(429, f"{MAX_OPEN} requests are under way; send this one again later", "rate_limit_exceeded")
        body = await _body(request)
        if body is None:
            return _fault(413, f"the request has more than {MAX_BODY_BYTES} bytes, or came too slowly; send less", "request_too_large")
        began_at = time.perf_counter()
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        asking = asyncio.ensure_future(self._relay.answer(Asked(request.method, request.scope["raw_path"].decode("ascii"), headers, body)))
        leaving = asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait((asking, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                return Response(status_code=499)  # the client left: so does what was asked for it
            answer = asking.result()
        except Unavailable as error:
            return _fault(503, str(error), "unavailable")
        except Exception:  # a fault of ours, said as clients expect it
            log.exception("a request could not be passed on")
            return _fault(500, "the front door failed; see its log", "internal_error")
        finally:
            for task in (asking, leaving):
                task.cancel()
            await asyncio.gather(asking, leaving, return_exceptions=True)
        self._metrics.first.observe(time.perf_counter() - began_at)
        if answer.stream is None:
            return Response(answer.body, answer.status, answer.headers)
        return _Passed(answer, answer.stream, self._stream_ended)

    async def _health(self, request: Request) -> Response:
        workers = [{"url": each.url, "role": each.role, "up": each.well, "requests": each.load} for each in self._workers.all]
        well = any(each.well for each in self._workers.all)
        return JSONResponse({"status": "ok" if well else "no worker", "workers": workers}, 200 if well else 503)

    async def _show_metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE)


async def _body(request: Request) -> bytes | None:
    """All of it; None where it is too long, or too long in coming."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > MAX_BODY_BYTES:
                    return None
                parts.append(part)
    except (TimeoutError, ClientDisconnect):
        return None
    return b"".join(parts)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Passed(StreamingResponse):
    """A stream as it comes from a worker, which is let go of at its end, whoever ended it."""

    def __init__(self, answer: Answer, rest: AsyncIterator[bytes], ended: Callable[[], None]) -> None:
        headers = {**answer.headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._all(answer.body, rest), answer.status, headers)
        self._answer, self._ended = answer, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.close()
            self._ended()

    async def _all(self, first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        yield first
        async for piece in rest:
            yield piece


async def _unrouted(request: Request, error: Exception) -> Response:
    """No such path, or not with this method: said as a worker says it."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    return _fault(status, f"{request.method} {request.url.path[:200]} is not served here; see /v1/models and docs/serving.md", None)


def _fault(status: int, text: str, code: str | None) -> Response:
    kind = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}.get(status, "invalid_request_error")
    body = {"error": {"message": text, "type": kind, "param": None, "code": code}}
    return JSONResponse(body, status, _RETRY if status in (429, 503) else None)
