"""What the cache core decides and the edge must now do, as frozen values; `messages` has what goes in and what is answered at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from kvstore.cache.vocabulary import EndReason, Hashes, Priority, Tier, Units, pack_hashes

Pieces = bytes | Sequence[bytes | Hashes]  # hashes, packed or yet to be


@dataclass(frozen=True)
class Granted:
    """Blocks [first, first + n) of a lease are readable until released. With `ended`, no more will come.

    `units`, `generations` [members, n]; holes (a member that keeps only a window) have generation 0.
    """

    session: int
    lease: int
    first: int
    units: Units
    generations: Units
    ended: EndReason | None


@dataclass(frozen=True)
class StartRead:
    """Copy one block up, nvme to dram, and verify it against `checksum`."""

    transfer: int
    priority: Priority
    namespace: int
    hash: bytes
    source_units: int
    target_units: int
    checksum: tuple[int, int]
    deadline_at: float


@dataclass(frozen=True)
class StartWrite:
    """Copy one block down, dram to nvme: data, then its record. `checksum` None: compute it on the way."""

    transfer: int
    namespace: int
    hash: bytes
    parent: bytes
    source_units: int
    target_units: int
    generation: int
    checksum: tuple[int, int] | None


@dataclass(frozen=True)
class StartVerify:
    """Take the checksum of a block where it lies, and compare it with `checksum`; None: there is none to compare with yet."""

    transfer: int
    namespace: int
    hash: bytes
    tier: Tier
    units: int
    checksum: tuple[int, int] | None


@dataclass(frozen=True)
class StartDelete:
    """Overwrite the records of these nvme slots; they are reusable when that is done."""

    transfer: int
    units: Units
    quarantine: bool = False


@dataclass(frozen=True)
class AssignExtent:
    """An extent now holds slots of this size; 0: none. To be on disk before any record in it."""

    tier: Tier
    extent: int
    slot_units: int


@dataclass(frozen=True)
class Mark:
    """Slots (by their first unit) that a session's process may touch from now on, or no more."""

    session: int
    granted: Units
    withdrawn: Units


@dataclass(frozen=True)
class SessionEnded:
    """A session is over; its holds are orphans until its process is known to be gone (`orphans` False: none)."""

    session: int
    reason: str
    orphans: bool


class NoticeKind(StrEnum):
    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"


@dataclass(frozen=True)
class Notice:
    """For watchers. `parents` only with STORED; a CLEARED notice has no hashes. Mostly nobody watches: they are packed when asked for."""

    kind: NoticeKind
    namespace: int
    tier: Tier | None
    named: Pieces = b""
    below: Pieces = b""

    @cached_property
    def hashes(self) -> bytes:
        """Of its blocks, packed."""
        return _joined(self.named)

    @cached_property
    def parents(self) -> bytes:
        """The hashes before them, packed."""
        return _joined(self.below)


def _joined(pieces: Pieces) -> bytes:
    if isinstance(pieces, bytes):
        return pieces
    return b"".join(piece if isinstance(piece, bytes) else pack_hashes(piece) for piece in pieces)


class FoundBy(StrEnum):
    """Where wrong bytes were noticed."""

    PROMOTION = "promotion"
    DEMOTION = "demotion"
    READ = "read"  # on a hit in dram, or when its checksum was taken
    SCRUB = "scrub"  # by the background check


@dataclass(frozen=True)
class Corrupted:
    """A block's bytes were not what its checksum says; it is gone from every tier. For the log and the counter.

    `quarantine`: the medium is to blame, and the slot is not used again. If not: a crash may have cut a write short, or a client gave a
    wrong checksum.
    """

    namespace: int
    hash: bytes
    tier: Tier
    units: int
    found_by: FoundBy
    quarantine: bool
    story: str = ""


@dataclass(frozen=True)
class ClearFinished:
    """Everything a Clear removed is now also gone from disk."""

    clear: int


Start = StartRead | StartWrite | StartVerify | StartDelete
Decision = Granted | Start | AssignExtent | Mark | SessionEnded | Notice | Corrupted | ClearFinished
