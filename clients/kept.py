"""The session of one paged cache, kept: made anew in the background once it is over, and left alone while the daemon stands still.

Any thread may call. `ready` waits a second at most, whatever the daemon does: an engine's steps wait behind it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from kvstore import errors
from kvstore.clients.handles import Attached
from kvstore.clients.link import Link
from kvstore.proto import kvstore_pb2 as pb

SOON_S = 1.0  # seconds in which an attempt to attach succeeds, if it does: who needs the session waits so long, and no longer
RETRY_S = 0.5  # seconds after an attempt that failed until the next one: its users must not wait at every step
STILL_S = 30.0  # seconds in which a daemon that did not answer in time is asked nothing, unless it gives a sign of life before


class Live(NamedTuple):
    """A session, what it maps, and the namespace's id in it."""

    link: Link
    attached: Attached
    namespace_id: int


class Kept:
    """See the module's text. `live` is the last session there was, whether it is over or not."""

    def __init__(self, place: str, connect: Callable[[Attached | None], Live]) -> None:
        """connect   makes a session, given what the one before had mapped; waits as long as that takes, and raises KVStoreError"""
        self._place, self._connect = place, connect
        self._guard = threading.Lock()  # over all below
        self._attempt: Future[Live] | None = None
        self._began_at = self._retry_at = self._still_until = 0.0
        self._closed = False
        self.live = connect(None)

    def ready(self) -> Live:
        """The live session; where the last is over, a new one, if it is to be had soon. Raises Unavailable, DeadlineExceeded."""
        with self._guard:
            now = time.monotonic()
            if self._closed:
                raise errors.Unavailable("the store was closed; open its blocks again")
            if self.live.link.alive:
                if now < self._still_until:
                    raise errors.Unavailable(f"daemon at {self._place}: it did not answer a moment ago; go on without it")
                return self.live
            if self._attempt is None:
                if now < self._retry_at:
                    raise errors.Unavailable(f"daemon at {self._place}: away, tried less than {RETRY_S} s ago; go on without it")
                self._attempt, self._began_at = Future(), now
                threading.Thread(target=self._attach, args=(self._attempt,), name="kvstore-attach", daemon=True).start()
            attempt, left_s = self._attempt, self._began_at + SOON_S - now
        try:
            return attempt.result(max(left_s, 0.0))
        except TimeoutError:
            raise errors.Unavailable(f"daemon at {self._place}: no session within {SOON_S} s; go on without it") from None

    def stands_still(self, live: Live, op: pb.Op) -> None:
        """The daemon did not answer in time. `op`, which takes back what it was asked, goes to it; its answer is a sign of life."""
        with self._guard:
            self._still_until = time.monotonic() + STILL_S
        with contextlib.suppress(errors.KVStoreError):  # the session is over, and what was asked in it
            live.link.submit([op])[0].add_done_callback(self._goes_on)

    def close(self) -> None:
        """End the session, and one that is being made. Idempotent."""
        with self._guard:
            closed, self._closed = self._closed, True
        if not closed:
            self.live.link.close()

    def _goes_on(self, _: object) -> None:
        with self._guard:
            self._still_until = 0.0

    def _attach(self, attempt: Future[Live]) -> None:
        live: Live | None = None
        fault: BaseException = errors.Unavailable("the store was closed; open its blocks again")
        try:
            live = self._connect(self.live.attached)
        except Exception as error:  # noqa: BLE001 — a thread's edge: those who wait must hear of it
            fault = error.with_traceback(None)  # which would keep what was mapped on the way
        with self._guard:
            self._attempt, self._retry_at = None, time.monotonic() + RETRY_S
            dropped = live if self._closed else None
            if live is not None and not self._closed:
                self.live, self._still_until = live, 0.0
        if dropped is not None:
            dropped.link.close()
        if live is not None and dropped is None:
            attempt.set_result(live)
        else:
            attempt.set_exception(fault)
