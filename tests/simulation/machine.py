"""The simulated machine: its clock, its processes and their threads, and the order in which things happen, all from one seed.

Something happens one at a time: an event that is due, one turn of a process's event loop, or one thread up to its next system call.
Which of those that could happen does happen, the seed decides; when none can, the clock goes on to the next that will.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from functools import partial
from random import Random
from typing import Any, NoReturn

from tests.simulation.loop import Loop
from tests.simulation.strands import Killed, Strand

DEATH_TURNS = 200  # turns of its loop that a dead process's tasks get to unwind; nothing they do has an effect


class Wrong(AssertionError):
    """A promise was broken."""

    def __init__(self, text: str, key: bytes = b"") -> None:
        """`key`: the hash of the block concerned."""
        super().__init__(text)
        self.key = key


class Process:
    """One process: an event loop, threads, and whether it runs, is stopped, or is dead."""

    def __init__(self, machine: Machine, name: str) -> None:
        self.name = name
        self.chance = Random(f"{machine.seed} {name}")
        self.loop = Loop(machine, self)
        self.alive = True
        self.stopped = False
        self.fuse: int | None = None  # effects that it still has before it dies in the middle of something
        self.exit_code: int | None = None
        self.on_death: list[Callable[[], None]] = []
        self.late: list[Callable[[], None]] = []  # what its threads do once it continues
        self._machine = machine

    def __repr__(self) -> str:
        return self.name

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        """Start its one task; the process ends with it."""
        self.loop.create_task(main).add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not self.alive:
            return
        if (error := None if task.cancelled() else task.exception()) is not None:
            self._machine.failure = self._machine.failure or Wrong(f"{self}: unexpected: {error!r}")
            self._machine.failure.__cause__ = error
        self._machine.end(self)

    def effect(self, what: str) -> bool:
        """Whether something it does outside its own memory happens: what a dead process does, does not."""
        if self.alive and self.fuse is not None:
            self.fuse -= 1
            self.alive = self.fuse >= 0
        if self.alive:
            self._machine.note(what)
        return self.alive

    def must(self, what: str) -> None:
        """`effect`, or else Killed."""
        if not self.effect(what):
            raise Killed


class Machine:
    """See the module's text."""

    def __init__(self, seed: int, record: bool = False) -> None:
        self.seed = seed
        self.fate = Random(f"{seed} machine")
        self.now = 1000.0
        self.steps = 0
        self.processes: list[Process] = []
        self.strands: list[Strand] = []
        self.current: Process | None = None  # whose code runs
        self.strand: Strand | None = None  # the thread that runs; None: an event loop
        self.failure: Wrong | None = None
        self.story: list[str] | None = [] if record else None
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = 0

    @property
    def chance(self) -> Random:
        """What decides the course of things. A dead process has no part in it."""
        if self.current is not None and not self.current.alive:
            raise Killed
        return self.fate

    # ---- what happened

    def note(self, what: str) -> None:
        """One line for who replays this."""
        if self.story is not None and (self.current is None or self.current.alive):
            self.story.append(f"{self.now - 1000:10.4f} {self.current or 'machine'}: {what}")

    def wrong(self, text: str, key: bytes = b"") -> NoReturn:
        """A promise was broken. Remembered, as the code under test may catch what is raised here."""
        self.failure = self.failure or Wrong(text, key)
        raise self.failure

    # ---- processes

    def spawn(self, name: str) -> Process:
        """A new process, without a task yet."""
        process = Process(self, name)
        self.processes.append(process)
        return process

    @property
    def running(self) -> Process:
        """The process whose code runs now."""
        if self.current is None:
            raise RuntimeError("no process runs now")
        return self.current

    def stop(self, process: Process, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so long."""
        if process.alive and not process.stopped:
            self.note(f"{process} is stopped for {seconds:.3f} s")
            process.stopped = True
            self.after(seconds, lambda: self._continue(process))

    def _continue(self, process: Process) -> None:
        process.stopped = False
        late, process.late = process.late, []
        self.note(f"{process} continues")
        for act in late:
            self.within(process, act)

    def kill(self, process: Process) -> None:
        """SIGKILL."""
        if process in self.processes:
            self.note(f"{process} is killed")
            process.alive = False
            self._bury(process)

    def end(self, process: Process) -> None:
        """The process returned from its main task."""
        if process.alive:
            self.note(f"{process} exits")
            process.exit_code = 0
            process.alive = False

    def within(self, process: Process, act: Callable[[], None]) -> None:
        """Do it as a thread of the process would: not when it is dead, and later when it is stopped."""
        if not process.alive:
            return
        if process.stopped:
            process.late.append(act)
            return
        self.current = process
        try:
            act()
        finally:
            self.current = None

    def _bury(self, process: Process) -> None:
        """Its threads stop where they are, the system lets go of what it had, its tasks unwind without effect."""
        self.processes.remove(process)
        for strand in [strand for strand in self.strands if strand.process is process]:
            strand.killed = True
            self._resume(strand)
        for act in process.on_death:
            act()
        self.current = process
        for _ in range(DEATH_TURNS):
            if not process.loop.unwind():
                break
        self.current = None
        process.loop.close()

    # ---- time

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Let this happen so much later."""
        self._numbers += 1
        heapq.heappush(self._events, (self.now + seconds, self._numbers, act))

    def begin(self, process: Process, act: Callable[[], None]) -> Strand:
        """A thread of this process that does this."""
        strand = Strand.take(process, act, self.now + self.chance.uniform(0, 1e-4))
        self.strands.append(strand)
        return strand

    def pause(self, seconds: float) -> bool:
        """A system call that takes so long, where a thread makes it. False where the process has died meanwhile."""
        if self.strand is None:
            return True
        self.strand.due_at = self.now + seconds
        self.strand.pause()
        return not self.strand.killed

    def _resume(self, strand: Strand) -> None:
        self.current, self.strand = strand.process, strand
        try:
            ended = strand.resume()
        finally:
            self.current, self.strand = None, None
        if ended:
            self.strands.remove(strand)
            strand.give_back()

    def step(self, until: float = float("inf")) -> bool:
        """One thing happens. False where nothing will before `until`; the clock is then there."""
        while not (able := self._able()):
            next_at = self._next_at()
            if next_at > until:
                self.now = max(self.now, until) if until < float("inf") else self.now
                return False
            self.now = max(self.now, next_at)
        self.steps += 1
        able[self.fate.randrange(len(able))]()
        for process in [process for process in self.processes if not process.alive]:
            self._bury(process)
        if self.failure:
            raise self.failure
        return True

    def _able(self) -> list[Callable[[], None]]:
        able: list[Callable[[], None]] = []
        if self._events and self._events[0][0] <= self.now:
            able.append(self._event)
        running = [process for process in self.processes if not process.stopped]
        able += [partial(self.within, process, process.loop.turn) for process in running if process.loop.due_at() <= self.now]
        able += [partial(self._resume, strand) for strand in self.strands if not strand.process.stopped and strand.due_at <= self.now]
        return able

    def _event(self) -> None:
        heapq.heappop(self._events)[2]()

    def _next_at(self) -> float:
        events = [self._events[0][0]] if self._events else []
        loops = [process.loop.due_at() for process in self.processes if not process.stopped]
        threads = [strand.due_at for strand in self.strands if not strand.process.stopped]
        return min([*events, *loops, *threads], default=float("inf"))
