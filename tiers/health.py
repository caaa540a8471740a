"""Keeps what is wrong with a tier now: a fault stands until the same kind of call works again, or a probe finds the medium well.

It stands for some seconds in any case: where some writes fail and others work, as on a disk that is nearly full, health would
otherwise change so often that nobody who looks once a second would ever see it.
"""

from __future__ import annotations

import threading
import time

from kvstore.tiers.base import Health, HealthState

STANDS_S = 2.5  # seconds: longer than from one look to the next, and than from a failed write to the next try


class HealthRecord:
    """Called by the mover's threads and read by the event loop."""

    def __init__(self, standing: str = "") -> None:
        """`standing`: what is not as asked for as long as the tier is open, with what to do; empty where all is well."""
        self._standing = standing
        self._faults: dict[str, tuple[str, float]] = {}  # by kind: the reason, and when it was met last
        self._closed = False
        self._lock = threading.Lock()

    def failed(self, kind: str, reason: str) -> None:
        """A call of this kind ("read", "write", ...) met a fault of the medium."""
        with self._lock:
            self._faults[kind] = (reason, time.monotonic())

    def worked(self, kind: str) -> None:
        """A call of this kind did what it should."""
        if kind in self._faults:  # without the lock: nearly always false, and a fault noted meanwhile is cleared next time
            with self._lock:
                _, at = self._faults.get(kind, ("", 0.0))
                if at <= time.monotonic() - STANDS_S:
                    self._faults.pop(kind, None)

    def quiet_for(self, seconds: float) -> bool:
        """Whether faults stand, and none was met for so long: what was wrong may be over."""
        with self._lock:
            return bool(self._faults) and max(at for _, at in self._faults.values()) < time.monotonic() - seconds

    def well(self, since: float) -> None:
        """A probe that began at `since` (monotonic seconds) worked: only faults met after that stand."""
        with self._lock:
            self._faults = {kind: fault for kind, fault in self._faults.items() if fault[1] > since}

    def close(self) -> None:
        """From now on the tier answers nothing."""
        self._closed = True

    def health(self) -> Health:
        """The worst that stands, with every reason."""
        if self._closed:
            return Health(HealthState.FAILED, "closed")
        with self._lock:
            reasons = [*(reason for reason, _ in self._faults.values()), *([self._standing] if self._standing else [])]
        if not reasons:
            return Health(HealthState.OK)
        return Health(HealthState.DEGRADED, "; ".join(reasons))
