"""The store of a worker on a GPU: blocks in the daemon's pool of that GPU's memory, and what only its dram has is brought up.

A hit in the pool is a lease and a row in the block table. A hit in dram is leased there, gets slots in the pool, and its copies are
queued layer by layer; whoever computes follows them (`Slots.arrival`). When all have arrived a thread commits them in the pool, for
everybody, and lets the lease in dram go. New blocks are reserved and committed in the pool; the daemon copies them down.

A pool is of one run of the daemon. After a restart the next call maps the new one; the old mapping stays for those who use it, and is
closed with the last of what they hold. Any thread may call.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from kvstore.clients.blocks import Prompt, Slots, Tokens
from kvstore.clients.blocksession import BlockSession
from kvstore.clients.hbm import ImportedPool
from kvstore.clients.pools import Pool
from kvstore.clients.promotion import Copier, Lift, Promotion, Route
from kvstore.errors import ConfigError, InvalidArgument, KVStoreError, Unavailable
from kvstore.geometry import UNIT_BYTES, Geometry
from kvstore.hashing import HASH_BYTES
from kvstore.kernels.driver import CudaError
from kvstore.kernels.layout import SlotSpace, table_entries
from kvstore.tiers.pinned import PinnedArena
from kvstore.worker.gpu.device import Gpu

log = logging.getLogger(__name__)


class Mapping:
    """One pool as this process maps it. `uses`: leases and slots of it in somebody's hands; guarded by the store's lock."""

    def __init__(self, pool: Pool, imported: ImportedPool, memory: Tensor) -> None:
        self.pool, self.imported, self.memory = pool, imported, memory
        self.uses = 0


@dataclass(frozen=True)
class _Slot:
    mapping: Mapping
    unit: int
    generation: int


class Lifted:
    """Blocks on their way from dram to the pool: an `Arrival`. `ended`: committed, or lost; `released`: not asked for any more."""

    def __init__(self, promotion: Promotion, lease: int, targets: Slots, hashes: bytes, parent: bytes) -> None:
        self.lease, self.targets, self.hashes, self.parent = lease, targets, hashes, parent
        self.ended = self.released = False
        self._promotion = promotion
        self._lock = threading.Lock()
        self._arrived = False
        self._fault: CudaError | None = None

    def follow(self, layer: int, stream: int) -> None:
        """See `Arrival`."""
        with self._lock:
            if self._fault is not None:
                raise Unavailable(f"blocks did not arrive in GPU memory: {self._fault}") from self._fault
            if not self._arrived:
                self._promotion.follow(layer, stream)

    def done(self) -> bool:
        """See `Arrival`."""
        return self._arrived

    def wait(self) -> bool:
        """Sleep until they have arrived; whether they have. One thread, once."""
        fault = None
        try:
            self._promotion.wait()
        except CudaError as error:
            fault = error
        with self._lock:
            self._arrived, self._fault = fault is None, fault
            self._promotion.close()
        return fault is None


class HbmStore:
    """A `BlockStore` in the pool of one GPU; `session` is the daemon's, opened with that GPU's pool. It closes the session.

    Raises ConfigError where the daemon has no pool on that GPU.
    """

    def __init__(self, session: BlockSession, gpu: Gpu) -> None:
        self._session, self._gpu = session, gpu
        self._uuid = gpu.driver.uuid(gpu.number)
        self._lock = threading.Lock()  # guards what follows; never held while the daemon is asked
        self._mapping_lock = threading.Lock()
        self._slots: dict[int, _Slot] = {}  # by the number that stands for a slot's generation here: units repeat over mappings
        self._numbers = itertools.count(1)
        self._leases: dict[int, set[Mapping]] = {}
        self._lifts: dict[int, Lifted] = {}  # by lease
        self._quiet = threading.Condition(self._lock)
        self.lifted_blocks = self.failed_lifts = 0
        if self._uuid not in session.pools:
            raise ConfigError(f"the daemon keeps no blocks on the GPU {self._uuid}; start it with --hbm, or this worker with --device cpu")
        self._mapped: set[Mapping] = set()
        self._pinned: PinnedArena | None = None
        self._mapping = self._map(session.pools[self._uuid])
        self._pinned = _pinned(session, gpu)
        self._ending: queue.SimpleQueue[Lifted | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._finish, name="kvstore-promote", daemon=True)
        self._thread.start()

    @property
    def geometry(self) -> Geometry:
        """The layout of the blocks."""
        return self._session.geometry

    @property
    def arena(self) -> Any:
        """The pool as a tensor of bytes."""
        return self._mapping.memory

    @property
    def tails(self) -> bool:
        """There are none in GPU memory."""
        return False

    def acquire(self, lease: int, hashes: bytes, timeout_s: float, prompt: Prompt | None = None) -> Slots:
        """See BlockStore. What dram has after the pool's blocks is on its way when this returns, if the prompt is given."""
        mapping, found = self._lease(lease, hashes, timeout_s)
        rest = hashes[len(found) * HASH_BYTES :]
        if not rest or prompt is None:
            return found
        parent = hashes[(len(found) - 1) * HASH_BYTES : len(found) * HASH_BYTES] if len(found) else prompt.root
        with contextlib.suppress(KVStoreError):  # without dram's blocks the rest is computed
            if lifted := self._lift(mapping, lease, rest, parent, timeout_s):
                both = [(found.units, lifted.targets.units), (found.generations, lifted.targets.generations)]
                return Slots(np.concatenate(both[0]), np.concatenate(both[1]), arrival=lifted)
        return found

    def reserve(self, count: int) -> Slots:
        """See BlockStore."""
        return self._named(*self._reserve(count))

    def commit(self, lease: int, slots: Slots, hashes: bytes, parent: bytes, tokens: Tokens | None = None) -> None:
        """See BlockStore: those that lie in one mapping of the pool, from the first on."""
        with self._lock:
            known = [self._slots.get(int(number)) for number in slots.generations]
        run = list(itertools.takewhile(lambda each: each is not None and known[0] is not None and each.mapping is known[0].mapping, known))
        kept = [slot for slot in run if slot is not None]
        if kept:
            mapping = kept[0].mapping
            self._hold(lease, mapping)
            self._session.commit(lease, _real(kept), hashes[: len(kept) * HASH_BYTES], parent, pool=mapping.pool)

    def abandon(self, slots: Slots) -> None:
        """See BlockStore."""
        with self._lock:
            held = [slot for number in slots.generations if (slot := self._slots.pop(int(number), None)) is not None]
        for mapping, some in itertools.groupby(held, key=lambda slot: slot.mapping):
            gone = list(some)
            self._session.abandon(_real(gone), pool=mapping.pool)
            self._drop(mapping, len(gone))

    def release(self, lease: int, keep_blocks: int = 0) -> None:
        """See BlockStore. A lease with blocks on their way ends when they have arrived."""
        if keep_blocks:
            return  # of tails, which there are none of
        with self._lock:
            lifted = self._lifts.get(lease)
            if lifted is not None and not lifted.ended:
                lifted.released = True
                return
        self._release(lease)

    def flush(self, timeout_s: float) -> bool:
        """See BlockStore."""
        with self._quiet:
            if not self._quiet.wait_for(lambda: all(each.ended for each in self._lifts.values()), timeout_s):
                return False
        return self._session.flush(timeout_s)

    def close(self) -> None:
        """Wait for what is on its way, and release everything. Idempotent."""
        if self._thread.is_alive():
            self._ending.put(None)
            self._thread.join()
        self._session.close()
        if self._pinned is not None:
            self._pinned.close()
        for mapping in self._mapped:
            mapping.imported.close()
        self._mapped.clear()

    # ----

    def _lease(self, lease: int, hashes: bytes, timeout_s: float) -> tuple[Mapping, Slots]:
        """The leading blocks that the pool has."""
        for mapping in self._tries():
            try:
                found = self._session.acquire(lease, hashes, timeout_s, pool=mapping.pool)
            except Unavailable:
                if self._session.pools.get(self._uuid) in (None, mapping.pool):  # else it was restarted
                    raise
            else:
                self._hold(lease, mapping)
                return mapping, found
        raise Unavailable("the daemon was restarted twice in a moment; go on without it")

    def _reserve(self, count: int) -> tuple[Mapping, Slots]:
        for mapping in self._tries():
            try:
                return mapping, self._session.reserve(count, pool=mapping.pool)
            except Unavailable:
                if self._session.pools.get(self._uuid) in (None, mapping.pool):  # else it was restarted
                    raise
        raise Unavailable("the daemon was restarted twice in a moment; go on without it")

    def _lift(self, mapping: Mapping, lease: int, hashes: bytes, parent: bytes, timeout_s: float) -> Lifted | None:
        """Begin to bring up what dram has of these blocks, as far as the pool has room. Raises KVStoreError; then nothing is held."""
        sources = self._session.acquire(lease, hashes, timeout_s)
        targets = Slots(np.zeros(0, np.uint32), np.zeros(0, np.uint32))
        try:
            if len(sources):
                targets = self._named(mapping, self._session.reserve(len(sources), pool=mapping.pool))
            if not len(targets):
                self._session.release(lease)
                return None
            route = Route(self.geometry, self._session.arena.ctypes.data, mapping.imported.address)
            pairs = zip(sources.units.tolist(), targets.units.tolist(), strict=False)
            lifts = [Lift(source * UNIT_BYTES, target * UNIT_BYTES) for source, target in pairs]
            promotion = Promotion(self._gpu.driver, self._gpu.number, route, lifts, self._copier(route, sources, targets))
        except KVStoreError as error:
            self.failed_lifts += 1
            log.warning("blocks stay in host memory: %s", error)
            self.abandon(targets)
            self._session.release(lease)
            raise
        lifted = Lifted(promotion, lease, targets, hashes[: len(targets) * HASH_BYTES], parent)
        with self._lock:
            self._lifts[lease] = lifted
        self._ending.put(lifted)
        return lifted

    def _copier(self, route: Route, sources: Slots, targets: Slots) -> Copier | None:
        """One launch a layer, where a kernel may read the host's memory."""
        if self._pinned is None or not self._pinned.pinned:
            return None
        slots = SlotSpace(self.geometry, (route.hbm_address, route.dram_address))
        return partial(self._gpu.copier, slots, table_entries(sources.units[: len(targets)], arena=1), table_entries(targets.units))

    def _finish(self) -> None:
        """In a thread: publish what has arrived."""
        while (lifted := self._ending.get()) is not None:
            arrived = lifted.wait()
            if arrived:
                self.lifted_blocks += len(lifted.targets)
                self.commit(lifted.lease, lifted.targets, lifted.hashes, lifted.parent)
            else:
                self.failed_lifts += 1
            self._session.release(lifted.lease)
            with self._quiet:
                lifted.ended = True
                self._quiet.notify_all()
            if lifted.released:
                self._release(lifted.lease)

    def _named(self, mapping: Mapping, slots: Slots) -> Slots:
        """Slots with numbers of this store's own in place of their generations."""
        with self._lock:
            numbers = [next(self._numbers) % 2**32 for _ in range(len(slots))]
            found = zip(numbers, slots.units.tolist(), slots.generations.tolist(), strict=True)
            self._slots.update((number, _Slot(mapping, unit, generation)) for number, unit, generation in found)
            mapping.uses += len(slots)
        return Slots(slots.units, np.array(numbers, np.uint32))

    def _tries(self) -> Iterator[Mapping]:
        """The pool as it is mapped; then once more, where the daemon has another by now."""
        for _ in range(2):
            offered = self._session.pools.get(self._uuid)
            if offered is None:
                raise Unavailable("the daemon keeps no blocks on this GPU any more; go on without it")
            with self._mapping_lock:
                if offered != self._mapping.pool or not self._mapping.imported.is_open:
                    fresh = self._map(offered)
                    old, self._mapping = self._mapping, fresh
                    self._drop(old, 0)
            yield self._mapping

    def _map(self, pool: Pool) -> Mapping:
        try:
            imported = self._session.map_pool(self._gpu.driver, pool)
        except ConfigError as error:
            raise Unavailable(str(error)) from error
        mapping = Mapping(pool, imported, self._gpu.view(imported))
        with self._lock:
            self._mapped.add(mapping)
        return mapping

    def _hold(self, lease: int, mapping: Mapping) -> None:
        with self._lock:
            holders = self._leases.setdefault(lease, set())
            if mapping not in holders:
                holders.add(mapping)
                mapping.uses += 1

    def _release(self, lease: int) -> None:
        with self._lock:
            holders, lifted = self._leases.pop(lease, set()), self._lifts.pop(lease, None)
        if lifted is not None:
            self.abandon(lifted.targets)  # of blocks that somebody else had brought up first; before their lease frees others
        for mapping in holders:
            self._session.release(lease, pool=mapping.pool)
            self._drop(mapping, 1)

    def _drop(self, mapping: Mapping, count: int) -> None:
        """So many uses less; a mapping that is not the present one goes with the last."""
        with self._lock:
            mapping.uses -= count
            is_over = mapping.uses == 0 and mapping is not self._mapping and mapping in self._mapped
            if is_over:
                self._mapped.remove(mapping)
        if is_over:
            mapping.imported.close()


def _pinned(session: BlockSession, gpu: Gpu) -> PinnedArena | None:
    """The host's arena, pinned: copies to the GPU run by themselves then."""
    try:
        made = PinnedArena(gpu.driver, gpu.number, session.arena)
    except InvalidArgument as error:
        log.warning("host memory is not pinned, copies from there are slower: %s", error)
        return None
    if made.note:
        log.warning("%s", made.note)
    return made


def _real(slots: list[_Slot]) -> Slots:
    """As the daemon names them."""
    return Slots(np.array([slot.unit for slot in slots], np.uint32), np.array([slot.generation for slot in slots], np.uint32))
