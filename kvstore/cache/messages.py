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

from kvstore.cache.decisions import (
    AssignExtent as AssignExtent,
)
from kvstore.cache.decisions import (
    ClearFinished as ClearFinished,
)
from kvstore.cache.decisions import (
    Corrupted as Corrupted,
)
from kvstore.cache.decisions import (
    Decision as Decision,
)
from kvstore.cache.decisions import (
    FoundBy as FoundBy,
)
from kvstore.cache.decisions import (
    Granted as Granted,
)
from kvstore.cache.decisions import (
    Mark as Mark,
)
from kvstore.cache.decisions import (
    Notice as Notice,
)
from kvstore.cache.decisions import (
    NoticeKind as NoticeKind,
)
from kvstore.cache.decisions import (
    SessionEnded as SessionEnded,
)
from kvstore.cache.decisions import (
    StartDelete as StartDelete,
)
from kvstore.cache.decisions import (
    StartRead as StartRead,
)
from kvstore.cache.decisions import (
    StartVerify as StartVerify,
)
from kvstore.cache.decisions import (
    StartWrite as StartWrite,
)
from kvstore.cache.vocabulary import (
    ALL_BLOCKS as ALL_BLOCKS,
)
from kvstore.cache.vocabulary import (
    HASH_BYTES as HASH_BYTES,
)
from kvstore.cache.vocabulary import (
    MAX_BLOCKS_PER_BATCH as MAX_BLOCKS_PER_BATCH,
)
from kvstore.cache.vocabulary import (
    MAX_LEASE_BLOCKS as MAX_LEASE_BLOCKS,
)
from kvstore.cache.vocabulary import (
    MAX_SESSION_GROUPS as MAX_SESSION_GROUPS,
)
from kvstore.cache.vocabulary import (
    MAX_SESSION_LEASES as MAX_SESSION_LEASES,
)
from kvstore.cache.vocabulary import (
    MAX_SLOT_HOLDS as MAX_SLOT_HOLDS,
)
from kvstore.cache.vocabulary import (
    UNIT_BYTES as UNIT_BYTES,
)
from kvstore.cache.vocabulary import (
    EndReason as EndReason,
)
from kvstore.cache.vocabulary import (
    Hashes as Hashes,
)
from kvstore.cache.vocabulary import (
    Keep as Keep,
)
from kvstore.cache.vocabulary import (
    KeepKind as KeepKind,
)
from kvstore.cache.vocabulary import (
    Priority as Priority,
)
from kvstore.cache.vocabulary import (
    Tier as Tier,
)
from kvstore.cache.vocabulary import (
    Tokens as Tokens,
)
from kvstore.cache.vocabulary import (
    Units as Units,
)
from kvstore.cache.vocabulary import (
    pack_hashes as pack_hashes,
)
from kvstore.cache.vocabulary import (
    unpack_hashes as unpack_hashes,
)

# ---------------------------------------------------------------- inputs


@dataclass(frozen=True)
class NamespaceSpec:
    """A namespace to open. Opening the same digest twice answers the same id."""

    tenant: str
    digest: bytes
    slot_units: int
    block_bytes: int
    keep: Keep = ALL_BLOCKS
    block_tokens: int = 0  # for policies that weigh the work a block saves; 0: not known
    tails: bool = False  # keep token ids, so that the first tokens of a block can be found; once opened so, it stays


@dataclass(frozen=True)
class Attach:
    """A session begins. `resume` names an ended session of this epoch whose holds it regains."""

    session: int
    tenant: str
    guarantee_bytes: int = 0
    limit_bytes: int = 0  # 0: no limit
    resume: int = 0  # 0: none
    own: bool = False  # the daemon's own session, which is never silent


@dataclass(frozen=True)
class Prompt:
    """All token ids of a prompt, and the hash before its first block: what is needed to find a partial tail."""

    root: bytes
    tokens: Tokens


@dataclass(frozen=True)
class Acquire:
    """Lease the leading blocks of `hashes` in `namespace`, or for all members of `group` (then `namespace` is 0).

    With `prompt`, and in a namespace with tails, one more block may follow them: one that begins as the prompt goes on.
    """

    session: int
    lease: int
    hashes: Hashes
    deadline_at: float
    namespace: int = 0
    group: str = ""
    prompt: Prompt | None = None


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
    `checksums` [n, 2] uint64 (xxh3-128, low word first) where the client has them. `tokens` [n × block_tokens]: in a namespace with
    tails the blocks' token ids, which must hash to their names.
    """

    session: int
    lease: int
    namespace: int
    units: Units
    generations: Units
    hashes: Hashes
    parents: Hashes
    checksums: NDArray[np.uint64] | None = None
    tokens: Tokens | None = None


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
    """The mover's report on one transfer. `checksum` (low, high) of the bytes moved or looked at, where it was computed."""

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
    BAD_SLOT = 7  # not a slot that this session has reserved, an older generation of it, or of another size than the namespace's
    BAD_KEY = 8  # the slot was reserved for another hash, or the batch names this hash twice


@dataclass(frozen=True)
class Looked:
    """`blocks` leading blocks are here; per member, `tiers` [blocks] says the fastest tier of each (255: not needed)."""

    blocks: int
    tiers: tuple[NDArray[np.uint8], ...]


@dataclass(frozen=True)
class Acquired:
    """`expected` leading blocks are on their way; `Granted` decisions follow, the first perhaps at once.

    With `tail_tokens` the last of them is no block of the prompt: only its first so many tokens are the prompt's.
    """

    lease: int
    expected: int
    reason: EndReason
    tail_tokens: int = 0


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


# ---------------------------------------------------------------- what was found at start


@dataclass(frozen=True)
class Recovered:
    """Blocks found on disk at start, oldest first, as parallel arrays; one namespace id each."""

    namespaces: NDArray[np.int32]
    hashes: Hashes
    parents: Hashes
    units: Units
    generations: Units
    checksums: NDArray[np.uint64]
    suspect: bool  # the last stop was not clean: a mismatch is then torn, not rotten
    quarantined_units: Units = field(default_factory=lambda: np.zeros(0, np.uint32))
    extent_slot_units: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))  # as the directory has them
