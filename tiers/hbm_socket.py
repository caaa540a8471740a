"""The side socket where the daemon offers its pools of GPU memory: whoever may connect to it may map them.

    <dir>/hbm-<GPU's number>.sock     mode 0660: the trust domain's group, as the dram arena's file
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.tiers.arena_file import FILE_MODE
from kvstore.tiers.hbm_pool import DevicePool

WAITING = 64  # connections: every process of a machine that starts at once
AGAIN_S = 0.5  # seconds: out of descriptors, say
STOP_S = 10.0  # seconds: the thread notices at once, unless it is sending

logger = logging.getLogger(__name__)


class PoolSocket:
    """Offers one pool, in a thread of its own, until `close`; close it before the pool. Raises ConfigError where it cannot be bound."""

    def __init__(self, pool: DevicePool, path: Path) -> None:
        self._pool, self.path = pool, path
        self._closing = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            path.unlink(missing_ok=True)  # an earlier daemon's: this one holds the directory's lock
            before = os.umask(0o777 & ~FILE_MODE)
            try:
                self._socket.bind(str(path))
            finally:
                os.umask(before)
            self._socket.listen(WAITING)
        except OSError as error:
            self._socket.close()
            raise ConfigError(f"hbm: {path}: {error.strerror or error}; a socket needs a path of at most 107 bytes") from error
        self._thread = threading.Thread(target=self._serve, name=f"kvstore-hbm-{pool.device}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop offering. Idempotent."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the accept in the thread
        self._thread.join(STOP_S)
        self._socket.close()
        self.path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if self._closing:
                    return
                logger.warning("hbm: nobody can be offered the pool now, it is tried again: %s", error)
                time.sleep(AGAIN_S)
                continue
            with connection:
                try:
                    self._pool.offer(connection)
                except OSError as error:
                    logger.warning("hbm: an offer was not taken: %s", error)
