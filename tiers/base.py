"""What a tier of bytes can do. One small protocol; `kvstore.testing.tier_contract` is the suite that every tier passes.

A tier owns a flat range of `capacity_bytes` addressed by byte offset. Offsets, lengths and the memory given are multiples
of 4 KiB. A `ByteTier` knows nothing of blocks; a `BlockTier` also remembers, through a restart, which block lies where.
`read`, `write` and the record calls come from the mover's threads, several at once on disjoint ranges; they may block,
and release the GIL. Everything else is called by the event loop's thread and is cheap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class HealthState(StrEnum):
    OK = "ok"
    DEGRADED = "degraded"  # works, but not as asked: buffered instead of O_DIRECT, or the last write failed
    FAILED = "failed"  # reads and writes raise


@dataclass(frozen=True)
class Health:
    state: HealthState
    reason: str = ""  # empty when OK; otherwise what happened and what to do


class ByteTier(Protocol):
    """A flat range of bytes on one medium."""

    @property
    def name(self) -> str:
        """`dram`, `nvme`, ...; also the metric label."""

    @property
    def capacity_bytes(self) -> int:
        """Size of the range, a multiple of 4 KiB, constant."""

    def read(self, offset_bytes: int, targets: Sequence[memoryview]) -> None:
        """Fill the targets, one after another, from consecutive bytes of the range that begin at `offset_bytes`.

        Raises InvalidArgument where the range or the alignment is wrong, Unavailable on a medium fault; a short read is
        one. After an error the targets hold anything.
        """

    def write(self, offset_bytes: int, sources: Sequence[memoryview]) -> None:
        """Copy the sources, one after another, to consecutive bytes of the range that begin at `offset_bytes`.

        Raises InvalidArgument where the range or the alignment is wrong, ResourceExhausted when the medium is full (a
        short write too), Unavailable on other faults. After an error that part of the range holds anything.
        """

    def health(self) -> Health:
        """The tier's state now. A fault shows for a few seconds, and until the same kind of call works again."""

    def close(self) -> None:
        """Give the medium back once the calls in progress end; does not wait for them. Idempotent. Later calls raise Unavailable."""


@dataclass(frozen=True)
class BlockRecord:
    """What a tier remembers of one block: where it lies, whose it is, and what its bytes must be."""

    units: int
    generation: int
    namespace_digest: bytes
    hash: bytes
    parent: bytes
    block_bytes: int
    checksum: tuple[int, int]


class BlockTier(ByteTier, Protocol):
    """A tier whose blocks outlive the daemon."""

    def assign_extent(self, extent: int, slot_units: int) -> None:
        """From now on `extent` holds slots of this size, all empty; 0: none. Raises as `write` does."""

    def write_records(self, records: Sequence[BlockRecord]) -> None:
        """Remember blocks whose bytes are written. On return they count as stored. Raises as `write` does."""

    def delete_records(self, units: NDArray[np.uint32], quarantine: bool) -> None:
        """Forget what lies in these slots; with `quarantine` remember that they are not to be used. Raises as `write` does."""
