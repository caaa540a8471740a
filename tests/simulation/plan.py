"""What a seed decides before the start: sizes, settings, and which kinds of fault this run has."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from kvstore.cache.recovery import CLEAR_ROWS
from kvstore.cache.slots import FEW_SLOTS
from kvstore.config import DramSettings, IndexSettings, NvmeSettings, SessionSettings, Settings
from tests.simulation.patches import EXTENT_UNITS

UNIT_BYTES = 4096
SILENCE_S = 1.5
# Each run has some of these and not others: faults that hide each other meet in some runs only.
FAULTS = (
    "kill_daemon", "stop_daemon", "end_daemon", "lose_power", "kill_client", "stop_client", "cut_client", "lose_replies",
    "disk_errors", "disk_full", "disk_read_only", "disk_slow", "disk_short", "sync_errors", "disk_lies",
    "marks_refused", "jump_clock", "clears", "remotes", "engines",
)  # fmt: skip


GPU_SHARE = 0.3  # of all runs have GPUs
GPU_FAULTS = ("copies_refused", "copies_slow", "lose_gpu")


@dataclass(frozen=True)
class PoolPlan:
    """How many GPUs there are, and the units of each one's pool."""

    gpus: int
    units: int


@dataclass(frozen=True)
class Portions:
    """Up to how many slots are gone over one by one, and how many rows a piece of a clear or a snapshot has: what the product has, or
    less, so that what is meant for thousands meets the few blocks of a simulation."""

    few_slots: int
    rows: int


@dataclass(frozen=True)
class Plan:
    """See the module's text."""

    faults: frozenset[str]
    settings: Settings
    touch_s: float  # seconds until a new arena is touched to its end
    pools: PoolPlan
    portions: Portions

    @classmethod
    def of(cls, seed: int) -> Plan:
        """The plan of a seed."""
        chance = Random(f"{seed} plan")
        faults = frozenset(name for name in FAULTS if chance.random() < (0.2 if name == "disk_lies" else 0.4))
        if Random(f"{seed} tails").random() < 0.5:
            faults |= {"tails"}  # no fault, but something that some runs have
        gpus = Random(f"{seed} gpus")
        count = gpus.choice((1, 1, 2)) if gpus.random() < GPU_SHARE else 0
        if count:  # their faults are drawn apart, so that what the other seeds do stays as it was
            faults |= {"pools", *(name for name in GPU_FAULTS if gpus.random() < 0.4)}
        nvme = NvmeSettings(
            path="/disk" if chance.random() < 0.95 else "",
            bytes=chance.choice((4, 5, 6)) * EXTENT_UNITS * UNIT_BYTES,
            write=chance.choice(("through", "through", "through", "on_evict", "off")),
            write_bytes_per_s=chance.choice((2**30, 2**30, 2**20)),
            durable=chance.choice(("process", "power")),
            queue_depth=chance.choice((2, 16)),
            threads=chance.choice((1, 2, 3)),
        )
        settings = Settings(
            listen="/simulated",
            metrics="",
            dram=DramSettings(bytes=chance.choice((3, 4, 5)) * EXTENT_UNITS * UNIT_BYTES, extent_bytes=EXTENT_UNITS * UNIT_BYTES),
            nvme=nvme,
            index=IndexSettings(blocks=chance.choice((60, 100, 400))),
            session=SessionSettings(silence_s=SILENCE_S, limit_bytes=chance.choice((0, 0, 10)) * UNIT_BYTES),
            acquire_timeout_s=chance.choice((0.3, 2.0)),
            verify=chance.choice(("transfer", "read")),
            shutdown_s=1.0,
        )
        pool = PoolPlan(count, gpus.choice((2, 3, 5)) * EXTENT_UNITS)
        portion = Random(f"{seed} portions")
        portions = Portions(portion.choice((0, 2, FEW_SLOTS)), portion.choice((3, 20, CLEAR_ROWS)))
        return cls(faults, settings, chance.choice((0.0, 0.0, 0.5)), pool, portions)

    def has(self, fault: str) -> bool:
        return fault in self.faults
