"""What clients do all day, with the real asyncio client: put, get, look, clear, and go. Some are on another machine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvstore import errors
from kvstore.clients.aio import AsyncKVClient
from kvstore.clients.handles import Namespace
from kvstore.clients.lease import Lease
from kvstore.clients.put import Put, PutBlock
from tests.simulation.gpus import Gpus
from tests.simulation.keys import IDENTITY, KINDS, Kind, chain, some_path
from tests.simulation.machine import Machine, Process
from tests.simulation.memory import ArenaFile, Map, Memory
from tests.simulation.truth import Held, Key, Truth

# A client may be told these at any time; anything else is a fault of the store, or of the simulation.
EXPECTED = (errors.Unavailable, errors.SessionEnded, errors.StaleEpoch, errors.ResourceExhausted, errors.DeadlineExceeded)

NO_POOL = (errors.ConfigError,)  # what a client is told that asks for a GPU which was lost

Place = tuple[ArenaFile, int]  # an arena, and where in it a slot begins


class Given(Exception):
    """A client changes its mind in the middle of a put."""


@dataclass
class Street:
    """What all clients share: the machine, and what is true."""

    machine: Machine
    memory: Memory
    truth: Truth
    tails: bool = False  # engines send token ids, and look for tails
    clears: float = 0.0  # chance that an action is a clear
    closing: bool = False  # everybody is to finish and leave
    # Acquired for a group, to be claimed by others; by the pool where they are, 0 for the arena.
    group_leases: dict[int, list[tuple[int, tuple[int, ...]]]] = field(default_factory=dict)


async def fill(truth: Truth, process: Process, view: NDArray[np.uint8], content: bytes, place: Place | None) -> Held | None:
    """Write a block in two parts with time between them; its `place` in the arena is watched meanwhile. Returns what is held."""
    half = len(content) // 2
    view[:half] = np.frombuffer(content[:half], np.uint8)
    key = truth.made[content]
    held = truth.hold(process.name, place[0], place[1], content[:half], key[1]) if place else None
    await asyncio.sleep(process.chance.expovariate(200))
    view[half:] = np.frombuffer(content[half:], np.uint8)
    if held is not None:
        held.expected = content
    return held


def seen_in(lease: Lease, hashes: tuple[bytes, ...]) -> list[tuple[NDArray[np.uint8], bytes]]:
    """The blocks of a lease that are in GPU memory, but for those before a window, and their hashes."""
    views: list[Any] = list(lease.device_views)
    return [(view, hash_) for view, hash_ in zip(views, hashes, strict=False) if isinstance(view, np.ndarray)]


def start_of(arena: ArenaFile, view: NDArray[np.uint8]) -> int:
    """Where in the arena a view begins."""
    begin: int = arena.units.__array_interface__["data"][0]
    return int(view.__array_interface__["data"][0]) - begin


class Life:
    """One client process that uses `AsyncKVClient`; with `gpus` in their memory too."""

    def __init__(self, street: Street, process: Process, gpus: Gpus | None = None) -> None:
        self._street, self._process, self._chance = street, process, process.chance
        self._truth, self._gpus = street.truth, gpus

    async def run(self) -> None:
        """Until the street closes."""
        limit = self._chance.choice((0, 0, 0, 6, 12)) * 4096
        guarantee = self._chance.choice((0, 0, 0, 2, 4)) * 4096
        terms: dict[str, Any] = {"guarantee_bytes": guarantee, "limit_bytes": limit and max(limit, guarantee)}
        if self._gpus is not None:
            terms |= {"gpus": range(self._gpus.count), "driver": self._gpus.driver}
        client = AsyncKVClient("simulated:1", name=self._process.name, **terms)
        namespaces: dict[str, Namespace] = {}
        while not self._street.closing:
            kind = self._chance.choice(KINDS)
            try:
                if kind.name not in namespaces:
                    namespaces[kind.name] = await client.open_namespace(IDENTITY, kind.geometry, "", kind.name, kind.keep)
                await self._action()(client, namespaces[kind.name], kind)
            except (*EXPECTED, *NO_POOL, Given) as error:
                self._street.machine.note(f"is told {type(error).__name__}: {error}")
            await asyncio.sleep(self._chance.expovariate(20))
        await client.close()

    def _action(self) -> Callable[[AsyncKVClient, Namespace, Kind], Awaitable[None]]:
        if self._chance.random() < self._street.clears:
            return self._clear
        return self._chance.choices((self._put, self._get, self._look, self._prefetch, self._pin), (10, 8, 2, 2, 1))[0]

    def _gpu(self) -> int | None:
        """Where the next action is to be: on one of the GPUs, or (None) in host memory."""
        if self._gpus is None or self._chance.random() < 0.4:
            return None
        return self._chance.randrange(self._gpus.count)

    async def _put(self, client: AsyncKVClient, namespace: Namespace, kind: Kind) -> None:
        hashes = chain(some_path(self._chance))
        held: list[Held] = []
        try:
            async with client.put(namespace, b"".join(hashes), pool=self._gpu()) as put:
                for block in put.blocks:
                    if self._chance.random() < 0.05:
                        raise Given
                    held += await self._write(namespace, kind, block, put)
                self._truth.let_go(*held)
                held.clear()
        finally:
            self._truth.let_go(*held)

    async def _write(self, namespace: Namespace, kind: Kind, block: PutBlock, put: Put) -> list[Held]:
        content = self._truth.make((namespace.digest, block.hash), kind.block_bytes)
        attached = put.attached
        if self._gpus is not None and put.pool is not None:
            file = cast(Any, put.pool.imported).file
            start = start_of(file, cast(Any, block.device_view))
            await self._gpus.copy(self._process, file, start, lambda: content, len(content))
            held: Held | None = self._truth.hold(self._process.name, file, start, content, block.hash)
        else:
            arena = cast(Map, attached.arena).file if attached is not None else None
            where = (arena, start_of(arena, block.view)) if arena is not None else None
            held = await fill(self._truth, self._process, block.view, content, where)
        self._truth.reached["late_writes"] += attached is not None and attached.error is not None
        if self._chance.random() < 0.95:
            block.done()
        return [held] if held else []

    async def _get(self, client: AsyncKVClient, namespace: Namespace, kind: Kind) -> None:
        hashes = chain(some_path(self._chance))
        timeout_s = self._chance.choice((0.001, 0.05, 0.5, 2.0))
        async with client.get(namespace, b"".join(hashes), timeout_s=timeout_s, pool=self._gpu()) as lease:
            held: list[Held] = []
            file = cast(Any, lease.attached.arena).file if lease.attached is not None else None
            for view, hash_ in zip(lease.views, hashes[len(lease.device_views) :], strict=False):
                if not len(view):  # before the window
                    continue
                held += self._read(view, (namespace.digest, hash_), file)
            for view, hash_ in seen_in(lease, hashes):
                held += self._read(view, (namespace.digest, hash_), cast(Any, lease.pool).imported.file)
            await asyncio.sleep(self._chance.choice((0.0, 0.01, 0.3)))
            self._truth.let_go(*held)

    def _read(self, view: NDArray[np.uint8], key: Key, file: ArenaFile | None) -> list[Held]:
        content = view.tobytes()
        self._truth.check(key, content, f"{self._process} reads")
        if file is None:
            return []
        return [self._truth.hold(self._process.name, file, start_of(file, view), content, key[1])]

    async def _look(self, client: AsyncKVClient, namespace: Namespace, kind: Kind) -> None:
        hashes = chain(some_path(self._chance))
        found = await client.lookup(namespace, b"".join(hashes))
        if found.blocks > len(hashes):
            self._street.machine.wrong(f"a lookup of {len(hashes)} blocks finds {found.blocks}")

    async def _prefetch(self, client: AsyncKVClient, namespace: Namespace, kind: Kind) -> None:
        await client.prefetch(namespace, b"".join(chain(some_path(self._chance))))

    async def _pin(self, client: AsyncKVClient, namespace: Namespace, kind: Kind) -> None:
        act = self._chance.choice((client.pin, client.unpin))
        await act(namespace, b"".join(chain(some_path(self._chance))))

    async def _clear(self, client: AsyncKVClient, namespace: Namespace, kind: Kind) -> None:
        await client.clear(namespace if self._chance.random() < 0.7 else None)
