"""Threads that run only when the machine says so, each up to its next system call: real code with blocking calls, in a chosen order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.machine import Process


class Killed(BaseException):
    """The process is dead; raised where its code would go on."""


class Strand:
    """One thread of a simulated process. Real threads are kept and used again: making one costs more than a whole job."""

    _idle: list[Strand] = []  # noqa: RUF012 — of the Python process, not of a run

    def __init__(self) -> None:
        self.due_at = 0.0
        self.killed = False
        self.process: Process
        self._act: Callable[[], None] = lambda: None
        self._fault: BaseException | None = None
        self._ended = False
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        threading.Thread(target=self._work, name="strand", daemon=True).start()

    @classmethod
    def take(cls, process: Process, act: Callable[[], None], due_at: float) -> Strand:
        """One that will do this for a process, from `due_at` on."""
        strand = cls._idle.pop() if cls._idle else cls()
        strand.process, strand._act, strand.due_at = process, act, due_at
        strand.killed = strand._ended = False
        return strand

    def give_back(self) -> None:
        """It has ended."""
        self._idle.append(self)

    def resume(self) -> bool:
        """Let it run until it pauses (False) or ends (True)."""
        self._go.release()
        self._back.acquire()
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
        return self._ended

    def pause(self) -> None:
        """Called in the thread: let the machine go on."""
        self._back.release()
        self._go.acquire()

    def _work(self) -> None:
        while True:
            self._go.acquire()
            try:
                if not self.killed:
                    self._act()
            except Killed:
                pass
            except BaseException as error:  # noqa: BLE001 — a thread's edge: the machine is told
                self._fault = error
            self._ended = True
            self._back.release()
