"""A real daemon process for tests and benchmarks: started on a socket of its own, killed, stopped, started again on the same files."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self

from kvstore.testing.nursery import PROGRAM, Child, Nursery

START_TIMEOUT_S = 60.0  # seconds: a loaded machine imports in a few, and takes an arena of gigabytes in a few more
STOP_TIMEOUT_S = 30.0  # seconds: past the daemon's own deadline for its writes


class DaemonProcess:
    """`kvstore serve` with its socket, data and arena under one directory.

    directory   where socket, disk tier and log lie; None makes a temporary one, removed with `close`
    flags       further settings, as on the command line;  dram, nvme_bytes  sizes;  nvme  False turns the disk off
    Use it in a `with` block, which starts and closes it. Where `nursery` is set, daemons of the plain program with the caller's environment
    are forks of it.
    """

    nursery: ClassVar[Nursery | None] = None

    def __init__(
        self, directory: Path | None = None, flags: Sequence[str] = (), *, dram: str = "64MiB", nvme: bool = True, nvme_bytes: str = "64MiB"
    ) -> None:
        self._temporary = directory is None
        self.directory = Path(tempfile.mkdtemp(prefix="kvd-", dir="/tmp")) if directory is None else directory
        self.directory.mkdir(parents=True, exist_ok=True)
        # A socket's path holds 107 bytes, which a test's directory often passes.
        self._socket_directory = Path(tempfile.mkdtemp(prefix="kvs-", dir="/tmp"))
        self.address = str(self._socket_directory / "s.sock")
        self.data = self.directory / "nvme"
        self.log_path = self.directory / "daemon.log"
        self.shared = Path(tempfile.mkdtemp(prefix="kvd-", dir="/dev/shm"))
        self.flags = ["--listen", self.address, "--dram", dram, "--dram-dir", str(self.shared), "--metrics", "127.0.0.1:0"]
        self.flags += ["--nvme", str(self.data), "--nvme-bytes", nvme_bytes] if nvme else []
        self.flags += flags
        self.program = PROGRAM  # the module whose `main` it runs; another one may put faults under it first
        self.environment: dict[str, str] = {}  # for its process, beside the caller's
        self.ready = ""  # the readiness line
        self._process: subprocess.Popen[str] | Child | None = None

    @property
    def pid(self) -> int:
        """Of the running daemon. Raises RuntimeError where there is none."""
        if self._process is None:
            raise RuntimeError("the daemon is not running")
        return self._process.pid

    @property
    def metrics_address(self) -> str:
        """host:port of the metrics."""
        found = re.search(r"metrics ([^,)]+)", self.ready)
        return found[1] if found else ""

    def log(self) -> str:
        """All that it has written so far, over restarts."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def start(self) -> Self:
        """Start it and wait until it is ready. Raises RuntimeError with its log where it does not come up."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("KVSTORE_")} | self.environment
        words = ["serve", *self.flags]
        with self.log_path.open("a") as log:
            if self.nursery is not None and self.program == PROGRAM and not self.environment:
                self._process = self.nursery.start(words, environment, log)
            else:
                command = [sys.executable, "-c", f"from {self.program} import main; raise SystemExit(main())", *words]
                self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        stuck = threading.Timer(START_TIMEOUT_S, self._process.kill)
        stuck.start()
        try:
            self.ready = self._process.stdout.readline().strip() if self._process.stdout else ""
        finally:
            stuck.cancel()
        if not self.ready:
            status = self._process.wait()
            self._process = None
            raise RuntimeError(f"the daemon ended with status {status} before it was ready:\n{self.log()[-4000:]}")
        return self

    def kill9(self) -> None:
        """SIGKILL, as the kernel's out-of-memory killer does."""
        self._end(signal.SIGKILL)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """SIGTERM, or SIGINT, and wait for the orderly end. Returns the exit status."""
        return self._end(number)

    def restart(self, *, kill: bool = True) -> Self:
        """End it (by SIGKILL, or in order) and start it on the same files."""
        if kill:
            self.kill9()
        else:
            self.stop()
        return self.start()

    def close(self) -> None:
        """End it whatever its state, and remove what it had. Idempotent."""
        if self._process is not None:
            self.kill9()
        shutil.rmtree(self.shared, ignore_errors=True)
        shutil.rmtree(self._socket_directory, ignore_errors=True)
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self, number: signal.Signals) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(number)
        try:
            return process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise RuntimeError(f"the daemon did not end within {STOP_TIMEOUT_S} s:\n{self.log()[-4000:]}") from None
        finally:
            if process.stdout is not None:
                process.stdout.close()
