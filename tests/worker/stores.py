"""A store that is watched, and made to fail on demand."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore.cache.core import CacheStats
from kvstore.cache.messages import Tier
from kvstore.clients.blocks import BlockStore, Prompt, Slots, Tokens
from kvstore.errors import KVStoreError
from kvstore.geometry import Geometry
from kvstore.worker.model import LoadedModel
from kvstore.worker.standalone import StandaloneStore

BLOCK_TOKENS = 8  # tokens of a block in the tiny model's tests


@dataclass
class Watched:
    """Passes everything on to `inner`, notes what was asked, and raises or shortens where told to."""

    inner: BlockStore
    acquire_error: KVStoreError | None = None
    reserve_error: KVStoreError | None = None
    reserves_until_error: int = 0
    grant_at_most: int = 1 << 30
    acquired: list[Slots] = field(default_factory=list)
    reserved: list[Slots] = field(default_factory=list)
    committed: list[tuple[Slots, bytes]] = field(default_factory=list)
    on_commit: Callable[[Slots, bytes], None] | None = None

    @property
    def geometry(self) -> Geometry:
        return self.inner.geometry

    @property
    def arena(self) -> NDArray[np.uint8]:
        return self.inner.arena

    @property
    def tails(self) -> bool:
        return self.inner.tails

    def acquire(self, lease: int, hashes: bytes, timeout_s: float, prompt: Prompt | None = None) -> Slots:
        if self.acquire_error:
            raise self.acquire_error
        slots = self.inner.acquire(lease, hashes[: 32 * self.grant_at_most], timeout_s, prompt)
        self.acquired.append(slots)
        return slots

    def reserve(self, count: int) -> Slots:
        if self.reserve_error and len(self.reserved) >= self.reserves_until_error:
            raise self.reserve_error
        slots = self.inner.reserve(count)
        self.reserved.append(slots)
        return slots

    def commit(self, lease: int, slots: Slots, hashes: bytes, parent: bytes, tokens: Tokens | None = None) -> None:
        self.committed.append((slots, hashes))
        if self.on_commit:
            self.on_commit(slots, hashes)
        self.inner.commit(lease, slots, hashes, parent, tokens)

    def abandon(self, slots: Slots) -> None:
        self.inner.abandon(slots)

    def release(self, lease: int, keep_blocks: int = 0) -> None:
        self.inner.release(lease, keep_blocks)

    def flush(self, timeout_s: float) -> bool:
        return self.inner.flush(timeout_s)

    def close(self) -> None:
        self.inner.close()

    # ---- sight

    def stats(self) -> CacheStats:
        assert isinstance(self.inner, StandaloneStore)
        return self.inner.stats()

    @property
    def held_bytes(self) -> int:
        """Bytes under leases and reservations: 0 when nothing runs, or something leaked."""
        figures = self.stats().tiers[Tier.DRAM]
        return figures.held_bytes + figures.class_bytes["reserved"]

    @property
    def blocks(self) -> int:
        """Blocks that can be found."""
        return self.stats().tiers[Tier.DRAM].blocks

    def block_bytes(self, unit: int) -> bytes:
        """What lies in a slot."""
        return self.arena[unit * 4096 :][: self.geometry.block_bytes].tobytes()


def small_store(loaded: LoadedModel, blocks: int = 64, block_tokens: int = BLOCK_TOKENS, *, tails: bool = False) -> Watched:
    """Room for so many of a model's blocks."""
    geometry = loaded.geometry(block_tokens)
    return Watched(StandaloneStore(loaded.identity, geometry, blocks * geometry.slot_bytes, tails=tails))


def prompt(length: int, seed: int = 0, vocabulary: int = 211) -> list[int]:
    """Random token ids; the same seed gives the same beginning whatever the length."""
    ids: list[int] = np.random.default_rng(seed).integers(3, vocabulary, 4096)[:length].tolist()
    return ids
