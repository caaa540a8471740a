"""One run: the daemon, its clients, what befalls them, and what must be true in the end."""

from __future__ import annotations

import asyncio
import gc
import logging
import traceback
from collections import Counter
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from kvstore import errors
from kvstore.clients.aio import AsyncKVClient
from kvstore.daemon import startup
from kvstore.daemon.hub import Hub
from kvstore.daemon.server import Daemon
from tests.simulation.disk import Disk
from tests.simulation.engines import Engine
from tests.simulation.gpus import Gpus
from tests.simulation.keys import IDENTITY, KINDS, chain, every_path
from tests.simulation.lives import Life, Street, seen_in
from tests.simulation.machine import Machine, Process, Wrong
from tests.simulation.memory import Memory
from tests.simulation.mischief import Mischief
from tests.simulation.network import Network
from tests.simulation.patches import EXTENT_UNITS, installed
from tests.simulation.plan import Plan
from tests.simulation.pool_engines import PoolEngine
from tests.simulation.pool_truth import WatchedPool, left_in, watch_pools
from tests.simulation.truth import Truth, Watched

RUN_S = 4.0  # simulated seconds until everybody is asked to leave
LEAVE_S = 120.0  # simulated seconds until everybody must have left
MAX_STEPS = 60_000  # ten times what a run takes
CLIENTS = 3
RESTART_S = (0.01, 1.0)  # seconds from a death to the next start
LEFT_CLASSES = ("reserved", "filling", "doomed", "orphaned")  # in none of these is a slot when nobody is there


@dataclass
class Report:
    """What came of a run."""

    seed: int
    steps: int = 0
    served: int = 0
    reached: Counter[str] = field(default_factory=Counter)
    failure: Wrong | None = None
    story: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)  # where the failure was noticed
    block_story: str = ""  # the core's own, of the block concerned


class Scene:
    """Everything that a run is made of."""

    def __init__(self, seed: int, record: bool = False) -> None:
        self.plan = Plan.of(seed)
        self.machine = Machine(seed, record)
        self.disk = Disk(self.machine)
        self.memory = Memory(self.machine, touch_s=self.plan.touch_s)
        self.network = Network(self.machine)
        self.truth = Truth(self.machine, self.memory, self.plan.settings.nvme.durable == "power")
        self.truth.lies = lambda: self.disk.lied
        pools = self.plan.pools
        self.gpus = Gpus(self.machine, pools.gpus, pools.units, EXTENT_UNITS)
        self.street = Street(self.machine, self.memory, self.truth, self.plan.has("tails"), clears=0.03 if self.plan.has("clears") else 0.0)
        self.reached = self.truth.reached
        self.daemon: Process | None = None
        self.clients: list[Process] = []
        self.watched: Watched | None = None
        self.pools: list[WatchedPool] = []
        self._hub: Hub | None = None
        self._stop: asyncio.Event | None = None
        self._spawned = 0
        self._voided = False  # a power failure took what was only written
        self._at_rest = False  # the last daemon had nothing left to do

    def play(self) -> Report:
        """Run to the end, or to the first broken promise."""
        report = Report(self.machine.seed, reached=self.reached)
        watcher = _Log(self.machine)
        logging.getLogger("kvstore").addHandler(watcher)
        try:
            portions = self.plan.portions
            with installed(self.machine, self.disk, self.memory, self.network, self.gpus, portions.few_slots, portions.rows):
                self._play()
        except Wrong as failure:
            report.failure = Wrong(str(failure), failure.key)  # without its traceback: that does not travel between processes
            report.trace = [line.rstrip() for line in traceback.format_exception(failure)]
            if self.watched is not None and failure.key:
                word = int.from_bytes(failure.key[:8], "little")
                report.block_story = self.watched.cache.state.story.of(word)
        finally:
            logging.getLogger("kvstore").removeHandler(watcher)
            for process in list(self.machine.processes):
                self.machine.kill(process)
        report.steps, report.served, report.story = self.machine.steps, self.truth.served, self.machine.story or []
        return report

    def _play(self) -> None:
        self._boot()
        for _ in range(CLIENTS + self.plan.has("pools")):
            self._arrive()
        mischief = Mischief(self)
        self._run(self.machine.now + RUN_S, lambda: False)
        mischief.end()
        self.street.closing = True
        self._must_come("all clients leave", lambda: not self.clients and self.daemon is not None and self.network.serving is not None)
        auditor = self._spawn("auditor", self._audit())
        self._must_come("the last look at every block ends", lambda: auditor not in self.machine.processes)
        self._must_come("everything is at rest", lambda: not self._left())
        if self.plan.settings.nvme.path and self.plan.settings.nvme.write == "through":
            self._must_come("every block is written", lambda: not self.truth.unwritten)
            self._must_come("what the last writes pushed out is deleted", lambda: not self._left())
        if self.watched is not None and not self.disk.lied and not self._voided and self.watched.corrupt:
            self.machine.wrong("blocks were found corrupt on a disk that was honest")
        self._look_at_what_is_left()

    def _look_at_what_is_left(self) -> None:
        """Kill the daemon, which has nothing left to do: the next one finds what it had, and no more."""
        if self.daemon is not None:
            self._at_rest = True
            self.machine.kill(self.daemon)
            self._must_come("a daemon is back", lambda: self.watched is not None)

    def _run(self, until: float, done: Any) -> bool:
        while not done():
            if self.machine.steps > MAX_STEPS:
                self.machine.wrong(f"{MAX_STEPS} steps, and no end: {self._left()}")
            jumped = self.machine.now
            if not self.machine.step(until):
                return False
            if self.watched is not None:
                self.watched.check()
                for pool in self.pools:
                    pool.check()
            until += max(0.0, self.machine.now - jumped - 10.0)  # a jump of the clock is no time to act in
        return True

    def _must_come(self, what: str, done: Any) -> None:
        if not self._run(self.machine.now + LEAVE_S, done):
            self.machine.wrong(f"it never comes that {what}: {self._left()}")

    def _left(self) -> list[str]:
        """What is still held though nobody is there."""
        if self.watched is None:
            return ["no daemon"]
        stats = self.watched.cache.stats()
        left = [f"{stats.transfers} transfers"] if stats.transfers else []
        left += [f"session {session}" for session in stats.sessions if session.held_bytes or session.ended]
        for tier, figures in stats.tiers.items():
            left += [f"{tier.name}: {figures.held_bytes} bytes held"] if figures.held_bytes else []
            left += [f"{tier.name}: {figures.class_bytes[name]} bytes {name}" for name in LEFT_CLASSES if figures.class_bytes[name]]
        return [*left, *(left_in(self._hub) if self._hub is not None else [])]

    # ---- the daemon

    def _boot(self) -> None:
        if self.daemon is not None:
            return
        self._spawned += 1
        self.daemon = self.machine.spawn(f"daemon {self._spawned}")
        self.daemon.on_death.append(self._daemon_died)
        self.daemon.run(self._serve())

    async def _serve(self) -> None:
        settings = self.plan.settings
        try:
            parts = await startup.build(settings)
        except (errors.EnvironmentFault, OSError) as error:
            self.machine.note(f"does not start: {error}")
            return
        daemon = Daemon(settings, parts)
        self.reached["survivors"] += len(parts.hub.sessions.survivors)
        watched = Watched(parts.hub.cache, self.truth, self.machine)
        if not self.disk.lied:
            watched.all_found(self._at_rest)
        self.watched, self._stop, self._hub = watched, asyncio.Event(), parts.hub
        self.pools = watch_pools(parts.hub, watched, self.truth, self.machine)
        await daemon.start()
        await self._stop.wait()
        await daemon.stop()

    def _daemon_died(self) -> None:
        if self.watched is not None:
            self.reached.update(self._hub.figures()[0].counters if self._hub is not None else {})
        self.daemon, self.watched, self._stop, self._hub = None, None, None, None
        self.pools, self.gpus.tiers = [], []
        self.truth.daemon_died()
        self.network.serving = None
        self.network.cut()
        self.machine.after(self.machine.chance.uniform(*RESTART_S), self._boot)

    def ask_to_end(self) -> None:
        """SIGTERM."""
        if self._stop is not None:
            self._stop.set()

    def lose_power(self) -> None:
        """Everything dies at once; the disk keeps what was synced, and some of the rest."""
        for process in list(self.machine.processes):
            self.machine.kill(process)
        self.disk.lose_power()
        self.memory.lose()
        self.truth.power_failed()
        self._voided = self._voided or not self.truth.power

    # ---- the clients

    def _arrive(self) -> None:
        """A new client process; when it dies, another comes."""
        if self.street.closing:
            return
        self._spawned += 1
        kinds = ["client", *(["remote"] if self.plan.has("remotes") else []), *(["engine", "engine"] if self.plan.has("engines") else [])]
        kinds += ["pool engine"] * 3 if self.plan.has("pools") else []
        kind = self.machine.chance.choice(kinds)
        client = self.machine.spawn(f"{kind} {self._spawned}")
        life: Life | Engine = Life(self.street, client, self.gpus if self.plan.has("pools") and kind == "client" else None)
        if kind == "engine":
            life = Engine(self.street, client)
        elif kind == "pool engine":
            life = PoolEngine(self.street, client, self.gpus)
        self._begin(client, life.run())

    def _spawn(self, name: str, main: Any) -> Process:
        process = self.machine.spawn(name)
        self._begin(process, main)
        return process

    def _begin(self, client: Process, main: Any) -> None:
        def died() -> None:
            self.clients.remove(client)
            self.truth.died(client.name)
            self.network.cut(client)
            self.machine.after(self.machine.chance.uniform(*RESTART_S), self._arrive)

        self.clients.append(client)
        client.on_death.append(died)
        client.run(main)

    async def _audit(self) -> None:
        """Read all that can be found, once more: in host memory, and in each GPU's."""
        gpus = range(self.gpus.count)
        client = AsyncKVClient("simulated:1", name="auditor", gpus=gpus, driver=self.gpus.driver if gpus else None)
        places = [None, *(gpu for gpu, tier in enumerate(self.gpus.tiers) if not tier.lost)]
        for kind in KINDS:
            namespace = await client.open_namespace(IDENTITY, kind.geometry, "", kind.name, kind.keep)
            for path, pool in product(every_path(), places):
                hashes = chain(path)
                async with client.get(namespace, b"".join(hashes), pool=pool) as lease:
                    above = seen_in(lease, hashes)
                    below = zip(lease.views, hashes[len(lease.device_views) :], strict=False)
                    for view, hash_ in [*above, *((view, hash_) for view, hash_ in below if len(view))]:
                        self.truth.check((namespace.digest, hash_), view.tobytes(), "the auditor reads")
                    self.reached["audited_in_pools"] += len(above)
        await client.close()


class _Log(logging.Handler):
    """What the product logs is noted; an exception that it caught and did not expect is a broken promise."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(logging.INFO if machine.story is not None else logging.ERROR)
        self._machine = machine

    def emit(self, record: logging.LogRecord) -> None:
        self._machine.note(f"logs {record.levelname}: {record.getMessage()}")
        alive = self._machine.current is None or self._machine.current.alive
        if record.exc_info and record.exc_info[1] is not None and alive and self._machine.failure is None:
            self._machine.failure = Wrong(f"unexpected: {record.getMessage()}: {record.exc_info[1]!r}")
            self._machine.failure.__cause__ = record.exc_info[1]


def play(seed: int, record: bool = False) -> Report:
    """One run from its seed."""
    gc.disable()  # what is collected, and when, must not depend on what ran before
    try:
        return Scene(seed, record).play()
    finally:
        gc.enable()
