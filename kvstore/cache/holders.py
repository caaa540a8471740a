"""Who holds slots: leases, sessions, groups, transfers. Plain records; what happens to them is in the modules of their names."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from kvstore.cache.vocabulary import EndReason, Hashes, Priority, Tier

HOLE = -1  # not a count: in a lease, a position for which this member has, or needs, no slot


@dataclass
class Lease:
    """The right to read a run of blocks. `slots[m][i]` is member m's slot at position i; 0 while on its way, HOLE where none is needed."""

    id: int
    session: int
    group: str
    namespaces: tuple[int, ...]
    slots: list[array[int]]
    generations: list[array[int]]
    whole: bool = False  # a member keeps a window: nothing is granted before the length is settled
    granted: int = 0  # leading positions that the client knows of
    pending: int = 0  # loads that have not ended
    cut_at: int = 1 << 30  # a whole lease: the first position whose load failed
    deadline_at: float = 0.0
    reason: EndReason = EndReason.COMPLETE  # why there will be no more
    ended: bool = True  # no more grants will come
    closed: bool = False  # released
    hashes: Hashes | None = None  # a whole lease: what was asked, until it has ended

    def __len__(self) -> int:
        """Positions granted, or still expected to be."""
        return len(self.slots[0])


@dataclass
class Session:
    id: int
    tenant: str
    guarantee_bytes: int
    limit_bytes: int
    counts: np.ndarray[tuple[int], np.dtype[np.uint16]]  # holds of this session on each dram slot
    heard_at: float
    held_bytes: int = 0
    leases: dict[int, Lease] = field(default_factory=dict)
    reserved: dict[int, int] = field(default_factory=dict)  # slot -> reservation
    ended: bool = False


@dataclass
class Group:
    name: str
    tenant: str
    namespaces: tuple[int, ...]
    sessions: set[int] = field(default_factory=set)
    leases: dict[int, Lease] = field(default_factory=dict)


class TransferKind(StrEnum):
    READ = "read"  # nvme to dram
    WRITE = "write"  # dram to nvme
    DELETE = "delete"  # records on nvme
    VERIFY = "verify"  # of a block in dram, which it keeps there meanwhile
    SCRUB = "scrub"  # of a block in any tier; it holds nothing, and counts only if the slot has not changed hands meanwhile


@dataclass
class Transfer:
    """Byte work on one block (or the deletion of records): a copy between two tiers, or a look at it in one.

    `row` becomes 0 when the block is removed meanwhile; not that of a SCRUB.
    """

    id: int
    kind: TransferKind
    row: int
    source: int = 0
    target: int = 0
    priority: Priority = Priority.WRITE
    deadline_at: float = 0.0  # of a READ: until when somebody waits
    waiters: list[tuple[Lease, int, int]] = field(default_factory=list)  # (lease, member, position)
    deleting: tuple[int, ...] = ()
    quarantine: bool = False
    tier: Tier = Tier.DRAM  # of a VERIFY or SCRUB
    generation: int = 0  # of the slot that a SCRUB looks at
