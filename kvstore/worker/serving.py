"""An engine in a thread of its own, for callers on any thread: what the HTTP server and `kvstore chat` talk to.

Requests and cancellations wait in a queue that the engine's thread empties before each step. An engine that breaks fails the requests
it had, and goes on with the next. `health` says where its thread has ended, or has been at one thing for too long.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvstore.errors import InternalFault, KVStoreError, ResourceExhausted, SessionEnded
from kvstore.worker.branch import Job
from kvstore.worker.engine import Engine
from kvstore.worker.requests import Ended, Finish, Listener, Request
from kvstore.worker.sampling import check

MAX_WAITING = 256  # requests that may wait: beyond, a caller is told to come again later
IDLE_S = 0.5  # seconds: how often an idle engine looks whether it is to stop
CLOSE_S = 30.0  # seconds that `close` waits for the step under way
MOST_FAILED_STEPS = 3  # in a row: one may be a request's fault, or a moment's lack of memory
STUCK_S = 120.0  # seconds of one step: a hundred times those of a long one, and more than a machine is stopped for to be moved

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Ticket:
    """See `requests.Ticket`. `job` is set by the engine's thread."""

    serving: "EngineThread"
    request: Request
    listener: Listener
    job: Job | None = None

    def cancel(self, branch: int | None = None) -> None:
        """End one branch, or all, as soon as the step under way is over."""
        self.serving.ask(lambda engine: engine.cancel(self.job, branch) if self.job else None)


class EngineThread:
    """See `requests.Serving`. Takes the engine over: `close` closes it. After `stuck_s` seconds of one step it is taken for stuck."""

    def __init__(self, engine: Engine, max_waiting: int = MAX_WAITING, stuck_s: float = STUCK_S) -> None:
        self._engine = engine
        self._max_waiting, self._stuck_s = max_waiting, stuck_s
        self._began_at: float | None = None  # monotonic seconds, since when the thread is at one step; None while it waits to be asked
        self._asked: queue.SimpleQueue[Callable[[Engine], None]] = queue.SimpleQueue()
        self._new = 0  # requests in the queue, guarded by _lock
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._failed_steps, self._failed_after, self._failure = 0, -1.0, ""  # in a row, after how many good ones, and the last one's reason
        self._fault = ""  # what ended the thread, where nobody asked it to
        self._thread = threading.Thread(target=self._run, name="kvstore-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, listener: Listener) -> Ticket:
        """Take a request. See `requests.Serving.submit`; after `close` it raises SessionEnded."""
        self._engine.check(request)
        check(request.sampling)
        if isinstance(request.tokens, list):
            request = replace(request, tokens=tuple(request.tokens))  # the caller may go on with its list
        with self._lock:
            if self._stopping.is_set():
                raise SessionEnded("this worker is stopping; ask another")
            if self._new + self._engine.waiting >= self._max_waiting:
                raise ResourceExhausted(f"{self._max_waiting} requests wait already; come again later")
            self._new += 1
            ticket = Ticket(self, request, listener)
            self._asked.put(lambda engine: self._add(engine, ticket))
        return ticket

    def ask(self, what: Callable[[Engine], None]) -> None:
        """Have something done by the engine's thread, between two steps."""
        self._asked.put(what)

    def figures(self) -> dict[str, float]:
        """See `requests.Serving.figures`; `healthy` is 1, or 0 where `health` has a reason."""
        return {**self._engine.figures(), "healthy": float(not self.health())}

    def health(self) -> str:
        """See `requests.Serving.health`."""
        if not self._thread.is_alive() or self._stopping.is_set():
            return f"the engine has ended{self._fault}"
        began_at = self._began_at
        if self._failed_steps >= MOST_FAILED_STEPS and self._steps_made() == self._failed_after:
            return f"the last {self._failed_steps} steps failed: {self._failure}"
        took_s = 0.0 if began_at is None else time.monotonic() - began_at
        return f"the engine has been at one step for {took_s:.0f} s" if took_s > self._stuck_s else ""

    def close(self) -> None:
        """Cancel everything and end the thread. Idempotent."""
        with self._lock:
            self._stopping.set()
        self._asked.put(lambda engine: None)
        self._thread.join(CLOSE_S)

    def _add(self, engine: Engine, ticket: Ticket) -> None:
        with self._lock:
            self._new -= 1
        try:
            ticket.job = engine.add(ticket.request, ticket.listener)
        except KVStoreError as error:  # it was checked before, so this is a fault of ours
            for branch in range(ticket.request.n):
                ticket.listener(Ended(branch, Finish.FAILED, error))
            raise

    def _run(self) -> None:
        try:
            with self._engine.at_work():
                while not self._stopping.is_set():
                    self._turn()
        except BaseException as error:  # the edge of a thread: whoever waits for answers is told below
            self._fault = f": {type(error).__name__}: {error}"
            log.exception("the engine's thread ended")
        finally:
            with self._lock:  # whoever submits has put its request into the queue before, or is refused
                self._stopping.set()
            self._settle()
            self._engine.close()

    def _turn(self) -> None:
        """Everything that was asked, and steps until there is nothing to do or something is asked."""
        busy = True
        while busy and not self._stopping.is_set():
            self._began_at = time.monotonic()
            self._settle()
            try:
                busy = self._engine.step()
            except KVStoreError as error:
                self._failed(error)
            except Exception as error:  # noqa: BLE001 — whatever broke: those that ran are told, and the next ones are served
                self._failed(InternalFault(f"a step of the model failed: {error}; the requests under way are lost"))
        self._began_at = None
        try:
            what = self._asked.get(timeout=IDLE_S)
        except queue.Empty:
            return
        self._began_at = time.monotonic()
        self._asked_now(what)

    def _failed(self, error: KVStoreError) -> None:
        log.exception("a step failed")
        made = self._steps_made()
        self._failed_steps = self._failed_steps + 1 if made == self._failed_after else 1
        self._failed_after, self._failure = made, str(error)
        self._engine.drop_all(error)

    def _steps_made(self) -> float:
        return self._engine.figures().get("steps_total", 0.0)

    def _settle(self) -> None:
        while not self._asked.empty():
            self._asked_now(self._asked.get())

    def _asked_now(self, what: Callable[[Engine], None]) -> None:
        try:
            what(self._engine)
        except Exception:  # of one request or cancellation; a request's listener was told where it was the request
            log.exception("a request could not be taken")
