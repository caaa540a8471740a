"""What a client hands out: namespaces, what a lookup found, leases to read, and reservations to fill.

Owned by the caller's thread or task; only `Attached` is shared, under its own lock.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore import errors
from kvstore.clients.arena import Arena, Bytes, SessionLock, populate
from kvstore.clients.session import Session
from kvstore.geometry import Geometry
from kvstore.hashing import HASH_BYTES, Identity, fingerprint
from kvstore.proto import kvstore_pb2 as pb

TIER_NAMES = {0: "hbm", 1: "dram", 2: "nvme", 3: "remote", 255: ""}  # as on the wire; 255: this member does not need the block
# Outcomes of a block, as on the wire.
NONE, SLOT, STORED, EXISTS = 0, 1, 2, 3
OUTCOME_NAMES = ("none", "slot", "stored", "exists", "in_flight", "no_room", "limit", "bad_slot", "bad_key")


@dataclass
class Namespace:
    """A namespace as this client opened it. Reopened by itself when the daemon restarts: `id` belongs to `epoch`."""

    identity: Identity
    geometry: Geometry
    request: pb.OpenNamespaceRequest
    epoch: str = ""
    id: int = 0
    digest: bytes = b""

    @property
    def root(self) -> bytes:
        """The parent of the first block of every sequence under this identity."""
        return fingerprint(self.identity)


@dataclass(frozen=True)
class Watched:
    """One event of `watch`: a piece of the snapshot, its end, or a notice.

    `kind` snapshot, snapshot_end, stored, removed, cleared; `digest` names the namespace; `hashes` and `parents` are packed.
    """

    epoch: str
    sequence: int
    kind: str
    digest: bytes
    tier: str
    hashes: bytes
    parents: bytes

    @classmethod
    def of(cls, event: pb.WatchEvent) -> Watched:
        """From the wire."""
        return cls(event.epoch, event.sequence, event.kind, event.digest, event.tier, event.hashes, event.parents)


@dataclass(frozen=True)
class LookupResult:
    """`blocks` leading blocks are here; `tiers` names the fastest tier of each."""

    blocks: int
    tiers: tuple[str, ...]


class Attached:
    """One session of this process, with its map of the arena, and how many holds of it are in somebody's hands.

    The lock outlives the session while such holds remain: until it goes, the daemon leaves their slots alone.
    """

    def __init__(self, session: Session, arena: Arena, lock: SessionLock) -> None:
        self.session = session
        self.arena = arena
        self.error: errors.KVStoreError | None = None
        self._lock = lock
        self._holds = 0
        self._guard = threading.Lock()

    def hold(self, count: int = 1) -> None:
        """Leases or slots are handed out."""
        with self._guard:
            self._holds += count

    def drop(self, count: int = 1) -> None:
        """Holds were given back; the last one of a session that is over lets the lock go."""
        with self._guard:
            self._holds -= count
            self._release_if_done()

    def over(self, error: errors.KVStoreError) -> None:
        """The session has ended; using its holds raises from now on."""
        with self._guard:
            self.error = error
            self._release_if_done()

    @property
    def held(self) -> bool:
        """Something of this session is in somebody's hands."""
        return self._holds > 0

    def check(self) -> None:
        """Raise SessionEnded or StaleEpoch where this session's holds are no longer good."""
        if self.error is not None:
            raise self.error

    def _release_if_done(self) -> None:
        if self.error is not None and self._holds <= 0:
            self._lock.release()


class Lease:
    """The right to read the leading blocks of a sequence. Made by `get`; ends with its `with` block."""

    def __init__(self, views: Sequence[Bytes], attached: Attached | None = None, lease: int = 0) -> None:
        self._views = tuple(views)
        self._closed = False
        self.attached = attached  # None: the bytes came over gRPC and are the caller's own copies
        self.lease = lease

    @property
    def blocks(self) -> int:
        """How many leading blocks are held."""
        return len(self._views)

    @property
    def views(self) -> tuple[Bytes, ...]:
        """One read-only array of bytes a block, in place. Valid inside the `with` block only.

        Of no bytes where the namespace does not keep the block: it lies before the window, or is not the last state.
        Raises SessionEnded where the lease is over, StaleEpoch where the daemon was restarted.
        """
        self.check()
        return self._views

    def copy_into(self, targets: Sequence[memoryview | bytearray | Bytes]) -> int:
        """Copy the leading blocks into `targets`, one writable buffer of a block's size each. Returns how many were copied.

        Targets of blocks that the namespace does not keep are left as they are, and count.
        """
        views = self.views
        count = min(len(views), len(targets))
        for view, target in zip(views, targets, strict=False):
            if not len(view):
                continue
            into = np.frombuffer(target, np.uint8)
            if len(into) != len(view):
                raise errors.InvalidArgument(f"a target has {len(into)} bytes, a block {len(view)}; give one of the same size")
            if not into.flags.writeable:
                raise errors.InvalidArgument("a target is read-only; give a bytearray, a writable memoryview or array")
            if self.attached is not None:
                populate(view, write=False)
            np.copyto(into, view)
        self.check()
        return count

    def check(self) -> None:
        """Raise SessionEnded or StaleEpoch where the lease is no longer good."""
        if self._closed:
            raise errors.SessionEnded("the lease was given back; use its views inside the with block")
        if self.attached is not None:
            self.attached.check()

    def close(self) -> bool:
        """Mark it given back; True the first time."""
        first, self._closed, self._views = not self._closed, True, ()
        return first


@dataclass
class PutBlock:
    """One block to fill: its place in the sequence, its hash, and where its bytes go."""

    index: int
    hash: bytes
    view: Bytes
    filled: bool = False

    def write(self, source: bytes | memoryview | Bytes) -> None:
        """Copy the whole block from `source` and mark it done."""
        data = np.frombuffer(source, np.uint8)
        if len(data) != len(self.view):
            raise errors.InvalidArgument(f"{len(data)} bytes for a block of {len(self.view)}; give the whole block")
        np.copyto(self.view, data)
        self.done()

    def done(self) -> None:
        """The bytes are complete: commit this block when the `with` block ends."""
        self.filled = True


@dataclass
class Put:
    """The blocks of a sequence that are not stored yet, to be filled. Made by `put`; committed when its `with` block ends.

    `blocks` are those to write, in order; blocks that are stored already, or that another session is writing, are not among them.
    `outcomes`, one name a block of the sequence, are final after the `with` block.
    """

    hashes: bytes
    parents: bytes
    outcomes: NDArray[np.uint8]
    blocks: list[PutBlock]
    attached: Attached | None = None  # None: the bytes go over gRPC
    reservation: int = 0
    slots: dict[int, tuple[int, int]] = field(default_factory=dict)  # by index: units, generation

    @property
    def names(self) -> tuple[str, ...]:
        """The outcome of each block by its name."""
        return tuple(OUTCOME_NAMES[outcome] for outcome in self.outcomes)

    @property
    def stored(self) -> int:
        """Leading blocks that are in the store now, whoever wrote them."""
        present = (self.outcomes == STORED) | (self.outcomes == EXISTS)
        return int(len(present) if present.all() else np.argmin(present))

    def committable(self) -> list[PutBlock]:
        """The filled blocks before the first unfilled one: what follows a hole could never be found."""
        ready: list[PutBlock] = []
        for block in self.blocks:
            if not block.filled:
                break
            ready.append(block)
        return ready

    def seal(self) -> None:
        """Nothing may be written any more."""
        for block in self.blocks:
            block.view.flags.writeable = False

    def parent_of(self, index: int) -> bytes:
        """The hash before block `index`."""
        return self.parents[HASH_BYTES * index : HASH_BYTES * (index + 1)]
