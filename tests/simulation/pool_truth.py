"""What must be true of blocks in GPU memory: a pool serves the bytes committed last there, and what goes down from it is what it has.

A pool and the tiers below it may have different bytes under one key, each committed there; so each has its own last ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.cache.invariants import violations
from kvstore.cache.messages import Decision, Granted
from kvstore.daemon.hub import Hub
from tests.simulation.machine import Machine
from tests.simulation.memory import ArenaFile
from tests.simulation.truth import Key, Truth, Watched


class WatchedPool(Watched):
    """One pool's cache. See `Watched`."""

    def __init__(self, cache: Any, file: ArenaFile, truth: Truth, machine: Machine) -> None:
        self.latest: dict[Key, bytes] = {}  # committed last in this pool, and not cleared
        self._file = file
        super().__init__(cache, truth, machine)

    def check(self) -> None:
        """The rules hold, if anything has changed since the last look. Promises are looked at with dram's."""
        if self.changed:
            self.changed = False
            if broken := violations(self.cache.state):
                self._machine.wrong(f"{self._file.identity}: {'; '.join(broken)}")

    def _committed(self, session: int, key: Key, content: bytes) -> None:
        self._truth.known(key, content)
        self.latest[key] = content
        self._truth.reached["committed_in_pool"] += 1

    def _grant(self, key: Key, content: bytes, where: str) -> None:
        self._truth.check(key, content, where)
        self._truth.reached["served_from_pool"] += 1
        if content != self.latest.get(key):
            self._machine.wrong(f"{where}: not the bytes committed last under this key in {self._file.identity}", key[1])

    def _clear(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(clear_id: int, namespaces: tuple[int, ...], *elsewhere: Any) -> Any:
            digests = {self._digest(namespace) for namespace in namespaces}
            self.latest = {key: content for key, content in self.latest.items() if key[0] not in digests}
            return act(clear_id, namespaces, *elsewhere)

        return wrapped

    def _decided(self, decision: Decision) -> None:
        if isinstance(decision, Granted):
            self._granted(decision)

    def _bytes(self, start: int, size_bytes: int) -> bytes:
        return bytes(self._file.units[start : start + size_bytes])


def watch_pools(hub: Hub, below: Watched, truth: Truth, machine: Machine) -> list[WatchedPool]:
    """Look at every pool of a new daemon, and at what comes down from them."""
    if hub.pools is None:
        return []
    tiers: list[Any] = [pool.tier for pool in hub.pools.all.values()]
    watched = [WatchedPool(pool.cache, tier.file, truth, machine) for pool, tier in zip(hub.pools.all.values(), tiers, strict=True)]

    def comes_down(session: int, key: Key, content: bytes) -> None:
        if session in hub._demoters.values() and not any(each.latest.get(key) == content for each in watched):
            machine.wrong("a block came down that no pool has", key[1])

    below.before_commit = comes_down
    return watched


def left_in(hub: Hub) -> list[str]:
    """What is still held in pools, or on its way from there, though nobody is there."""
    if hub.pools is None or hub.demotion is None:
        return []
    left = [f"{hub.demotion.demoter.waiting} copies down"] if not hub.demotion.demoter.idle else []
    for pool in hub.pools.all.values():
        stats = pool.cache.stats()
        left += [f"{pool.name}: session {each.session}" for each in stats.sessions if each.held_bytes or each.ended]
        left += [f"{pool.name}: {figures.held_bytes} bytes held" for figures in stats.tiers.values() if figures.held_bytes]
    return left
