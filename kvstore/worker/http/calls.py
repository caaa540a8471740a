"""One HTTP request's way through the engine: its prompts are submitted, and their events brought from the engine's thread to the loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from kvstore.errors import KVStoreError
from kvstore.worker.answering import Answer, Delta, Wanted
from kvstore.worker.http.metrics import Metrics
from kvstore.worker.http.prompts import Prepared
from kvstore.worker.http.shapes import Counted
from kvstore.worker.requests import Event, Listener, Made, Serving, Ticket
from kvstore.worker.texts import Texts


@dataclass(frozen=True)
class _Arrived:
    """An event of a call's prompt, and when the engine told it (perf_counter)."""

    call: Call
    prompt: int
    event: Event
    at: float


class Inbox:
    """Carries events from the engine's thread to the loop's, which is woken once for all that came meanwhile."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._arrived: deque[_Arrived] = deque()
        self._woken = False

    def put(self, arrived: _Arrived) -> None:
        """From any thread. What comes after the loop's end is dropped."""
        with self._lock:
            self._arrived.append(arrived)
            woken, self._woken = self._woken, True
        if not woken:
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed: nobody is left to be told
                return

    def _deliver(self) -> None:
        with self._lock:
            arrived, self._arrived = self._arrived, deque()
            self._woken = False
        for each in arrived:
            each.call.arrived(each.prompt, each.event, each.at)


class Call:
    """Some prompts that one client waits for, since `began_at` (perf_counter).

    Lives on the loop; `cancel` must be called at the end, whatever happened.
    """

    def __init__(self, prepared: Sequence[Prepared], wanted: Wanted, texts: Texts, metrics: Metrics, began_at: float) -> None:
        self.prepared = prepared
        self._answers = [Answer(texts, each.request.tokens, each.request.n, wanted) for each in prepared]
        self._metrics = metrics
        self._tickets: list[Ticket] = []
        self._deltas: asyncio.Queue[tuple[int, Delta] | KVStoreError] = asyncio.Queue()
        self._failed = False
        self._began_at = began_at
        self._last_at: dict[tuple[int, int], float] = {}

    def submit(self, serving: Serving, inbox: Inbox) -> None:
        """Hand everything to the engine, or nothing. Raises what the engine says of a request that it does not take."""
        try:
            for at, each in enumerate(self.prepared):
                self._tickets.append(serving.submit(each.request, self._listener(inbox, at)))
        except KVStoreError:
            self.cancel()
            raise

    def arrived(self, prompt: int, event: Event, at: float) -> None:
        """An event from the engine, on the loop."""
        answer = self._answers[prompt]
        if answer.done or self._failed:
            return
        if isinstance(event, Made):
            self._time(prompt, event.branch, at)
        delta = answer.take(event)
        if answer.error is not None:
            self._failed = True
            self._deltas.put_nowait(answer.error)
        elif delta is not None:
            if delta.cancel:
                self._tickets[prompt].cancel(delta.branch)
            self._deltas.put_nowait((prompt, delta))

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Pieces by the index of their choice, to the end of all. Raises the fault that ended them, after what came before it."""
        open_choices = sum(each.request.n for each in self.prepared)
        while open_choices:
            came = await self._deltas.get()
            if isinstance(came, KVStoreError):
                raise came
            prompt, delta = came
            open_choices -= bool(delta.reason)
            yield sum(each.request.n for each in self.prepared[:prompt]) + delta.branch, delta

    def cancel(self) -> None:
        """End what is not over in the engine. Any number of times."""
        for ticket, answer in zip(self._tickets, self._answers, strict=False):
            if not answer.done:
                ticket.cancel()

    def counted(self) -> Counted:
        """The tokens so far."""
        answers = self._answers
        return Counted(*(sum(getattr(each, name) for each in answers) for name in ("prompt_tokens", "hit_tokens", "made_tokens")))

    def _listener(self, inbox: Inbox, prompt: int) -> Listener:
        def listen(event: Event) -> None:
            inbox.put(_Arrived(self, prompt, event, time.perf_counter()))

        return listen

    def _time(self, prompt: int, branch: int, at: float) -> None:
        before = self._last_at.get((prompt, branch))
        self._last_at[prompt, branch] = at
        if before is None:
            self._metrics.first_token(at - self._began_at)
        else:
            self._metrics.next_token(at - before)
