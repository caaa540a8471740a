"""Starts daemons for hundreds of tests without their imports: one process imports what a daemon needs, and each daemon is a fork of it.

A daemon that was started so is a process as any other, with its own memory, files, signals and exit status; only its interpreter was
started before. The nursery ends with the process that made it.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

PROGRAM = "kvstore.cli.main"  # the module whose `main` a child runs
IMPORTED = (PROGRAM, "kvstore.cli.serve", "kvstore.daemon.server")  # before the first fork; none starts a thread
MOST_BYTES = 1 << 17  # 128 KiB of a message: arguments and environment
END_S = 10.0  # seconds for the nursery's own end, of which it takes a fraction of one
STATUS_BYTES = 4  # bytes in which a child's exit status is told


class Child:
    """What subprocess.Popen has, as far as a daemon's owner needs it."""

    def __init__(self, pid: int, stdout: IO[str], status: int) -> None:
        self.pid, self.stdout = pid, stdout
        self._status, self._ended = status, None if pid else -1
        self._one = threading.Lock()

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, negative for a signal's. Raises subprocess.TimeoutExpired."""
        until = None if timeout is None else time.monotonic() + timeout
        with self._one:
            if self._ended is None:
                left = None if until is None else max(0.0, until - time.monotonic())
                if not select.select([self._status], [], [], left)[0]:
                    raise subprocess.TimeoutExpired("kvstore serve", timeout or 0.0)
                told = os.read(self._status, STATUS_BYTES)
                self._ended = int.from_bytes(told, "little", signed=True) if told else -1
                os.close(self._status)
            return self._ended

    def send_signal(self, number: int) -> None:
        """Nothing where it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        if self._ended is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The process that forks. Made when the first child is asked for."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._one = threading.Lock()

    def close(self) -> None:
        """End it. Children live on."""
        if self._control is not None and self._process is not None:
            self._control.close()
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._control = self._process = None

    def start(self, words: Sequence[str], environment: Mapping[str, str], errors: IO[str]) -> Child:
        """Run `kvstore` with these words; what it writes comes through the child's `stdout`, and its errors go to a file."""
        (out, told_out), (status, told_status) = os.pipe(), os.pipe()
        order = json.dumps({"words": list(words), "environment": dict(environment), "folder": os.getcwd()}).encode()
        with self._one:
            if self._control is None:
                self._control = self._begun()
            socket.send_fds(self._control, [order], [told_out, errors.fileno(), told_status])
            pid = int.from_bytes(self._control.recv(8), "little")
        os.close(told_out)
        os.close(told_status)
        return Child(pid, os.fdopen(out), status)

    def _begun(self) -> socket.socket:
        mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-c", f"from {__name__} import main; raise SystemExit(main({other.fileno()}))"]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("KVSTORE_")}
        self._process = subprocess.Popen(command, pass_fds=[other.fileno()], env=environment)
        other.close()
        return mine


def main(control_fd: int) -> int:
    """The nursery's own life; in a child the life of `kvstore`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in IMPORTED:
        importlib.import_module(name)
    order = _Forking(socket.socket(fileno=control_fd)).run()
    if order is None:
        return 0
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = ["kvstore", *order["words"]]
    return int(importlib.import_module(PROGRAM).main())


class _Forking:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._statuses: dict[int, int] = {}  # by pid, where its status is told
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._woken, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)

    def run(self) -> dict[str, Any] | None:
        """Fork on demand until nobody can ask any more. Returns, in a child, what it is to do; None in the nursery."""
        while True:
            ready, _, _ = select.select([self._control.fileno(), self._woken], [], [])
            if self._woken in ready:
                self._reap()
            if self._control.fileno() in ready:
                message, files, _, _ = socket.recv_fds(self._control, MOST_BYTES, 3)
                if not message:
                    return None
                pid = os.fork()
                if not pid:
                    self._become_a_child(files)
                    order: dict[str, Any] = json.loads(message)
                    return order
                self._statuses[pid] = files[2]
                for each in files[:2]:
                    os.close(each)
                self._control.send(pid.to_bytes(8, "little"))

    def _become_a_child(self, files: Sequence[int]) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._control.detach()
        os.dup2(files[0], 1)
        os.dup2(files[1], 2)
        os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)

    def _reap(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._woken, 4096)
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                file = self._statuses.pop(pid)
                with suppress(BrokenPipeError):
                    os.write(file, os.waitstatus_to_exitcode(status).to_bytes(STATUS_BYTES, "little", signed=True))
                os.close(file)
