"""One process at a time owns a directory: a lock that the kernel drops when the process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from kvstore.errors import ConfigError


class OwnerLock:
    """Holds `path` locked until `release`."""

    def __init__(self, path: Path, advice: str) -> None:
        """Raises ConfigError, ending in `advice`, where another process has it."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._fd, 64, 0).decode(errors="replace").strip()
            os.close(self._fd)
            raise ConfigError(f"{path.parent}: in use by another process (pid {owner or 'unknown'}); {advice}") from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)  # for people: the lock is what counts

    def release(self) -> None:
        """Let others have it. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
