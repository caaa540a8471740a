"""The faults of a run: each happens now and then, and each state that is wrong gets right again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from tests.simulation import gpus
from tests.simulation.disk import Trouble
from tests.simulation.machine import Process
from tests.simulation.plan import SILENCE_S

if TYPE_CHECKING:
    from tests.simulation.scene import Scene

PAUSE_S = 0.25  # seconds between two faults, on average
LIES = Trouble(lost=0.02, misdirected=0.02, flipped=0.02)


class Mischief:
    """Chooses from what the plan allows."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._chance = Random(f"{scene.machine.seed} mischief")
        acts: dict[str, Callable[[], None]] = {
            "kill_daemon": self._kill_daemon,
            "stop_daemon": lambda: self._stop(scene.daemon),
            "end_daemon": scene.ask_to_end,
            "lose_power": lambda: scene.lose_power() if self._chance.random() < 0.3 else None,
            "kill_client": self._kill_client,
            "stop_client": lambda: self._stop(self._client()),
            "cut_client": lambda: scene.network.cut(self._client()),
            "disk_errors": lambda: self._trouble(error=0.2),
            "disk_full": lambda: self._trouble(full=0.5),
            "disk_read_only": lambda: self._trouble(read_only=True),
            "disk_slow": lambda: self._trouble(slow_s=self._chance.choice((0.1, 1.0, 5.0))),
            "disk_short": lambda: self._trouble(short=0.5),
            "sync_errors": lambda: self._trouble(sync_error=0.3),
            "marks_refused": self._refuse_marks,
            "jump_clock": self._jump,
            "copies_refused": lambda: self._gpu_trouble(refused=0.3),
            "copies_slow": lambda: self._gpu_trouble(slow=0.3),
            "lose_gpu": lambda: scene.gpus.lose() if self._chance.random() < 0.2 else None,
        }
        self._acts = {name: act for name, act in acts.items() if scene.plan.has(name)}
        if scene.plan.has("disk_lies"):
            scene.disk.trouble = self._usual()
        if scene.plan.has("lose_replies"):
            scene.network.reply_loss = 0.05
        self._next()

    def end(self) -> None:
        """Everything gets well."""
        self._acts = {}
        for process in self._scene.machine.processes:
            process.fuse = None
        self._scene.disk.trouble = Trouble()
        self._scene.gpus.trouble = gpus.Trouble()
        self._scene.network.reply_loss = 0.0
        self._scene.memory.full = False

    def _next(self) -> None:
        self._scene.machine.after(self._chance.expovariate(1 / PAUSE_S), self._happen)

    def _happen(self) -> None:
        if not self._acts:
            return
        name = self._chance.choice(sorted(self._acts))
        self._scene.machine.note(name)
        self._scene.reached[name] += 1
        self._acts[name]()
        self._next()

    # ----

    def _client(self) -> Process | None:
        return self._chance.choice(self._scene.clients) if self._scene.clients else None

    def _kill_daemon(self) -> None:
        if daemon := self._scene.daemon:
            self._kill(daemon)

    def _kill_client(self) -> None:
        if client := self._client():
            self._kill(client)

    def _kill(self, process: Process) -> None:
        """Now, or in the middle of something that it is about to do."""
        if self._chance.random() < 0.3:
            self._scene.machine.kill(process)
        elif process.fuse is None:
            process.fuse = self._chance.randrange(1, 40)

    def _stop(self, process: Process | None) -> None:
        if process is None:
            return
        seconds = self._chance.choice((self._chance.uniform(0, 0.1), self._chance.uniform(0, 3 * SILENCE_S)))
        self._scene.machine.stop(process, seconds)
        if seconds > SILENCE_S:  # what grpc's keep-alive does on the other side
            whose = None if process is self._scene.daemon else process
            self._scene.machine.after(SILENCE_S, lambda: self._scene.network.cut(whose))

    def _trouble(self, **what: float) -> None:
        self._scene.disk.trouble = Trouble(**what)  # type: ignore[arg-type]
        self._scene.machine.after(self._chance.uniform(0.01, 0.6), self._recover)

    def _recover(self) -> None:
        if self._acts:
            self._scene.disk.trouble = self._usual()

    def _usual(self) -> Trouble:
        return replace(LIES) if self._scene.plan.has("disk_lies") else Trouble()

    def _gpu_trouble(self, **what: float) -> None:
        self._scene.gpus.trouble = gpus.Trouble(**what)

        def be_well() -> None:
            self._scene.gpus.trouble = gpus.Trouble()

        self._scene.machine.after(self._chance.uniform(0.01, 0.6), be_well)

    def _refuse_marks(self) -> None:
        memory = self._scene.memory
        memory.full = True

        def refuse_no_more() -> None:
            memory.full = False

        self._scene.machine.after(self._chance.uniform(0.001, 0.1), refuse_no_more)

    def _jump(self) -> None:
        """The whole machine stood still, but for its clock."""
        self._scene.machine.now += self._chance.choice((0.2, 1.1, 4.0, 100.0))
