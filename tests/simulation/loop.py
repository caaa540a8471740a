"""A process's event loop on the machine's clock, run one turn at a time."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.machine import Machine, Process

THREAD_S = (1e-5, 5e-3)  # seconds that a call in an executor's thread takes


class _NoFiles:
    """The selector of a loop that has no file descriptors."""

    def select(self, timeout: float | None) -> list[Any]:
        return []

    def close(self) -> None:
        pass


class Loop(asyncio.BaseEventLoop):
    """asyncio's own loop; only the clock, the selector and the executor are the machine's."""

    def __init__(self, machine: Machine, process: Process) -> None:
        super().__init__()
        self._machine, self._process = machine, process
        self._selector = _NoFiles()
        self.set_exception_handler(self._unhandled)

    def time(self) -> float:
        return self._machine.now

    def turn(self) -> None:
        """Run everything that is ready now, once."""
        self.stop()
        self.run_forever()

    def due_at(self) -> float:
        """When it has something to do."""
        if self._ready:  # type: ignore[attr-defined]
            return 0.0
        scheduled = self._scheduled  # type: ignore[attr-defined]
        while scheduled and scheduled[0].cancelled():  # as the loop itself does at its next turn
            heapq.heappop(scheduled)._scheduled = False
            self._timer_cancelled_count -= 1  # type: ignore[attr-defined]
        return scheduled[0].when() if scheduled else float("inf")

    def unwind(self) -> bool:
        """Cancel every task and give them a turn; False when none is left."""
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task.cancel()
        self.turn()
        return bool(tasks)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """The call happens in one piece, a little later."""
        future = self.create_future()

        def act() -> None:
            try:
                result = func(*args)
            except BaseException as error:  # noqa: BLE001 — as an executor does: it belongs to whoever waits
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        delay_s = self._machine.chance.uniform(*THREAD_S)
        self._machine.after(delay_s, lambda: self._machine.within(self._process, act))
        return future

    def _process_events(self, events: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if self._process.alive and not self.is_closed():
            error = context.get("exception")
            self._machine.wrong(f"{self._process}: {context['message']}: {error!r}")
