"""Simulated GPUs: a pool of memory for each run of the daemon, copies that end late or not as they should, and memory that goes on being
written after its process has died. Whoever has mapped a pool keeps it, also when the daemon is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.config import Settings
from kvstore.daemon.hbm_parts import HbmParts
from kvstore.errors import Unavailable
from kvstore.kernels.driver import CudaError
from kvstore.tiers.base import Health, HealthState
from kvstore.tiers.health import HealthRecord
from tests.simulation.machine import Machine, Process
from tests.simulation.memory import UNIT_BYTES, ArenaFile
from tests.simulation.strands import Killed

POISON = 0xDB  # bytes of a copy's target until it has run
COPY_S = (2e-5, 5e-3)  # seconds that half a copy takes
LATEST_S = 0.4  # seconds that half a copy of a client may take: it ends within the second that the daemon allows after a death
SLOW_S = 1.5  # seconds that one takes now and then where copies are slow
LOST = 719  # status: CUDA_ERROR_LAUNCH_FAILED
REFUSED = 702  # status: CUDA_ERROR_LAUNCH_TIMEOUT


@dataclass
class Trouble:
    """What is wrong with the GPUs now: chances of a copy."""

    refused: float = 0.0  # it cannot be queued, though those before it were
    slow: float = 0.0  # it takes long


@dataclass
class Gpus:
    """The machine's. `count` 0: none."""

    machine: Machine
    count: int = 0
    pool_units: int = 0  # of each pool
    extent_units: int = 1
    trouble: Trouble = field(default_factory=Trouble)
    tiers: list[Tier] = field(default_factory=list)  # of the daemon that runs
    made: int = 0

    def opened(self, settings: Settings, arena: memoryview, survivors: int) -> HbmParts:
        """In the place of `open_hbm`."""
        self.tiers = [Tier(self, device) for device in range(self.count)]
        sockets = [SimpleNamespace(path=Path(tier.place), close=lambda: None) for tier in self.tiers]
        return HbmParts(list(self.tiers), sockets)  # type: ignore[arg-type]

    def mapped(self, place: str) -> ArenaFile | None:
        """A client takes what the running daemon offers there."""
        return next((tier.file for tier in self.tiers if tier.place == place), None)

    @property
    def driver(self) -> Any:
        """What a client's driver says of them."""
        return SimpleNamespace(devices=lambda: self.count, uuid=lambda device: f"gpu-{device}")

    def imported(self, driver: Any, path: Path) -> Imported:
        """In the place of `ImportedPool`."""
        file = self.mapped(str(path))
        if file is None:
            raise Unavailable(f"{path}: nobody offers GPU memory there")
        return Imported(file)

    def lose(self) -> None:
        """A GPU's context is lost."""
        for tier in self.tiers[:1]:
            tier.lost = "as the simulation wants it"

    async def copy(self, process: Process, target: ArenaFile, start: int, source: Callable[[], bytes], size_bytes: int) -> None:
        """A client's copy into GPU memory: the process waits for it, and it ends though the process has died meanwhile."""
        done: asyncio.Future[None] = process.loop.create_future()
        half, chance = size_bytes // 2, process.chance
        target.units[start : start + size_bytes] = POISON
        times = [chance.uniform(*COPY_S) if chance.random() < 0.6 else chance.uniform(0, LATEST_S) for _ in range(2)]

        def land(first: int, last: int) -> None:
            target.units[start + first : start + last] = np.frombuffer(source()[first:last], np.uint8)

        def end() -> None:
            land(half, size_bytes)
            self.machine.within(process, lambda: None if done.done() else done.set_result(None))

        self.machine.after(times[0], lambda: land(0, half))
        self.machine.after(sum(times), end)
        await done


@dataclass
class Imported:
    """A pool in a client's process. It stays when the daemon has gone."""

    file: ArenaFile
    is_open: bool = True

    def view(self, offset_bytes: int, size_bytes: int) -> NDArray[np.uint8]:
        return self.file.units[offset_bytes : offset_bytes + size_bytes]

    def owner_ended(self) -> None:
        pass

    def close(self) -> None:
        self.is_open = False


class Tier:
    """In the place of `HbmTier`: the daemon's own copies, each in a thread."""

    def __init__(self, gpus: Gpus, device: int) -> None:
        gpus.made += 1
        self.label, self.lost = f"hbm:{device}", ""
        self.place = f"/simulated.hbm-{device}.{gpus.made}"
        self.pool = SimpleNamespace(uuid=f"gpu-{device}")
        self.capacity_bytes = gpus.pool_units * UNIT_BYTES
        self.file = ArenaFile(f"pool {gpus.made}", gpus.extent_units, np.zeros(self.capacity_bytes, np.uint8), np.zeros(0, np.int32))
        self._gpus, self._machine = gpus, gpus.machine
        self._health = HealthRecord()

    def read(self, offset_bytes: int, targets: list[memoryview]) -> None:
        """Copy down. Nothing is there before a copy has run, and what was queued has run when this returns."""
        queued, at = [], offset_bytes
        failure: CudaError | None = None
        for target in targets:
            if self._machine.chance.random() < self._gpus.trouble.refused:
                failure = CudaError("copy", REFUSED, "as the simulation wants it")
                break
            np.frombuffer(target, np.uint8)[:] = POISON
            queued.append((target, at))
            at += target.nbytes
        for target, start in queued:
            half = target.nbytes // 2
            for first, last in ((0, half), (half, target.nbytes)):
                self._wait()
                target[first:last] = self.file.units[start + first : start + last].data
        if failure is not None:
            self._health.failed("read", f"hbm: a read failed: {failure}")
            raise failure
        self._health.worked("read")

    def _wait(self) -> None:
        chance = self._machine.chance
        seconds = SLOW_S if chance.random() < self._gpus.trouble.slow else chance.uniform(*COPY_S)
        if not self._machine.pause(seconds):
            raise Killed
        if self.lost:
            raise CudaError("wait", LOST, self.lost)
        self._machine.running.must("half a copy from GPU memory runs")

    def health(self) -> Health:
        return Health(HealthState.FAILED, self.lost) if self.lost else self._health.health()

    def close(self) -> None:
        pass
