"""The daemon's threads as strands of the machine: the real copier, its system calls one at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from kvstore.daemon.jobs import Job, Moved
from tests.simulation.machine import Machine
from tests.simulation.strands import Killed

LOCK_S = 1e-4  # seconds until a lock is tried again, and twice as long each time after
LONGEST_LOCK_S = 0.02  # seconds: who holds one while the disk is slow holds it for seconds, and each try is a step

Run = Callable[[Job], list[Moved]]
Deliver = Callable[[Job, list[Moved]], None]


class Lanes:
    """In the place of the daemon's `Lanes`."""

    def __init__(self, machine: Machine, count: int, run: Run, deliver: Deliver) -> None:
        self._machine, self._process = machine, machine.running
        self._run, self._deliver = run, deliver
        self._free = count
        self._jobs: deque[Job] = deque()
        self._under_way = 0

    def submit(self, job: Job) -> None:
        self._jobs.append(job)
        self._under_way += 1
        self._start()

    def _start(self) -> None:
        while self._jobs and self._free:
            job = self._jobs.popleft()
            self._free -= 1
            self._machine.begin(self._process, partial(self._work, job))

    def _work(self, job: Job) -> None:
        results = self._run(job)
        self._machine.note(f"{type(job).__name__}: {', '.join(moved.result for moved in results)}")
        self._deliver(job, results)
        self._free += 1
        self._under_way -= 1
        self._start()

    def close(self, timeout_s: float) -> bool:
        """False where a job is still out. It is not waited for: the daemon comes here with nothing to do, or past its deadline."""
        return not self._under_way


class Thread:
    """In the place of `threading.Thread`."""

    def __init__(self, machine: Machine, target: Callable[[], None], **_: object) -> None:
        self._machine, self._process, self._target = machine, machine.running, target
        self._alive = False

    def start(self) -> None:
        self._alive = True
        self._machine.begin(self._process, self._work)

    def is_alive(self) -> bool:
        return self._alive

    def _work(self) -> None:
        try:
            self._target()
        finally:
            self._alive = False


class Lock:
    """In the place of `threading.Lock`: a thread that has to wait for it lets others run."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._held = False

    def __enter__(self) -> None:
        wait_s = LOCK_S
        while self._held:
            if self._machine.strand is None:
                raise RuntimeError("an event loop waits for a thread's lock")
            if not self._machine.pause(wait_s):
                raise Killed
            wait_s = min(2 * wait_s, LONGEST_LOCK_S)
        self._held = True

    def __exit__(self, *_: object) -> None:
        self._held = False
