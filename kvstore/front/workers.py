"""Which workers there are, how each is, and whose turn it is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvstore.front.upstream import Asked, Lost, ask

LOOK_S = 1.0  # seconds between two looks at a worker's health
LOOK_TIMEOUT_S = 5.0  # seconds for it to answer: its loop may be busy, its engine's thread is another

log = logging.getLogger(__name__)


class Role(StrEnum):
    """What a worker is for: computing prompts, making texts from prompts that are computed, or whole requests."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


@dataclass(eq=False)
class Worker:
    """One worker at `url`. `load`: requests that it has from here."""

    url: str
    role: Role
    well: bool = True
    load: int = 0

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """It has one request more inside."""
        self.load += 1
        try:
            yield
        finally:
            self.load -= 1


class Workers:
    """All of them. On the loop's thread."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.all = list(workers)

    def least_loaded(self, role: Role, but: Collection[Worker] = ()) -> Worker | None:
        """Of those that are well and of this role, the one with the fewest requests; none of `but`."""
        fit = [each for each in self.all if each.well and each.role is role and each not in but]
        return min(fit, key=lambda each: each.load, default=None)

    def for_text(self, tried: Collection[Worker]) -> Worker | None:
        """Who makes a text next: a decode worker; else one for both; else a prefill worker, which can do it too."""
        found = (self.least_loaded(role, tried) for role in (Role.DECODE, Role.BOTH, Role.PREFILL))
        return next((each for each in found if each is not None), None)

    def failed(self, worker: Worker, why: object) -> None:
        """A request to it did not work: it gets no others until it says that it is well."""
        if worker.well:
            log.warning("worker %s (%s) is left out: %s", worker.url, worker.role, why)
        worker.well = False

    async def watch(self) -> None:
        """Look at each worker's health, for ever."""
        await asyncio.gather(*(self._watch(each) for each in self.all))

    async def _watch(self, worker: Worker) -> None:
        while True:
            try:
                exchange = await ask(worker.url, Asked("GET", "/health", {}), LOOK_TIMEOUT_S)
                exchange.close()
                if exchange.status != 200:
                    raise Lost(f"its health has status {exchange.status}")
            except Lost as error:
                self.failed(worker, error)
            except Exception as error:  # noqa: BLE001  a fault of ours: this worker is left out, and looked at again
                self.failed(worker, repr(error))
            else:
                if not worker.well:
                    log.warning("worker %s (%s) is well again", worker.url, worker.role)
                worker.well = True
            await asyncio.sleep(LOOK_S)
