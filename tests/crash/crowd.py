"""The client processes of a storm: started, told which chains to write, killed, and heard."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Member:
    """One `load` process, and what it has said so far."""

    def __init__(self, address: str, seed: int, round_number: int) -> None:
        command = [sys.executable, "-m", "tests.crash.load", address, str(seed), str(round_number)]
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._thread = threading.Thread(target=self._hear, daemon=True)
        self._thread.start()

    def go_on(self, round_number: int) -> None:
        """Write the chains of this round from now on."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{round_number}\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone and all that it said is heard."""
        self._process.kill()
        self._process.wait()
        self._thread.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _hear(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.endswith("\n"):
                return  # killed in the middle of it
            words = json.loads(line)
            if "counts" in words:
                self.counts = Counter(words["counts"])
            else:
                self.faults.append(line.strip())


class Crowd:
    """All of them; `counts` and `faults` of those killed are kept."""

    def __init__(self, address: str, size: int) -> None:
        self.kills = 0
        self.round = 0
        self.faults: list[str] = []
        self.counts: Counter[str] = Counter()
        self._address = address
        self._size = size
        self._started = 0
        self._members: list[Member] = []

    def fill(self) -> None:
        """Start as many as are missing."""
        while len(self._members) < self._size:
            self._started += 1
            self._members.append(Member(self._address, self._started, self.round))

    def go_on(self, round_number: int) -> None:
        """All of them write the chains of this round from now on."""
        self.round = round_number
        for member in self._members:
            member.go_on(round_number)

    def wait_for_writes(self, within_s: float) -> None:
        """Until somebody has stored more than before, or the time is up."""
        before = sum(member.counts["stored"] for member in self._members)
        ends_at = time.monotonic() + within_s
        while sum(member.counts["stored"] for member in self._members) <= before and time.monotonic() < ends_at:
            time.sleep(0.01)

    def kill(self, count: int = 1) -> None:
        """SIGKILL the oldest ones."""
        for _ in range(min(count, len(self._members))):
            member = self._members.pop(0)
            member.kill()
            self.kills += 1
            self.counts += member.counts
            self.faults += member.faults

    def kill_all(self) -> None:
        """SIGKILL every one."""
        self.kill(len(self._members))
