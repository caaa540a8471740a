"""A request's way: its prompt to a prefill worker, which answers once its blocks are in the store; then itself to a decode worker.

The decode worker finds the prompt's full blocks in the store and computes what is left, less than a block. It is not asked earlier: it
would take what is committed by then and compute the rest itself, beside the texts that it makes, while the prefill worker computes the
same.

A worker that cannot be reached, ends, or is full before anything of its answer was passed on is followed by another, whatever its role:
each can do everything, only later. Once a client has a part of a text, nobody else continues it: the same tokens could not be promised.
The stream then ends with an error, and what came before it is right. An answer in one piece is passed on only when it is whole.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.errors import Unavailable
from kvstore.front.metrics import Metrics
from kvstore.front.upstream import Asked, Late, Lost, ask
from kvstore.front.workers import Role, Worker, Workers

# Status: this worker cannot now, another one may. Not 500, which may be of the request itself: it would break one worker after another.
ELSEWHERE = (429, 502, 503, 504)
# What a prefill worker is not asked for: it makes one token, which nobody sees.
DROPPED = ("stream_options", "max_completion_tokens", "logprobs", "top_logprobs", "stop", "best_of", "echo", "n", "use_beam_search")


@dataclass(frozen=True)
class Limits:
    """Seconds that are waited for a prompt, for an answer's beginning, and between two of its pieces.

    prefill_from_bytes   a request with fewer bytes of prompt goes to a decode worker at once
    """

    prefill_s: float = 120.0
    first_s: float = 600.0
    between_s: float = 120.0
    prefill_from_bytes: int = 512


@dataclass
class Answer:
    """A worker's answer: all of it in `body`, or the rest still to come out of `stream`. `close` at the end, however it came."""

    status: int
    headers: dict[str, str]
    body: bytes
    stream: AsyncIterator[bytes] | None = None
    close: Callable[[], object] = lambda: None


class Relay:
    """Sends requests on. On the loop's thread."""

    def __init__(self, workers: Workers, limits: Limits, metrics: Metrics) -> None:
        self._workers, self._limits, self._metrics = workers, limits, metrics

    async def answer(self, asked: Asked) -> Answer:
        """Some worker's answer. Raises Unavailable where none is there."""
        if (prompt := self._to_prefill(asked)) is not None:
            await self._prefill(prompt)
        tried: list[Worker] = []
        refusal: Answer | None = None
        while (worker := self._workers.for_text(tried)) is not None:
            if tried:
                self._metrics.retries.inc()
            tried.append(worker)
            try:
                answer = await self._from(worker, asked)
            except Late as error:
                self._metrics.sent(worker, "late")
                return _late(error)
            except Lost as error:
                self._metrics.sent(worker, "lost")
                self._workers.failed(worker, error)
                continue
            self._metrics.sent(worker, str(answer.status))
            if answer.status not in ELSEWHERE:
                return answer
            refusal = answer
        if refusal is not None:
            return refusal
        raise Unavailable("no worker can be reached; start one with kvstore worker, or send the request again later")

    def _to_prefill(self, asked: Asked) -> Asked | None:
        """The request that has its prompt computed; None where that is not worth it, or there is nobody for it."""
        roles = {each.role for each in self._workers.all if each.well}
        if asked.method != "POST" or Role.PREFILL not in roles or not roles & {Role.DECODE, Role.BOTH}:
            return None
        try:
            values = json.loads(asked.body)
        except (ValueError, RecursionError):
            return None  # the worker says what is wrong with it
        if not isinstance(values, dict) or values.get("window"):  # a stream's blocks are its own
            return None
        prompt = values.get("prompt") or values.get("messages")
        if prompt is None or len(json.dumps(prompt)) < self._limits.prefill_from_bytes:
            return None
        kept: Mapping[str, Any] = {name: value for name, value in values.items() if name not in DROPPED}
        body = json.dumps({**kept, "max_tokens": 1, "stream": False, "temperature": 0}).encode()
        return Asked("POST", asked.path, asked.headers, body)

    async def _prefill(self, asked: Asked) -> None:
        """Have a prompt computed, by the first worker that does; where none does, the decode worker computes it."""
        tried: list[Worker] = []
        began_at = time.perf_counter()
        while (worker := self._workers.least_loaded(Role.PREFILL, tried)) is not None:
            tried.append(worker)
            try:
                with worker.busy():
                    exchange = await ask(worker.url, asked, self._limits.prefill_s)
                    try:
                        await exchange.whole(self._limits.between_s)
                    finally:
                        exchange.close()
            except Late:
                self._metrics.sent(worker, "late")
                return  # it is busy; the decode worker takes what is in the store by now
            except Lost as error:
                self._metrics.sent(worker, "lost")
                self._workers.failed(worker, error)
                continue
            self._metrics.sent(worker, str(exchange.status))
            if exchange.status not in ELSEWHERE:  # else it is full, or ending
                self._metrics.prefill.observe(time.perf_counter() - began_at)
                return

    async def _from(self, worker: Worker, asked: Asked) -> Answer:
        """One worker's answer: whole, or of a stream the first piece and the rest. Raises Lost."""
        with contextlib.ExitStack() as held:
            held.enter_context(worker.busy())
            exchange = await ask(worker.url, asked, self._limits.first_s)
            held.callback(exchange.close)
            headers = {name: value for name, value in exchange.headers.items() if name in ("content-type", "retry-after")}
            if not headers.get("content-type", "").startswith("text/event-stream"):
                return Answer(exchange.status, headers, await exchange.whole(self._limits.between_s))
            pieces = exchange.pieces(self._limits.between_s)
            try:
                first = await anext(pieces)
            except StopAsyncIteration as error:
                raise Lost("its stream was empty") from error
            return Answer(exchange.status, headers, first, self._rest(worker, pieces), held.pop_all().close)

    async def _rest(self, worker: Worker, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """What comes after a stream's first piece; where its worker is lost, an error instead."""
        try:
            async for piece in pieces:
                yield piece
        except Lost as error:
            self._metrics.sent(worker, "broken")
            self._workers.failed(worker, error)
            text = "the worker of this text was lost; what came before is right: send the request again for all of it"
            fault = {"error": {"message": text, "type": "server_error", "param": None, "code": "unavailable"}}
            yield b"\n\ndata: " + json.dumps(fault).encode() + b"\n\n"


def _late(error: Late) -> Answer:
    text = f"the worker did not answer in time ({error}); ask for a stream, or for fewer tokens"
    fault = {"error": {"message": text, "type": "server_error", "param": None, "code": "timeout"}}
    return Answer(504, {"content-type": "application/json"}, json.dumps(fault).encode())
