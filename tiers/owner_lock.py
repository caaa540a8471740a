"""One process at a time owns a directory, or a socket's path: a lock that the kernel drops when the process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from pathlib import Path

from kvstore.errors import ConfigError


class OwnerLock:
    """Holds `path` locked until `release` or `remove`."""

    def __init__(self, path: Path, advice: str, what: str = "") -> None:
        """Raises ConfigError, ending in `advice`, where another process has it. `what` it stands for: else the directory it is in."""
        self._path = path
        self._fd = _locked(path, what or str(path.parent), advice)
        while os.fstat(self._fd).st_nlink == 0:  # its last owner removed the file after we had opened it
            os.close(self._fd)
            self._fd = _locked(path, what or str(path.parent), advice)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)  # for people: the lock is what counts

    def release(self) -> None:
        """Let others have it. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def remove(self) -> None:
        """Delete the file, and let others make a new one. Idempotent."""
        if self._fd >= 0:  # else it is somebody else's by now
            self._path.unlink(missing_ok=True)
            self.release()


def owned(path: Path) -> bool:
    """Whether a process has this lock now: asking takes it for a moment. Raises OSError where there is no such file."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _locked(path: Path, what: str, advice: str) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ConfigError(f"{path} is no ordinary file; move it away")
    if not _locks(fd):
        owner = os.pread(fd, 64, 0).decode(errors="replace").strip()
        os.close(fd)
        raise ConfigError(f"{what}: in use by another process (pid {owner or 'unknown'}); {advice}")
    return fd


def _locks(fd: int) -> bool:
    """Tried more than once: whoever asks whether it is `owned` has it for a moment."""
    for pause_s in (0.01, 0.03, 0.1, 0.0):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(pause_s)
        else:
            return True
    return False
