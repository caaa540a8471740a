"""The small types that inputs, outcomes and decisions are made of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
Units = NDArray[np.uint32]
Tokens = NDArray[np.uint32]

UNIT_BYTES = 4096  # a slot's alignment: one page, and O_DIRECT's strictest common block size
HASH_BYTES = 32  # SHA-256
MAX_BLOCKS_PER_BATCH = 8192  # 256 KiB of hashes: a 131,072-token prompt in blocks of 16
MAX_LEASE_BLOCKS = 131_072  # blocks under one lease: two million tokens in blocks of 16
MAX_SESSION_LEASES = 16_384  # leases of one session: a few for each of a thousand sequences, and some MB of the daemon's memory
MAX_SESSION_GROUPS = 16  # groups that one session is a member of: an engine needs one, or two
MAX_SLOT_HOLDS = 65_535  # holds of one session on one slot: what its 16 bits count


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


ALL_BLOCKS = Keep()


class Priority(IntEnum):
    """Order of transfers: somebody waits; write-through; a guess."""

    DEMAND = 0
    WRITE = 1
    PREFETCH = 2


class EndReason(StrEnum):
    """Why a prefix ended where it did."""

    COMPLETE = "complete"  # every block asked for is granted
    MISSING = "missing"
    IN_FLIGHT = "in_flight"
    NO_ROOM = "no_room"
    LIMIT = "limit"
    FAILED = "failed"  # a block could not be read, or its bytes were wrong
    DEADLINE = "deadline"
    RELEASED = "released"
