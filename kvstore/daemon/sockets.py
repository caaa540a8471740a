"""Where the daemon listens: the Unix socket's place is made safe and free before grpc binds it (grpc would take a live one over)."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.tiers.owner_lock import OwnerLock

DIRECTORY_MODE = 0o750  # the trust domain's group may come in
SOCKET_MODE = 0o660  # and connect
LOCK_SUFFIX = ".lock"  # of the file beside the socket that its daemon holds locked
PROBE_TIMEOUT_S = 2.0  # seconds: a daemon on this machine accepts at once, or its queue is full, which also means that it lives


@contextmanager
def held(path: str) -> Iterator[None]:
    """Inside, the path is this process's, as `claim` leaves it: of daemons that start together, one gets it. Raises as `claim` does."""
    try:
        _make_directory(Path(path).parent)
        lock = OwnerLock(Path(path + LOCK_SUFFIX), "stop it, or give this one another --listen", f"listen: {path}")
    except OSError as error:
        raise ConfigError(f"listen: {error.filename or path}: {error.strerror}; choose another --listen") from error
    try:
        claim(path)
        yield
    finally:
        lock.remove()


def claim(path: str) -> None:
    """Make the directory, and remove the socket of a daemon that is dead. Raises ConfigError where one lives, or the path is no socket."""
    place = Path(path)
    try:
        _make_directory(place.parent)
        try:
            mode = place.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise ConfigError(f"listen: {path} exists and is no socket; choose another path, or move it away")
        if _answers(path):
            raise ConfigError(f"listen: a daemon is serving on {path}; stop it, or give this one another --listen")
        place.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"listen: {path}: {error.strerror}; choose another --listen") from error


def open_to_group(path: str) -> None:
    """Let the trust domain's group connect, and nobody else."""
    os.chmod(path, SOCKET_MODE)


def _make_directory(directory: Path) -> None:
    """Where it is missing. One in /tmp that another user made could lead clients to another daemon."""
    if not directory.is_dir():
        directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"listen: {directory} belongs to another user; choose another --listen")
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise ConfigError(f"listen: anybody may replace files in {directory}; chmod o-w it, or choose another --listen")


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except (TimeoutError, BlockingIOError):
            return True
    return True
