"""Log lines for a descriptor that may stop taking them: a pipe nobody reads, a log collector that stands still. Nobody waits for it."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque

AT_ONCE_BYTES = 4096  # PIPE_BUF: what poll says there is room for in a pipe; sockets have more
TERMINAL_BYTES = 256  # likewise of a terminal
KEPT_BYTES = 1 << 20  # 1 MiB of lines that were not taken yet
LAST_S = 1.0  # seconds that the end of the process waits for the last lines to be taken


class LogOutput(logging.Handler):
    """Writes what the descriptor takes at once. The rest is kept for the next try; beyond a bound lines are dropped, and counted."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor` stays the caller's."""
        super().__init__()
        self._held = self.lock or threading.RLock()
        self._descriptor = descriptor
        self._at_once_bytes = TERMINAL_BYTES if os.isatty(descriptor) else AT_ONCE_BYTES
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self.dropped = 0  # lines, since it was last said

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler, whose lock is held."""
        try:
            text = self.format(record)
        except Exception as error:  # noqa: BLE001 — a line's edge: who wrote it goes on
            text = f"{record.levelname} {record.msg!r} could not be put into words: {error!r}"
        line = f"{text}\n".encode("utf-8", "backslashreplace")
        self._drain(0.0)
        if self._kept_bytes + len(line) > KEPT_BYTES:
            self.dropped += 1
            return
        self._keep(line)
        self._drain(0.0)

    def flush(self) -> None:
        """Write what is taken at once. Call it now and then: lines that were kept wait for the next one otherwise."""
        with self._held:
            self._drain(0.0)

    def close(self) -> None:
        """Write what is taken within a second, and no more."""
        with self._held:
            self._drain(LAST_S)
        super().close()

    def _keep(self, line: bytes) -> None:
        self._kept.append(line)
        self._kept_bytes += len(line)

    def _drain(self, wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        while self._kept or self.dropped:
            if not self._kept:
                self._keep(f"... {self.dropped} log lines were dropped: nobody took them from standard error\n".encode())
                self.dropped = 0
            if not self._has_room(deadline - time.monotonic()):
                return
            line = self._kept.popleft()
            try:
                written = os.write(self._descriptor, line[: self._at_once_bytes])
            except BlockingIOError:
                self._kept.appendleft(line)
                return
            except OSError:  # nobody will ever read it: there is no place to say so
                written = len(line)
            self._kept_bytes -= written
            if line[written:]:
                self._kept.appendleft(line[written:])

    def _has_room(self, wait_s: float) -> bool:
        ready = self._poll.poll(max(0.0, wait_s) * 1e3)
        return any(event & (select.POLLOUT | select.POLLERR | select.POLLHUP | select.POLLNVAL) for _, event in ready)
