"""Slots reserved ahead of all sequences of one worker, so that a step need not wait for the store.

One thread takes; another of the pool's own asks the store for more while the model computes. `close` gives back what was not taken.
"""

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from kvstore.clients.blocks import BlockStore, Slots
from kvstore.errors import EnvironmentFault, KVStoreError, ResourceExhausted, Unavailable
from kvstore.worker.rows import CPU, ArenaRows, Memory, RowLayout

AHEAD_BLOCKS = 4  # reserved ahead of all sequences: in blocks of 16 a store is asked about once in 64 tokens
PRIVATE_BLOCKS = 16  # taken at once from this process's memory when the store is gone: few allocations, little waste


@dataclass(frozen=True)
class Place:
    """A slot to fill. `shared` False: in this process's own memory, unknown to the store."""

    arena: ArenaRows
    unit: int
    generation: int
    shared: bool


class Pool:
    """Places to fill, `AHEAD_BLOCKS` of them in hand where the store gives so many."""

    def __init__(self, store: BlockStore, layout: RowLayout) -> None:
        self._store, self._layout = store, layout
        self._ahead: deque[Place] = deque()
        self._private: deque[Place] = deque()
        self._private_blocks = 0  # in hand and taken
        self._asked: Future[list[Place]] | None = None
        self._background = ThreadPoolExecutor(1, thread_name_prefix="kvstore-reserve")
        self._arena_lock = threading.Lock()  # the background thread asks for it too
        self._arena = ArenaRows(layout, store.arena)

    def arena(self) -> ArenaRows:
        """The store's arena as it is mapped now. Any thread."""
        with self._arena_lock:
            mapped = self._store.arena
            if not self._arena.is_of(mapped):
                self._arena = ArenaRows(self._layout, mapped)
            return self._arena

    def prepare(self) -> None:
        """Ask for places in the background where few are left."""
        if self._asked is None and len(self._ahead) < AHEAD_BLOCKS:
            self._asked = self._background.submit(self._reserve, AHEAD_BLOCKS)

    def take(self, count: int) -> list[Place]:
        """So many of the store's places.

        Raises EnvironmentFault where the store cannot be reached, ResourceExhausted where it has no more to give; then none is taken.
        """
        if count > len(self._ahead) and (error := self._collect(wait=True)) is not None:
            self._drop_ahead()
            raise error  # asking again would wait as long again
        if count > len(self._ahead):
            try:
                self._ahead.extend(self._reserve(count - len(self._ahead) + AHEAD_BLOCKS))
            except EnvironmentFault:
                self._drop_ahead()
                raise
        if count > len(self._ahead):
            raise ResourceExhausted(
                f"the store has {len(self._ahead)} of {count} slots that a sequence needs; "
                "the rest is held by others: try again later, or give the store more memory"
            )
        return [self._ahead.popleft() for _ in range(count)]

    def take_private(self, count: int) -> list[Place]:
        """So many places in memory of this process alone. Raises ResourceExhausted past as many as the store's arena has."""
        if count > len(self._private):
            geometry, missing = self._layout.geometry, count - len(self._private)
            most = len(self._store.arena) // geometry.slot_bytes + PRIVATE_BLOCKS - self._private_blocks
            if missing > most:
                raise ResourceExhausted("without the store no more memory is taken than it has; try again once others have ended")
            # Twice as much each time: a block table of the CUDA kernels points into few arenas.
            blocks = max(missing, min(most, max(PRIVATE_BLOCKS, self._private_blocks)))
            self._private_blocks += blocks
            arena = ArenaRows(self._layout, own_memory(self._layout, blocks * geometry.slot_bytes))
            self._private.extend(Place(arena, index * geometry.slot_units, 0, shared=False) for index in range(blocks))
        return [self._private.popleft() for _ in range(count)]

    def put_back(self, places: Sequence[Place]) -> None:
        """Private places that nobody uses any more; their memory is let go once all of them are back."""
        self._private.extend(places)
        if len(self._private) == self._private_blocks:
            self._private.clear()
            self._private_blocks = 0

    def give_back(self) -> bool:
        """Give back what is in hand, for somebody who needs it more; whether there was any."""
        self._collect(wait=True)
        return self._drop_ahead()

    def _drop_ahead(self) -> bool:
        """Of a store that is away too: it may come back with other memory, which is taken once nothing of the old is in hand."""
        held, self._ahead = list(self._ahead), deque()
        if held:
            self._store.abandon(slots_of(held))
        return bool(held)

    def close(self) -> None:
        """Give back what is in hand and wait for what is on its way. Idempotent."""
        self.give_back()
        self._background.shutdown(wait=True)

    def _collect(self, wait: bool) -> EnvironmentFault | None:
        """Take what was asked for in the background; what kept the store from answering, where it was waited for: else it may be past."""
        if self._asked is None or not (wait or self._asked.done()):
            return None
        asked, self._asked = self._asked, None
        waited = not asked.done()
        try:
            self._ahead.extend(asked.result())
        except EnvironmentFault as error:
            return error if waited else None
        return None

    def _reserve(self, count: int) -> list[Place]:
        """Up to `count` slots of the store. Raises EnvironmentFault where it cannot be reached. Any thread."""
        for _ in range(2):
            arena = self.arena()
            try:
                slots = self._store.reserve(count)
            except ResourceExhausted:
                return []
            except EnvironmentFault:
                raise
            except KVStoreError as error:  # of a session that could not be made anew, say: here as good as away
                raise Unavailable(f"the store gives no slots: {error}") from error
            if self.arena() is arena:
                pairs = zip(slots.units.tolist(), slots.generations.tolist(), strict=True)
                return [Place(arena, unit, generation, shared=True) for unit, generation in pairs]
            self._store.abandon(slots)  # attached anew in between: which mapping they belong to is unknown, so once more
        return []


def own_memory(layout: RowLayout, size_bytes: int) -> Memory:
    """Memory of this process for blocks of a layout, where it keeps them. Raises ResourceExhausted where a GPU has none left."""
    if layout.device == CPU:
        return np.zeros(size_bytes, np.uint8)
    try:
        return torch.zeros(size_bytes, dtype=torch.uint8, device=layout.device)
    except torch.OutOfMemoryError as error:
        raise ResourceExhausted(f"the GPU has no memory left for blocks of this process's own: {error}") from error


def slots_of(places: Sequence[Place]) -> Slots:
    """Places of the store as it names them."""
    return Slots(
        np.array([place.unit for place in places], np.uint32),
        np.array([place.generation for place in places], np.uint32),
    )
