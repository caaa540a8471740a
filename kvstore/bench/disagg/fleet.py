"""The processes of one setup: a daemon, two workers of its store, and the front door before them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvstore.errors import Unavailable
from kvstore.testing.daemon import DaemonProcess

# The same number of processes each: workers by role.
SETUPS = {"split": ("prefill", "decode"), "both": ("both", "both")}
START_S = 300.0  # seconds for a worker to load its model on a busy machine
STOP_S = 60.0  # seconds for a process to end in order


@dataclass(frozen=True)
class Machine:
    """What every setup has: `threads` of each worker, `dram` of the daemon, `step_tokens` of a worker's step."""

    model: Path
    threads: int
    dram: str
    step_tokens: int


class Fleet:
    """One setup, running inside a `with` block. Raises Unavailable where a process does not come up."""

    def __init__(self, setup: str, machine: Machine, directory: Path) -> None:
        self._roles, self._machine, self._directory = SETUPS[setup], machine, directory
        self._stack = ExitStack()
        self.url = ""

    def __enter__(self) -> Self:
        try:
            daemon = self._stack.enter_context(DaemonProcess(self._directory / "daemon", dram=self._machine.dram, nvme=False))
            machine = self._machine
            common = ["worker", "--model", str(machine.model), "--listen", daemon.address, "--http", "127.0.0.1:0"]
            common += ["--step-tokens", str(machine.step_tokens), "--role"]
            workers = [self._start(f"{role}{at}", *common, role) for at, role in enumerate(self._roles)]  # they load at the same time
            words = [word for role, worker in zip(self._roles, workers, strict=True) for word in (f"--{role}", worker.ready())]
            self.url = self._start("front", "front", "--http", "127.0.0.1:0", *words).ready()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, name: str, *words: str) -> _Process:
        return self._stack.enter_context(_Process(words, self._machine.threads, self._directory / f"{name}.log"))


class _Process:
    """`kvstore` with some arguments."""

    def __init__(self, words: tuple[str, ...], threads: int, log: Path) -> None:
        self._name, self._log = words[0], log
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        program = [sys.executable, "-c", "from kvstore.cli.main import main; raise SystemExit(main())"]
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [*program, *words], stdout=subprocess.PIPE, stderr=errors, text=True, env=inherited | {"OMP_NUM_THREADS": str(threads)}
            )

    def ready(self) -> str:
        """Its URL, once it says that it is ready. Raises Unavailable."""
        stuck = threading.Timer(START_S, self._process.kill)
        stuck.start()
        try:
            line = self._process.stdout.readline() if self._process.stdout else ""
        finally:
            stuck.cancel()
        if "http://" not in line:
            raise Unavailable(f"kvstore {self._name} did not come up: {self._log.read_text(errors='replace')[-2000:]}")
        return "http://" + line.partition("http://")[2].partition("/v1")[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
