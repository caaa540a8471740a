"""A store in this process alone: the daemon's cache core over an arena of anonymous memory. No daemon, no disk, no sharing.

For a worker without a daemon, and for tests. A lock makes it safe to call from any thread; nothing waits.
"""

import itertools
import mmap
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from kvstore.cache.core import Cache, CacheStats
from kvstore.cache.messages import (
    ALL_BLOCKS,
    Abandon,
    Acquire,
    Attach,
    BlockOutcome,
    Commit,
    Committed,
    Granted,
    NamespaceSpec,
    Prompt,
    Refused,
    Release,
    Reserve,
    unpack_hashes,
)
from kvstore.cache.state import CacheSizes
from kvstore.clients import blocks
from kvstore.clients.blocks import Slots, Tail, Tokens
from kvstore.errors import ConfigError, from_code
from kvstore.geometry import Geometry, namespace_fields
from kvstore.hashing import Identity, namespace_digest, token_bytes

T = TypeVar("T")

_SESSION = 1  # the only one
_TENANT = "local"


class StandaloneStore:
    """A `BlockStore` over `arena_bytes` of this process's memory. Raises ConfigError where not even one block fits.

    `tails`: keep token ids for partial tails; raises GeometryError where a block's layout has none. `memory` gives the arena, if it is
    not to be the host's.
    After `close`, all calls that give something raise SessionEnded.
    """

    def __init__(
        self, identity: Identity, geometry: Geometry, arena_bytes: int, *, tails: bool = False, memory: Callable[[int], Any] | None = None
    ) -> None:
        slots = arena_bytes // geometry.slot_bytes
        if slots < 1:
            raise ConfigError(f"standalone arena: {arena_bytes} bytes asked, one block takes {geometry.slot_bytes}; give more memory")
        if tails:
            blocks.require_tails(geometry)
        size_bytes = slots * geometry.slot_bytes
        self._geometry, self._tails = geometry, tails
        self._arena = (memory or _memory)(size_bytes)
        self._lock = threading.Lock()
        self._reservations = itertools.count(1)
        # One slot size, so one extent over everything: none of it is left over.
        self._cache = Cache(CacheSizes(dram_bytes=size_bytes, dram_extent_bytes=size_bytes))
        digest = namespace_digest(namespace_fields(_TENANT, identity, geometry))
        spec = NamespaceSpec(_TENANT, digest, geometry.slot_units, geometry.block_bytes, ALL_BLOCKS, geometry.block_tokens, tails)
        self._namespace = _checked(self._cache.open_namespace(spec))
        _checked(self._cache.attach(Attach(_SESSION, _TENANT), time.monotonic()))
        self._failed_commits = 0

    @property
    def geometry(self) -> Geometry:
        """The layout of the blocks."""
        return self._geometry

    @property
    def arena(self) -> NDArray[np.uint8]:
        """The whole arena, writable."""
        return cast(NDArray[np.uint8], self._arena)

    @property
    def tails(self) -> bool:
        """Whether token ids are kept."""
        return self._tails

    def acquire(self, lease: int, hashes: bytes, timeout_s: float, prompt: blocks.Prompt | None = None) -> Slots:
        """Lease the leading blocks that are here, and a partial tail. Never waits: there is no slower tier."""
        told = Prompt(prompt.root, _ids(prompt.tokens)) if prompt is not None and self._tails else None
        with self._lock:
            now = time.monotonic()
            request = Acquire(_SESSION, lease, unpack_hashes(hashes), now + timeout_s, namespace=self._namespace, prompt=told)
            acquired = _checked(self._cache.acquire(request, now))
            granted = [decision for decision in self._cache.drain() if isinstance(decision, Granted) and decision.lease == lease]
        units = np.concatenate([np.zeros(0, np.uint32), *(grant.units[0] for grant in granted)]).astype(np.uint32)
        generations = np.concatenate([np.zeros(0, np.uint32), *(grant.generations[0] for grant in granted)]).astype(np.uint32)
        if not acquired.tail_tokens:
            return Slots(units, generations)
        return Slots(units[:-1], generations[:-1], Tail(int(units[-1]), int(generations[-1]), acquired.tail_tokens))

    def reserve(self, count: int) -> Slots:
        """Up to `count` slots to fill; fewer where everything else is held."""
        with self._lock:
            request = Reserve(_SESSION, next(self._reservations), self._namespace, count)
            reserved = _checked(self._cache.reserve(request))
            self._cache.drain()
        return Slots(reserved.units, reserved.generations)

    def commit(self, lease: int, slots: Slots, hashes: bytes, parent: bytes, tokens: Tokens | None = None) -> None:
        """Publish filled slots; those whose block exists stay private to the caller."""
        ids = _ids(tokens) if tokens is not None and self._tails else None
        with self._lock:
            words = unpack_hashes(hashes)
            parents = unpack_hashes(parent)
            request = Commit(_SESSION, lease, self._namespace, slots.units, slots.generations, words, parents, tokens=ids)
            done = self._cache.commit(request)
            self._cache.drain()
            fine = (BlockOutcome.STORED, BlockOutcome.EXISTS)
            failed = np.isin(done.outcomes, fine, invert=True).sum() if isinstance(done, Committed) else len(slots)
            self._failed_commits += int(failed)

    def abandon(self, slots: Slots) -> None:
        """Give back what is still reserved of these slots."""
        with self._lock:
            self._cache.abandon(Abandon(_SESSION, 0, slots.units, slots.generations))
            self._cache.drain()

    def release(self, lease: int, keep_blocks: int = 0) -> None:
        """End a lease, or its tail."""
        with self._lock:
            self._cache.release(Release(_SESSION, lease, keep_blocks))
            self._cache.drain()

    def flush(self, timeout_s: float) -> bool:
        """True: every commit is answered before it returns."""
        return True

    def stats(self) -> CacheStats:
        """What the core counts, and under `failed_commits` the blocks that could not be published."""
        with self._lock:
            stats = self._cache.stats()
            return replace(stats, counters=stats.counters | {"failed_commits": self._failed_commits})

    def close(self) -> None:
        """Release everything. Idempotent."""
        with self._lock:
            self._cache.detach(_SESSION)
            self._cache.drain()


def _ids(tokens: Tokens) -> NDArray[np.uint32]:
    return np.frombuffer(token_bytes(tokens), "<u4")


def _memory(size_bytes: int) -> NDArray[np.uint8]:
    """Zeroed anonymous memory, in huge pages where the system gives them: the first touch of a block then costs little."""
    memory = mmap.mmap(-1, size_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _checked(outcome: T | Refused) -> T:
    if isinstance(outcome, Refused):
        raise from_code(outcome.code, outcome.text)
    return outcome
