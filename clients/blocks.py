"""What a paged KV cache asks of a store, whoever provides it.

Two providers: `clients.blocksession` (a daemon over gRPC, its arena mapped) and `worker.standalone` (an arena of one's own).
Slots are named by their offset in 4 KiB units and a generation. Lease ids are the caller's: any positive integer, unique among its
live leases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.geometry import Geometry


@dataclass(frozen=True)
class Slots:
    """Parallel arrays, one row a slot: `units` [n] uint32 (offset in 4 KiB units), `generations` [n] uint32."""

    units: NDArray[np.uint32]
    generations: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.units)


class BlockStore(Protocol):
    """One namespace of a store, as its paged cache sees it. Thread-safe; only `acquire` and `reserve` may wait."""

    @property
    def geometry(self) -> Geometry:
        """The layout of this namespace's blocks."""

    @property
    def arena(self) -> NDArray[np.uint8]:
        """The whole DRAM arena, writable. Write only into slots that are reserved and not yet committed."""

    def acquire(self, lease: int, hashes: bytes, timeout_s: float) -> Slots:
        """Lease the leading blocks of packed `hashes` that the store has, brought into DRAM; they stay until `release`.

        Fewer than asked, down to none, where blocks are missing, could not be read, or the timeout passed.
        Raises errors.Unavailable when the store is gone (the caller goes on without it).
        """

    def reserve(self, count: int) -> Slots:
        """Up to `count` slots to fill, private until committed. Fewer when the store is full of held blocks."""

    def commit(self, lease: int, slots: Slots, hashes: bytes, parent: bytes) -> None:
        """Publish filled slots as consecutive blocks of one chain, and hold them under `lease`. Returns at once.

        `hashes` 32 bytes a slot; `parent` the hash before the first. Where a block exists already the slot stays private:
        it remains readable by this caller until `abandon`. Failures are counted and never raised here.
        """

    def abandon(self, slots: Slots) -> None:
        """Give reserved, uncommitted (or duplicate) slots back. Returns at once."""

    def release(self, lease: int, keep_blocks: int = 0) -> None:
        """End a lease, or all of it past its first blocks. Unknown leases are no error. Returns at once."""

    def flush(self, timeout_s: float) -> bool:
        """Wait until every earlier commit has been answered; False when the timeout passed."""

    def close(self) -> None:
        """Release everything. Idempotent."""
