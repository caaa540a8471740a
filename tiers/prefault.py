"""Touches the arena from its start to its end in a thread of its own, while the daemon already serves from what is touched."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from kvstore.tiers import memory as system

STEP_BYTES = 64 << 20  # bytes: tens of milliseconds of zeroing a step, so progress is smooth and a stop is quick


class Prefault:
    """`touched_bytes` only grows, up to the whole; `failure` says why it stopped before that."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.touched_bytes = 0
        self.failure = ""
        self._memory = memory
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefault", daemon=True)

    def start(self) -> None:
        """Begin in the background."""
        self._thread.start()

    def skip(self) -> None:
        """Count everything as touched; the first use of a page then pays for it."""
        self.touched_bytes = self._memory.nbytes

    def stop(self) -> None:
        """End after the step in progress. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        for start in range(0, self._memory.nbytes, STEP_BYTES):
            if self._stop.is_set():
                return
            step = self._memory[start : start + STEP_BYTES]
            self.failure = system.touch(step)
            if self.failure:
                return
            self.touched_bytes += step.nbytes
