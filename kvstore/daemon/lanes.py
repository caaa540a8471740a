"""The threads that do byte work. They are daemon threads of our own: one stuck in a read that a dead disk never answers
must not keep the process from ending, as a pool's threads would."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from kvstore.daemon.jobs import Moved

Job = TypeVar("Job")


class Lanes(Generic[Job]):
    """`submit` from the event loop; results go to `deliver` from a lane's thread (pass `loop.call_soon_threadsafe` on)."""

    def __init__(self, count: int, run: Callable[[Job], list[Moved]], deliver: Callable[[Job, list[Moved]], None]) -> None:
        """`run` does one job and never raises; `deliver` must not block."""
        self._run = run
        self._deliver = deliver
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name=f"lane-{number}", daemon=True) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Have the job done by the next free lane."""
        self._jobs.put(job)

    def close(self, timeout_s: float) -> bool:
        """No more jobs; wait for those submitted. False where one did not end in time: its memory must then stay mapped."""
        for _ in self._threads:
            self._jobs.put(None)
        ends_at = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, ends_at - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._deliver(job, self._run(job))
