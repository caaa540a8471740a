"""Every input of the cache core and every decision it takes, as frozen values. Read this file first.

Units: `units` are 4 KiB units from a tier's start; `*_bytes` are bytes; `*_at` are seconds on the caller's monotonic clock.
Hashes travel as arrays of shape [n, 4] uint64 (the 32 bytes of each, little-endian words); see `pack_hashes`.
A slot is named by (units, generation): the generation rises each time the slot changes hands.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
Units = NDArray[np.uint32]

UNIT_BYTES = 4096  # a slot's alignment: one page, and O_DIRECT's strictest common block size
HASH_BYTES = 32  # SHA-256
MAX_BLOCKS_PER_BATCH = 8192  # 256 KiB of hashes: a 131,072-token prompt in blocks of 16


def unpack_hashes(packed: bytes) -> Hashes:
    """[n, 4] words of `packed`, 32 bytes a hash, without copying."""
    return np.frombuffer(packed, dtype="<u8").reshape(-1, 4)


def pack_hashes(hashes: Hashes) -> bytes:
    """The 32 * n bytes of [n, 4] words."""
    return np.ascontiguousarray(hashes, dtype="<u8").tobytes()


class Tier(IntEnum):
    """Where blocks live, fastest first."""

    HBM = 0
    DRAM = 1
    NVME = 2
    REMOTE = 3


class KeepKind(StrEnum):
    """What a member of a group keeps of a sequence: every block, a trailing window, or the state at a boundary."""

    ALL = "all"
    WINDOW = "window"
    STATE = "state"


@dataclass(frozen=True)
class Keep:
    kind: KeepKind = KeepKind.ALL
    window_blocks: int = 0  # blocks that cover the window's tokens; only with WINDOW

    def first_needed(self, blocks: int) -> int:
        """Index of the first block that a prefix of `blocks` blocks needs."""
        if self.kind is KeepKind.ALL:
            return 0
        if self.kind is KeepKind.STATE:
            return max(0, blocks - 1)
        return max(0, blocks - self.window_blocks)


class Priority(IntEnum):
    """Order of transfers: somebody waits; write-through; a guess."""

    DEMAND = 0
    WRITE = 1
    PREFETCH = 2


# ---------------------------------------------------------------- inputs


@dataclass(frozen=True)
class NamespaceSpec:
    """A namespace to open. Opening the same digest twice answers the same id."""

    tenant: str
    digest: bytes
    slot_units: int
    block_bytes: int
    keep: Keep = Keep()


@dataclass(frozen=True)
class Attach:
    """A session begins. `resume` names an ended session of this epoch whose holds it regains."""

    session: int
    tenant: str
    guarantee_bytes: int = 0
    limit_bytes: int = 0  # 0: no limit
    resume: int = 0  # 0: none


@dataclass(frozen=True)
class Acquire:
    """Lease the leading blocks of `hashes` in `namespace`, or for all members of `group` (then `namespace` is 0)."""

    session: int
    lease: int
    hashes: Hashes
    deadline_at: float
    namespace: int = 0
    group: str = ""


@dataclass(frozen=True)
class Claim:
    """A member session takes the slots of its own namespace under a lease that its group holds."""

    session: int
    lease: int
    group: str
    namespace: int


@dataclass(frozen=True)
class Reserve:
    """Slots to fill: one for each of `hashes`, or `count` anonymous ones."""

    session: int
    reservation: int
    namespace: int
    count: int = 0
    hashes: Hashes | None = None


@dataclass(frozen=True)
class Commit:
    """Make filled slots visible and hold them under `lease` (made if it is new).

    `parents` [n, 4], or [1, 4]: the first block's parent, each further block's being the one before it.
    `checksums` [n, 2] uint64 (xxh3-128, low word first) where the client has them.
    """

    session: int
    lease: int
    namespace: int
    units: Units
    generations: Units
    hashes: Hashes
    parents: Hashes
    checksums: NDArray[np.uint64] | None = None


@dataclass(frozen=True)
class Abandon:
    """Give reserved slots back: all that is left of `reservation`, or just the slots named."""

    session: int
    reservation: int
    units: Units | None = None
    generations: Units | None = None


@dataclass(frozen=True)
class Release:
    """End a lease, or with `keep_blocks` all of it but its first blocks. Unknown leases are no error."""

    session: int
    lease: int
    keep_blocks: int = 0


@dataclass(frozen=True)
class TransferDone:
    """The mover's report on one transfer. `checksum` (low, high) of the bytes moved, where it was computed."""

    transfer: int
    result: TransferResult
    checksum: tuple[int, int] | None = None


class TransferResult(StrEnum):
    OK = "ok"
    FAILED = "failed"  # the medium refused; nothing can be said of the bytes
    CORRUPT = "corrupt"  # the medium answered, with other bytes than were written
    NO_SPACE = "no_space"


# ---------------------------------------------------------------- outcomes: what an operation answers at once


class BlockOutcome(IntEnum):
    """What became of one block in a Reserve or Commit."""

    NONE = 0  # not reached: an earlier block of the batch ended it
    SLOT = 1  # Reserve: a slot to fill
    STORED = 2  # Commit: visible from now on
    EXISTS = 3  # somebody committed it first; a Commit's slot stays private
    IN_FLIGHT = 4  # another session has reserved this key and not yet committed it
    NO_ROOM = 5  # everything that could be evicted is held; retry later
    LIMIT = 6  # the session's own limit, or another's guarantee, forbids it
    BAD_SLOT = 7  # not a slot that this session has reserved, or an older generation of it
    BAD_KEY = 8  # the slot was reserved for another hash, or the batch names this hash twice


class EndReason(StrEnum):
    """Why a prefix ended where it did."""

    COMPLETE = "complete"  # every block asked for is granted
    MISSING = "missing"
    IN_FLIGHT = "in_flight"
    NO_ROOM = "no_room"
    LIMIT = "limit"
    FAILED = "failed"  # a block below could not be read, or its bytes were wrong
    DEADLINE = "deadline"
    RELEASED = "released"


@dataclass(frozen=True)
class Looked:
    """`blocks` leading blocks are here; per member, `tiers` [blocks] says the fastest tier of each (255: not needed)."""

    blocks: int
    tiers: tuple[NDArray[np.uint8], ...]


@dataclass(frozen=True)
class Acquired:
    """`expected` leading blocks are on their way; `Granted` decisions follow, the first perhaps at once."""

    lease: int
    expected: int
    reason: EndReason


@dataclass(frozen=True)
class Claimed:
    """The slots of one member under a group's lease; 0 generations mark holes."""

    lease: int
    units: Units
    generations: Units


@dataclass(frozen=True)
class Reserved:
    """Per block: outcome, and where it is SLOT the slot (else 0, 0). For anonymous ones only the slots got."""

    reservation: int
    outcomes: NDArray[np.uint8]
    units: Units
    generations: Units


@dataclass(frozen=True)
class Committed:
    """Per block: outcome; for EXISTS the shared slot, now under the lease, where one is in DRAM (else 0, 0)."""

    lease: int
    outcomes: NDArray[np.uint8]
    units: Units
    generations: Units


@dataclass(frozen=True)
class Refused:
    """The operation did nothing. `code` is a gRPC status name, `text` says what to do."""

    code: str
    text: str


@dataclass(frozen=True)
class Done:
    """The operation did what it says, `count` times."""

    count: int = 0


Outcome = Acquired | Claimed | Reserved | Committed | Refused | Done


# ---------------------------------------------------------------- decisions: what the edge must now do


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
    """For watchers. `parents` only with STORED; a CLEARED notice has no hashes."""

    kind: NoticeKind
    namespace: int
    tier: Tier | None
    hashes: bytes = b""
    parents: bytes = b""


@dataclass(frozen=True)
class Corrupted:
    """A medium returned wrong bytes; the block is gone from every tier. For the log and the counter."""

    namespace: int
    hash: bytes
    tier: Tier
    units: int
    story: str = ""


@dataclass(frozen=True)
class ClearFinished:
    """Everything a Clear removed is now also gone from disk."""

    clear: int


Decision = Granted | StartRead | StartWrite | StartDelete | AssignExtent | Mark | SessionEnded | Notice | Corrupted | ClearFinished


@dataclass(frozen=True)
class Recovered:
    """Blocks found on disk at start, as parallel arrays; one namespace id each."""

    namespaces: NDArray[np.int32]
    hashes: Hashes
    parents: Hashes
    units: Units
    generations: Units
    checksums: NDArray[np.uint64]
    suspect: bool  # the last stop was not clean: a mismatch is then torn, not rotten
    quarantined_units: Units = field(default_factory=lambda: np.zeros(0, np.uint32))
