"""What a client hands out: namespaces, what a lookup found, what a watch tells; and the session that leases and slots hang on.

Owned by the caller's thread or task; only `Attached` is shared, under its own lock.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from kvstore import errors
from kvstore.clients.arena import Arena, SessionLock
from kvstore.clients.hbm import ImportedPool
from kvstore.clients.session import Session
from kvstore.errors import StaleEpoch
from kvstore.geometry import Geometry
from kvstore.hashing import Identity, fingerprint
from kvstore.proto import kvstore_pb2 as pb

TIER_NAMES = {0: "hbm", 1: "dram", 2: "nvme", 3: "remote", 255: ""}  # as on the wire; 255: this member does not need the block
# Outcomes of a block, as on the wire.
NONE, SLOT, STORED, EXISTS = 0, 1, 2, 3
OUTCOME_NAMES = ("none", "slot", "stored", "exists", "in_flight", "no_room", "limit", "bad_slot", "bad_key")


@dataclass
class Namespace:
    """A namespace as this client opened it. Reopened by itself when the daemon restarts, perhaps while another thread uses it.

    opened    (epoch, id): the id belongs to that epoch alone, so both are replaced at once; ("", 0) where it has to be opened
    """

    identity: Identity
    geometry: Geometry
    request: pb.OpenNamespaceRequest
    opened: tuple[str, int] = ("", 0)
    digest: bytes = b""

    @property
    def epoch(self) -> str:
        """The daemon's, when it was opened last."""
        return self.opened[0]

    @property
    def id(self) -> int:
        """Its number in that epoch."""
        return self.opened[1]

    def id_in(self, epoch: str) -> int:
        """Its number in an epoch. Raises StaleEpoch where it was opened in another one last."""
        opened, number = self.opened
        if opened != epoch:
            raise StaleEpoch("the daemon was restarted between two calls; try again")
        return number

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
    """`blocks` leading blocks are here; `codes` has one byte each, the fastest tier that has it."""

    blocks: int
    codes: bytes

    @property
    def tiers(self) -> tuple[str, ...]:
        """The name of each block's fastest tier; "" where the namespace does not need the block."""
        return tuple(TIER_NAMES.get(code, str(code)) for code in self.codes)


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
        self._holders: set[object] = set()
        self._imported: list[ImportedPool] = []
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

    def hold_for(self, holder: object) -> None:
        """As `hold`, for one who may be interrupted within, and then gives back whether it was taken or not."""
        with self._guard:
            self._holders.add(holder)

    def drop_for(self, holder: object) -> None:
        """What it holds, if it does."""
        with self._guard:
            self._holders.discard(holder)
            self._release_if_done()

    def imports(self, pool: ImportedPool) -> None:
        """A pool was mapped under this session: it is told when the session is over, since its memory may go with the daemon."""
        with self._guard:
            self._imported.append(pool)
            over = self.error is not None
        if over:
            pool.owner_ended()

    def over(self, error: errors.KVStoreError) -> None:
        """The session has ended; using its holds raises from now on."""
        with self._guard:
            self.error = error
            self._release_if_done()
            imported, self._imported = self._imported, []
        for pool in imported:
            pool.owner_ended()

    @property
    def held(self) -> bool:
        """Something of this session is in somebody's hands."""
        return self._holds > 0 or bool(self._holders)

    def check(self) -> None:
        """Raise SessionEnded or StaleEpoch where this session's holds are no longer good."""
        if self.error is not None:
            raise self.error

    def _release_if_done(self) -> None:
        if self.error is not None and not self.held:
            self._lock.release()
