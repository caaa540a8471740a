"""Engines whose slots are in a GPU's memory: their copies end late, also after they have died; and blocks come up from the arena."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import numpy as np

from kvstore.clients import requests
from kvstore.clients.answers import Slotted
from kvstore.clients.handles import EXISTS, STORED, Attached
from kvstore.clients.pools import PoolTerms
from tests.simulation.engines import Engine
from tests.simulation.gpus import Gpus
from tests.simulation.hands import Hands, Private, Slot
from tests.simulation.keys import KINDS, ROOT, Kind, chain, some_path
from tests.simulation.lives import Street
from tests.simulation.machine import Process
from tests.simulation.memory import UNIT_BYTES, ArenaFile, Map
from tests.simulation.truth import Held


class PoolEngine(Engine):
    """One process on one GPU. Where the daemon offers no pool there, its slots are in the arena."""

    def __init__(self, street: Street, process: Process, gpus: Gpus) -> None:
        super().__init__(street, process)
        self._gpus = gpus
        self._uuid = f"gpu-{process.chance.randrange(gpus.count)}"

    def _pools(self) -> list[PoolTerms]:
        guarantee = self._chance.choice((0, 0, 1)) * UNIT_BYTES  # of all engines together no more than a pool has
        limit = self._chance.choice((0, 0, 8)) * UNIT_BYTES
        return [PoolTerms(self._uuid, guarantee, limit)]

    def _map(self, opened: Attached) -> None:
        before = getattr(self, "_file", None)
        super()._map(opened)
        self.pool = 0
        offered = opened.session.pools.get(self._uuid)
        mapped = self._gpus.mapped(offered.socket_path) if offered is not None else None
        if offered is not None and mapped is not None:
            self.pool, self._file = offered.number, mapped
        if before is not self._file:  # what it held is in memory that it has no more to do with
            self._truth.let_go(*self._hands.held())
            self._hands = Hands()

    def _acts(self) -> list[tuple[int, Callable[[], Awaitable[None]]]]:
        return [*super()._acts(), (10 if self.pool else 0, self._promote)]

    async def _fill(self, slot: Slot, content: bytes) -> Held:
        if not self.pool:
            return await super()._fill(slot, content)
        start = slot[0] * UNIT_BYTES
        await self._gpus.copy(self._process, self._file, start, lambda: content, len(content))
        return self._hold(slot, content, self._truth.made[content][1])

    async def _promote(self) -> None:
        """Lease in the arena, copy to slots of the pool, commit there, and only then give the lease back."""
        kind, lease, hashes = self._chance.choice(KINDS), next(self._ids), chain(some_path(self._chance))
        arena = cast(Map, self._attached.arena).file
        timeout_s = self._chance.choice((0.001, 0.05, 0.5))
        granting = await self._link.take(requests.acquire(lease, self._id(kind), b"".join(hashes), timeout_s), timeout_s + 1.0)
        if granting.error is not None:
            raise granting.error
        if not self._link.alive:
            return
        below: list[Held] = []
        for unit, generation, hash_ in zip(granting.units[0].tolist(), granting.generations[0].tolist(), hashes, strict=False):
            if generation:  # else it lies before the window
                below.append(self._look_below(arena, unit, kind, hash_))
        try:
            if below:
                await self._bring_up(kind, arena, below, [ROOT, *hashes][granting.blocks - len(below) :])
            self._link.tell([requests.release(lease)])
        finally:
            self._truth.let_go(*below)

    def _look_below(self, arena: ArenaFile, unit: int, kind: Kind, hash_: bytes) -> Held:
        start = unit * UNIT_BYTES
        content = arena.units[start : start + kind.block_bytes].tobytes()
        self._truth.check((self._namespaces[kind.name].digest, hash_), content, f"{self._process} reads unit {unit}")
        return self._truth.hold(self._process.name, arena, start, content, hash_)

    async def _bring_up(self, kind: Kind, arena: ArenaFile, below: list[Held], chained: list[bytes]) -> None:
        """`chained`: the hash before the first of these blocks, then theirs."""
        answer = (await self._ask(requests.reserve(next(self._ids), self._id(kind), count=len(below), pool=self.pool)))[0]
        if not isinstance(answer, Slotted):
            return
        slots = [slot for slot in zip(answer.units.tolist(), answer.generations.tolist(), strict=True) if slot[1]]
        mine = [Private(slot, kind) for slot in slots]
        self._hands.private += mine

        def source(held: Held) -> Callable[[], bytes]:
            return lambda: arena.units[held.start : held.start + kind.block_bytes].tobytes()

        pairs = list(zip(slots, below, strict=False))
        copies = [self._gpus.copy(self._process, self._file, to[0] * UNIT_BYTES, source(of), kind.block_bytes) for to, of in pairs]
        await asyncio.gather(*copies)
        for each, of in zip(mine, below, strict=False):
            each.held = self._hold(each.slot, of.expected, of.key)
        if not pairs:
            return
        units, generations = (np.array(column, np.uint32) for column in zip(*slots, strict=True))
        names, parents = (b"".join(part[: len(slots)]) for part in (chained[1:], chained))
        lease = next(self._ids)
        answer = (await self._ask(requests.commit(lease, self._id(kind), (units, generations), names, parents, pool=self.pool)))[0]
        if not isinstance(answer, Slotted):
            return
        for i, (each, of) in enumerate(zip(mine, below, strict=False)):
            if answer.outcomes[i] == STORED:
                self._hands.private.remove(each)
                self._hands.leases.setdefault(lease, []).append(cast(Held, each.held))
                self._truth.reached["brought_up"] += 1
            elif answer.outcomes[i] == EXISTS and answer.generations[i]:
                there = (answer.units[i], answer.generations[i])
                self._hands.leases.setdefault(lease, []).append(self._look(there, kind, of.key))
