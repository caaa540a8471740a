"""The peers and this store by turns on the same work, and the samples of each."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kvstore.bench.peers.ours import Ours
from kvstore.bench.peers.pipe import Driver, PeerFailed
from kvstore.bench.peers.work import Work
from kvstore.bench.yardsticks import Memcpy, gbps, shared_segment

HERE = Path(__file__).parent
OURS = "kvstore"
YARDSTICK_BYTES = 256 << 20  # bytes copied as yardstick in each round: far more than the processor's caches
YARDSTICK_BLOCK_BYTES = 2 << 20  # bytes of one copy: a block's
WARMING = 1  # rounds that are not counted: all memory is touched for the first time, and code runs for the first time
SETTLE_S = 0.3  # seconds before each turn: threads of who had the turn before spin a while until they sleep, OpenMP's for 0.2
LOOKUPS = 7  # lookups of each kind in a round: they take milliseconds
NEVER_STORED = 1_000_000  # added to a turn: the tokens of no other


class Side(Protocol):
    """A driver, or this store."""

    about: dict[str, str]

    def ask(self, do: str, *, turn: int = 0, per_object: int = 1) -> dict[str, Any]:
        """Carry out a command; see driver.py. Raises PeerFailed."""

    def close(self) -> None:
        """End it."""


@dataclass(frozen=True)
class Kind:
    """A peer, or this store, as it takes part: how it is started, and in which sizes of objects."""

    name: str
    start: Callable[[Work, Path], Side]
    per_objects: tuple[int, ...] = (1,)  # blocks of an object, where the peer leaves that to its user


@dataclass
class Result:
    """All that was seen of one of them."""

    name: str
    about: dict[str, str] = field(default_factory=dict)
    reason: str = ""  # why it could not run, or ran no further
    bytes_checked: bool = False
    first_store_gbps: float | None = None  # of the very first round: its memory is touched for the first time
    samples: dict[str, list[float]] = field(default_factory=dict)  # store_gbps, retrieve_gbps, lookup_hit_ms, …; by metric
    by_object: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # the same, by blocks in an object

    def add(self, per_object: int, metric: str, value: float) -> None:
        """Note a sample."""
        self.by_object.setdefault(str(per_object), {}).setdefault(metric, []).append(value)


def driver(program: Path, module: str, environment: Mapping[str, str] | None = None) -> Callable[[Work, Path], Side]:
    """How a peer is started: its module under the Python of its own venv. Raises PeerFailed where that is not there."""

    def start(work: Work, directory: Path) -> Side:
        if not program.exists():
            raise PeerFailed(f"{program} is not there; `make bench-peers` makes it")
        command = [str(program), str(HERE / "driver.py"), str(HERE / f"{module}.py"), work.as_json(directory)]
        return Driver(command, directory / "driver.log", environment)

    return start


def ours() -> Kind:
    """This store."""
    return Kind(OURS, Ours)


def measure(kinds: Sequence[Kind], data: Work, prefix: Work, rounds: int, directory: Path) -> tuple[list[Result], list[float]]:
    """Run all of them. Returns the result of each, and the GB/s of memcpy with two threads, a sample a round."""
    results = {kind.name: Result(kind.name) for kind in kinds}
    memcpy: list[float] = []
    with shared_segment(YARDSTICK_BYTES) as source, shared_segment(YARDSTICK_BYTES) as target:
        yardstick = Memcpy(source, target)
        _by_turns(kinds, results, data, directory / "data", rounds, _carry, lambda: memcpy.append(yardstick.run(YARDSTICK_BLOCK_BYTES, 2)))
    _by_turns(kinds, results, prefix, directory / "prefix", rounds, _look_up, lambda: None)
    for result in results.values():
        result.samples = _best(result.by_object)
    return list(results.values()), memcpy[WARMING:]


Act = Callable[[Kind, Result, Side, Work, int], None]


def _by_turns(
    kinds: Sequence[Kind], results: Mapping[str, Result], work: Work, directory: Path, rounds: int, act: Act, before: Callable[[], object]
) -> None:
    """Start all, then each does its part in every round, another one first each time. The first rounds are not counted."""
    running = [kind for kind in kinds if not results[kind.name].reason]
    _say(f"starting {', '.join(kind.name for kind in running)} for {work.tokens} tokens")
    with ThreadPoolExecutor(len(kinds)) as pool, ExitStack() as stack:
        starting = {kind.name: pool.submit(_start, kind, results[kind.name], work, directory) for kind in running}
        wait(starting.values())  # all, so that none is forgotten where another raises
        up = [side for each in starting.values() if not each.exception() and (side := each.result())]
        stack.callback(lambda: list(pool.map(lambda side: side.close(), up)))
        sides = {name: side for name, each in starting.items() if (side := each.result())}
        for number in range(rounds + WARMING):
            _say(f"round {number + 1} of {rounds + WARMING}")
            time.sleep(SETTLE_S)
            before()
            first = number % len(kinds)
            for kind in [*kinds[first:], *kinds[:first]]:
                if kind.name in sides:
                    time.sleep(SETTLE_S)
                    try:
                        act(kind, results[kind.name], sides[kind.name], work, number)
                    except PeerFailed as failed:
                        results[kind.name].reason = str(failed)
                        del sides[kind.name]


def _start(kind: Kind, result: Result, work: Work, directory: Path) -> Side | None:
    """Start one of them; None where it cannot, with the reason in its result."""
    place = directory / kind.name
    place.mkdir(parents=True)
    try:
        side = kind.start(work, place)
    except PeerFailed as failed:
        result.reason = str(failed)
        return None
    result.about = side.about
    return side


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _carry(kind: Kind, result: Result, side: Side, work: Work, number: int) -> None:
    """Store and retrieve everything. What was stored first in a turn is noted by itself: its memory has lain idle for seconds."""
    for per_object in kind.per_objects:
        idle = gbps(work.size_bytes, side.ask("store", turn=number + NEVER_STORED, per_object=per_object)["seconds"])
        side.ask("clear")
        stored = gbps(work.size_bytes, side.ask("store", turn=number, per_object=per_object)["seconds"])
        retrieved = gbps(work.size_bytes, side.ask("retrieve", turn=number, per_object=per_object)["seconds"])
        if number >= WARMING:
            result.add(per_object, "store_after_idle_gbps", idle)
            result.add(per_object, "store_gbps", stored)
            result.add(per_object, "retrieve_gbps", retrieved)
        elif number == 0:
            result.first_store_gbps = result.first_store_gbps or idle
            if not side.ask("check", turn=number, per_object=per_object)["equal"]:
                raise PeerFailed("what was retrieved is not what was stored")
            result.bytes_checked = True
        side.ask("clear")


def _look_up(kind: Kind, result: Result, side: Side, work: Work, number: int) -> None:
    """Ask for a prefix that is there and for one that is not."""
    for per_object in kind.per_objects:
        side.ask("store", turn=number, per_object=per_object)
        for what, turn, expected in (("hit", number, work.blocks), ("miss", number + NEVER_STORED, 0)):
            for _ in range(LOOKUPS):
                answer = side.ask("lookup", turn=turn, per_object=per_object)
                if answer["found"] != expected:
                    raise PeerFailed(f"a lookup of {expected} stored blocks found {answer['found']}")
                if number >= WARMING:
                    result.add(per_object, f"lookup_{what}_ms", 1e3 * answer["seconds"])
                    if "of_hashes_seconds" in answer:
                        result.add(per_object, f"lookup_{what}_of_hashes_ms", 1e3 * answer["of_hashes_seconds"])
        side.ask("clear")


def _best(by_object: Mapping[str, Mapping[str, list[float]]]) -> dict[str, list[float]]:
    """The samples of that size of objects which did best, by metric."""
    best: dict[str, list[float]] = {}
    for samples in by_object.values():
        for metric, values in samples.items():
            better = max if metric.endswith("_gbps") else min
            best[metric] = better(best.get(metric, values), values, key=statistics.median)
    return best
