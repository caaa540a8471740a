"""The routes: what is read of a request, what is answered, and that whatever goes wrong becomes OpenAI's kind of error."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvstore.errors import (
    DeadlineExceeded,
    InternalFault,
    KVStoreError,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from kvstore.worker.answering import Wanted
from kvstore.worker.http import asking, faults, metrics
from kvstore.worker.http.asking import Asked
from kvstore.worker.http.calls import Call, Inbox
from kvstore.worker.http.fields import parse
from kvstore.worker.http.prompts import Prepared, prepare
from kvstore.worker.http.shapes import Collected, Shapes
from kvstore.worker.http.streaming import CLIENT_LEFT, Stream, while_connected
from kvstore.worker.requests import Serving
from kvstore.worker.texts import Texts

BODY_TIMEOUT_S = 60.0  # seconds for a client to send its request
MAX_OPEN_REQUESTS = 1024  # requests under way: each may hold a whole body
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """`name` is the model's for clients; without `api_key` everybody may ask; a body has at most `max_body_bytes`."""

    name: str
    api_key: str = ""
    max_body_bytes: int = 8 << 20


class App:
    """The server's state, and its routes. Make it on the loop's thread; `asgi` is what a web server runs."""

    def __init__(self, serving: Serving, texts: Texts, settings: Settings) -> None:
        self._serving, self._texts, self._settings = serving, texts, settings
        self._inbox = Inbox(asyncio.get_running_loop())
        self._metrics = metrics.Metrics(serving.figures)
        self._encoding = ThreadPoolExecutor(1, "encode")  # a long text takes seconds; one at a time, as tokenizers like it
        self._calls: set[Call] = set()
        self._open = 0
        self._began_at = int(time.time())
        self.draining = False
        self.idle = asyncio.Event()
        self.idle.set()
        self.asgi = Starlette(
            routes=[
                Route("/v1/completions", self._guarded(self._completions), methods=["POST"]),
                Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
                Route("/v1/models", self._guarded(self._models), methods=["GET"]),
                Route("/v1/models/{name:path}", self._guarded(self._model), methods=["GET"]),
                Route("/health", self._health, methods=["GET"]),
                Route("/metrics", self._show_metrics, methods=["GET"]),
            ],
            exception_handlers={HTTPException: _unrouted},
        )

    def interrupt(self) -> None:
        """End all answers: their clients are told that the server ends."""
        for call in list(self._calls):
            call.cancel()

    def close(self) -> None:
        """Let go of the thread that encodes."""
        self._encoding.shutdown(wait=False, cancel_futures=True)

    def _guarded(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """A handler that is counted, for whoever has the key, and whose faults are answered."""

        async def guarded(request: Request) -> Response:
            request.state.began_at = time.perf_counter()
            ended = self._began(request)
            try:
                response = await self._answered(handler, request)
            except BaseException:  # the server gives up the request
                ended(CLIENT_LEFT)
                raise
            if isinstance(response, Stream):
                response.ended = ended
            else:
                ended(response.status_code)
            return response

        return guarded

    def _began(self, request: Request) -> Callable[[int], None]:
        """Count a request as under way; what is returned is to be called with its status when it is over."""
        path = request.scope["route"].path
        self._metrics.began()
        self._open += 1
        self.idle.clear()

        def ended(status: int) -> None:
            self._open -= 1
            if not self._open:
                self.idle.set()
            self._metrics.ended(path, status, time.perf_counter() - request.state.began_at)

        return ended

    async def _answered(self, handler: Callable[[Request], Awaitable[Response]], request: Request) -> Response:
        try:
            self._admit(request)
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=CLIENT_LEFT)
        except KVStoreError as error:
            return _refused(error)
        except Exception as error:  # a fault of ours: its text is for the log, not for a client
            log.exception("request to %s failed", request.url.path)
            return _refused(InternalFault(f"the server failed ({type(error).__name__}); its log says why"))

    def _admit(self, request: Request) -> None:
        key = self._settings.api_key
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if key and not hmac.compare_digest(given.encode(errors="replace"), key.encode()):
            raise PermissionDenied("the API key is missing or wrong; send it as Authorization: Bearer KEY")
        if self.draining:
            raise Unavailable("the server is ending; send the request to another one, or again later")
        if self._open > MAX_OPEN_REQUESTS:
            raise ResourceExhausted(f"{MAX_OPEN_REQUESTS} requests are under way; send this one again later")

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, asking.completion)

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, asking.chat)

    async def _answer(self, request: Request, read: Callable[[Mapping[str, Any]], Asked]) -> Response:
        body = await self._body(request)

        def understand() -> tuple[Asked, list[Prepared]]:
            asked = read(parse(body))
            return asked, prepare(asked, self._texts, self._settings.name)

        asked, prepared = await asyncio.get_running_loop().run_in_executor(self._encoding, understand)
        wanted = Wanted(asked.stop, asked.skip_special, asked.sampling.logprobs >= 0)
        call = Call(prepared, wanted, self._texts, self._metrics, request.state.began_at)
        shapes = Shapes(asked, self._texts, self._settings.name)
        call.submit(self._serving, self._inbox)
        self._calls.add(call)
        stream = Stream(asked, call, shapes, self._over) if asked.stream else None
        handed_on = False
        try:
            if stream is None:
                return await while_connected(request, self._whole(asked, call, shapes))
            await while_connected(request, stream.begin())
            handed_on = True
            return stream
        finally:
            if not handed_on:
                self._over(call)

    def _over(self, call: Call) -> None:
        """Nobody waits for the call any more."""
        call.cancel()
        if call in self._calls:
            self._calls.remove(call)
            self._metrics.counted(call.counted())

    async def _whole(self, asked: Asked, call: Call, shapes: Shapes) -> Response:
        choices = [Collected(each.before) for each in call.prepared for _ in range(asked.n)]
        async for index, delta in call.deltas():
            choice = choices[index]
            choice.text += delta.text
            choice.tokens.extend(delta.tokens)
            choice.reason = delta.reason
        return JSONResponse(shapes.whole(choices, call.counted()))

    async def _body(self, request: Request) -> bytes:
        most = self._settings.max_body_bytes
        said = request.headers.get("content-length", "")
        parts, size = [], int(said) if said.isdecimal() else 0
        if size <= most:
            size = 0
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    async for part in request.stream():
                        size += len(part)
                        parts.append(part)
                        if size > most:
                            break
            except TimeoutError as error:
                raise DeadlineExceeded(f"the request's body did not come within {BODY_TIMEOUT_S:.0f} s; send it faster") from error
        if size > most:
            raise faults.TooLarge(f"the request has {size} bytes or more, the most is {most}; send less")
        return b"".join(parts)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._settings.name:
            raise faults.NoSuchModel(f"model {name[:200]!r} is not served here; use {self._settings.name!r}")
        return JSONResponse(self._described())

    def _described(self) -> dict[str, Any]:
        return {
            "id": self._settings.name,
            "object": "model",
            "created": self._began_at,
            "owned_by": "kvstore",
            "max_model_len": self._texts.max_tokens,
        }

    async def _health(self, request: Request) -> Response:
        status = "ending" if self.draining else self._serving.health() or "ok"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    async def _show_metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type=metrics.CONTENT_TYPE)


def _refused(error: KVStoreError) -> Response:
    return JSONResponse(faults.body_of(error), faults.status_of(error), faults.headers_of(error))


async def _unrouted(request: Request, error: Exception) -> Response:
    """No such path, or not with this method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    body = faults.body_of(NotFound(f"{request.method} {request.url.path[:200]} is not served here; see /v1/models and docs/serving.md"))
    return JSONResponse(body, status)
