"""The paged KV cache of a worker's running sequences, over a store of blocks.

A sequence leases the leading blocks that the store has, reserves slots for the rest and some ahead, and commits each block after
the step that filled it. What it was given it keeps until it is closed, whatever became of the store: its leases and reservations stay
mapped, and a block that turned out to exist already stays where it was written. Once the store cannot be reached, further blocks go
to memory of this process; from there on nothing of the sequence is committed.

    open → (ensure → step → advance)* → close
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from kvstore.clients.blocks import BlockStore, Slots
from kvstore.errors import EnvironmentFault, InvalidArgument, ResourceExhausted
from kvstore.hashing import HASH_BYTES, block_hashes, usable_blocks
from kvstore.worker.attention import Span, Step
from kvstore.worker.rows import ArenaRows, BlockTable, RowLayout, Scratch

ACQUIRE_TIMEOUT_S = 10.0  # a prompt's wait for blocks on their way up: past that, computing them is faster
AHEAD_BLOCKS = 4  # reserved ahead of a sequence in one batch: in blocks of 16 a store is asked once in 64 tokens
PRIVATE_BLOCKS = 16  # taken at once from this process's memory when the store is gone: few allocations, little waste


@dataclass(frozen=True)
class Place:
    """A slot to fill. `shared` False: in this process's own memory, unknown to the store."""

    arena: ArenaRows
    unit: int
    generation: int
    shared: bool


class PagedCache:
    """Sequences over one store. One thread calls it; `close` ends what is left and leaves the store open."""

    def __init__(self, store: BlockStore, acquire_timeout_s: float = ACQUIRE_TIMEOUT_S) -> None:
        self.store = store
        self.layout = RowLayout(store.geometry)
        self.scratch = Scratch(self.layout)
        self.acquire_timeout_s = acquire_timeout_s
        self.leases = itertools.count(1)
        self.background = ThreadPoolExecutor(1, thread_name_prefix="kvstore-reserve")
        self._arena_lock = threading.Lock()  # the background thread asks for it too
        self._arena = ArenaRows(self.layout, store.arena)
        self._open: set[PagedSequence] = set()

    def open(self, tokens: Sequence[int], root: bytes) -> "PagedSequence":
        """Begin a sequence with a prompt under the fingerprint `root`: leases the blocks that the store has of it.

        At least the last token stays to be computed. A store that cannot be reached gives nothing, and is no error.
        """
        if not tokens:
            raise InvalidArgument("the prompt has no tokens; give at least one")
        sequence = PagedSequence(self, tokens, root)
        self._open.add(sequence)
        return sequence

    def step(self, parts: Sequence[tuple["PagedSequence", int]]) -> Step:
        """One forward pass that computes the next so many tokens of each sequence; `ensure` has found their slots."""
        ends = itertools.accumulate(count for _, count in parts)
        spans = [
            Span(sequence.table, sequence.computed, count, end - count) for (sequence, count), end in zip(parts, ends, strict=True)
        ]
        return Step(spans, self.scratch)

    def arena(self) -> ArenaRows:
        """The store's arena as it is mapped now."""
        with self._arena_lock:
            mapped = self.store.arena
            if mapped.ctypes.data != self._arena.address:
                self._arena = ArenaRows(self.layout, mapped)
            return self._arena

    def reserve(self, count: int) -> list[Place]:
        """Up to `count` slots of the store. Raises EnvironmentFault where it cannot be reached. Any thread."""
        arena = self.arena()
        slots = self.store.reserve(count)
        if self.arena() is not arena:  # attached anew in between: which mapping the slots belong to is unknown
            self.store.abandon(slots)
            return []
        pairs = zip(slots.units.tolist(), slots.generations.tolist(), strict=True)
        return [Place(arena, unit, generation, shared=True) for unit, generation in pairs]

    def private(self, count: int) -> list[Place]:
        """Slots in memory of this process alone."""
        geometry = self.layout.geometry
        arena = ArenaRows(self.layout, np.zeros(count * geometry.slot_bytes, np.uint8))
        return [Place(arena, index * geometry.slot_units, 0, shared=False) for index in range(count)]

    def forget(self, sequence: "PagedSequence") -> None:
        """A sequence has closed."""
        self._open.discard(sequence)

    def close(self) -> None:
        """Close every sequence and wait for the reservations on their way. Idempotent."""
        for sequence in list(self._open):
            sequence.close()
        self.background.shutdown(wait=True)


class PagedSequence:
    """One sequence: its tokens, where their KV lies, and what it holds of the store.

    tokens      the prompt and what was added since        computed    how many of them have their KV in slots
    hit_tokens  how many of those came from the store      fault       what kept the store from being used, if anything did
    """

    def __init__(self, cache: PagedCache, tokens: Sequence[int], root: bytes) -> None:
        self.tokens = list(tokens)
        self.table = BlockTable(cache.layout)
        self.fault: EnvironmentFault | None = None
        self.hash_s = self.acquire_s = self.reserve_s = 0.0
        self._cache, self._root = cache, root
        self._lease = next(cache.leases)
        self._size = cache.layout.tokens
        self._own: list[Place] = []
        self._ahead: deque[Place] = deque()
        self._closed = False
        # Beside the acquire, so that a prompt whose rest is short waits for one round trip and not for two.
        self._reserving: Future[list[Place]] | None = cache.background.submit(cache.reserve, AHEAD_BLOCKS)
        began_at = time.perf_counter()
        self._hashes = bytearray(block_hashes(root, self.tokens, self._size))
        self.hash_s = time.perf_counter() - began_at
        self._hit_blocks = self._acquire()
        self.acquire_s = time.perf_counter() - began_at - self.hash_s
        self._committed = self._hit_blocks
        self.computed = self.hit_tokens = self._hit_blocks * self._size

    def append(self, token: int) -> None:
        """Add a token, to be computed by a later step."""
        self.tokens.append(token)

    def ensure(self, count: int) -> None:
        """Find slots for the next `count` tokens. Raises ResourceExhausted where the store has no more to give."""
        needed = -(-(self.computed + count) // self._size) - len(self.table)
        if needed <= 0:
            return
        began_at = time.perf_counter()
        self._collect()
        if needed > len(self._ahead):
            self._reserve(needed)
        for _ in range(needed):
            place = self._ahead.popleft()
            self._own.append(place)
            self.table.append(place.arena, [place.unit])
        if not self._ahead and not self.fault:
            self._reserving = self._cache.background.submit(self._cache.reserve, AHEAD_BLOCKS)
        self.reserve_s += time.perf_counter() - began_at

    def advance(self, count: int) -> None:
        """A step has filled the next `count` tokens' slots: commits the blocks that are now full."""
        self.computed += count
        first, last = self._committed, self.computed // self._size
        places = list(itertools.takewhile(lambda place: place.shared, self._own[first - self._hit_blocks : last - self._hit_blocks]))
        if not places:
            return
        last = first + len(places)
        self._hash_up_to(last)
        hashes = bytes(self._hashes[first * HASH_BYTES : last * HASH_BYTES])
        self._cache.store.commit(self._lease, _slots(places), hashes, self._hash_before(first))
        self._committed = last

    def close(self) -> None:
        """Give back all that the sequence holds. Idempotent."""
        if self._closed:
            return
        self._closed = True
        store = self._cache.store
        if self._reserving is not None:
            self._reserving.add_done_callback(self._abandon_late)
        store.release(self._lease)
        # Committed slots are no longer ours and are left alone; what is left are open blocks, and copies of blocks that existed.
        held = [place for place in (*self._own, *self._ahead) if place.shared]
        if held:
            store.abandon(_slots(held))
        self._cache.forget(self)

    def _acquire(self) -> int:
        """Lease what the store has of the prompt; returns the number of blocks."""
        usable = usable_blocks(len(self.tokens), self._size)
        if usable == 0:
            return 0
        store, arena = self._cache.store, self._cache.arena()
        try:
            slots = store.acquire(self._lease, bytes(self._hashes[: usable * HASH_BYTES]), self._cache.acquire_timeout_s)
        except EnvironmentFault as error:
            self.fault = error
            return 0
        if self._cache.arena() is not arena or len(slots) > usable:
            store.release(self._lease)
            return 0
        self.table.append(arena, slots.units.tolist())
        return len(slots)

    def _collect(self) -> None:
        """Take what was reserved in the background."""
        if self._reserving is not None:
            waiting, self._reserving = self._reserving, None
            try:
                self._ahead.extend(waiting.result())
            except ResourceExhausted:
                return  # asked again below, where it is an error
            except EnvironmentFault as error:
                self.fault = error

    def _reserve(self, needed: int) -> None:
        """Bring the places ahead to at least `needed`: from the store, or from this process's memory once the store is gone."""
        missing = needed - len(self._ahead)
        if self.fault is None:
            try:
                self._ahead.extend(self._cache.reserve(missing + AHEAD_BLOCKS))
            except ResourceExhausted:
                pass  # told below, with the numbers
            except EnvironmentFault as error:
                self.fault = error
        if self.fault is not None:
            self._ahead.extend(self._cache.private(max(missing, PRIVATE_BLOCKS)))
        elif len(self._ahead) < needed:
            raise ResourceExhausted(
                f"the store has {len(self._ahead)} of {needed} slots that a sequence of {len(self.tokens)} tokens needs; "
                "the rest is held by others: try again later, or give the store more memory"
            )

    def _hash_up_to(self, blocks: int) -> None:
        have = len(self._hashes) // HASH_BYTES
        if blocks > have:
            tokens = self.tokens[have * self._size : blocks * self._size]
            self._hashes += block_hashes(self._hash_before(have), tokens, self._size)

    def _hash_before(self, block: int) -> bytes:
        return bytes(self._hashes[(block - 1) * HASH_BYTES : block * HASH_BYTES]) if block else self._root

    def _abandon_late(self, waiting: Future[list[Place]]) -> None:
        """Slots that came after the sequence was closed."""
        if not waiting.cancelled() and waiting.exception() is None and waiting.result():
            self._cache.store.abandon(_slots(waiting.result()))


def _slots(places: Sequence[Place]) -> Slots:
    return Slots(
        np.array([place.unit for place in places], np.uint32),
        np.array([place.generation for place in places], np.uint32),
    )
