"""A real daemon over a disk that fails when it is told to: the system calls for its files are answered here first.

`FaultyDaemon` is the test's side. It writes what each kind of call is to do into a directory; `main` is the program that the process runs,
and looks there at each call.
"""

from __future__ import annotations

import errno
import importlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvstore.testing.daemon import DaemonProcess

ROOT = Path(__file__).resolve().parents[2]
CALLS = {"preadv": "read", "pwritev": "write", "pwrite": "record", "fdatasync": "sync"}
FAULTS_VARIABLE, CONSTANTS_VARIABLE = "KVTEST_FAULTS", "KVTEST_CONSTANTS"
POLL_S = 0.01  # seconds between looks of a call that is stuck


class FaultyDaemon(DaemonProcess):
    """As DaemonProcess. `fault` begins to answer a kind of call (read, write, record, sync, other) with an error or not at all."""

    def __init__(self, directory: Path, flags: Sequence[str] = (), *, constants: str = "", **sizes: Any) -> None:
        """`constants`: module-level numbers of the product to change, as `module.NAME=value`, separated by commas."""
        super().__init__(directory, flags, **sizes)
        self._faults = Path(tempfile.mkdtemp(prefix="faults-", dir=self.directory))
        self.program = "tests.daemon.faulty"
        self.environment = {FAULTS_VARIABLE: str(self._faults), CONSTANTS_VARIABLE: constants, "PYTHONPATH": str(ROOT)}

    def fault(self, what: str, *calls: str) -> None:
        """From now on these calls fail with this error (`EIO`, ...), are `stuck` until `heal`, or take longer (`slow 5`: seconds)."""
        for call in calls:
            made = self._faults / f"{call}.new"
            made.write_text(what)
            made.rename(self._faults / call)

    def heal(self) -> None:
        """The disk is well again."""
        for path in self._faults.iterdir():
            path.unlink()


def main() -> int:
    """`kvstore`, over such a disk."""
    for constant in filter(None, os.environ[CONSTANTS_VARIABLE].split(",")):
        place, _, value = constant.partition("=")
        module, _, name = place.rpartition(".")
        setattr(importlib.import_module(module), name, float(value))
    faults = Path(os.environ[FAULTS_VARIABLE])
    for call, kind in CALLS.items():
        setattr(os, call, _failing(getattr(os, call), kind, faults))
    from kvstore.cli.main import main as kvstore_main

    return kvstore_main()


def _failing(real: Callable[..., Any], kind: str, faults: Path) -> Callable[..., Any]:
    def call(fd: int, *arguments: Any) -> Any:
        name = Path(os.readlink(f"/proc/self/fd/{fd}")).name.removesuffix(" (deleted)")
        if name in ("data", "records", "probe"):
            while (what := _told(faults / kind)) == "stuck":
                time.sleep(POLL_S)
            if what.startswith("slow "):
                time.sleep(float(what.split()[1]))
            elif what:
                raise OSError(getattr(errno, what), os.strerror(getattr(errno, what)))
        return real(fd, *arguments)

    return call


def _told(place: Path) -> str:
    try:
        return place.read_text()
    except FileNotFoundError:
        return ""
