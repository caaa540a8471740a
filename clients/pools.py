"""Pools of GPU memory as a client asks for them, and as the daemon offers them. `clients.hbm.ImportedPool` maps one."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.proto import kvstore_pb2 as pb

MAX_ID_BITS = 62  # bits of an id of a lease: the daemon refuses larger ones


@dataclass(frozen=True)
class PoolTerms:
    """A GPU whose pool a client wants to map, by its UUID. guarantee_bytes, limit_bytes: of that pool; a limit of 0 is none."""

    uuid: str
    guarantee_bytes: int = 0
    limit_bytes: int = 0

    def message(self) -> pb.PoolTerms:
        """For the wire."""
        return pb.PoolTerms(uuid=self.uuid, guarantee_bytes=self.guarantee_bytes, limit_bytes=self.limit_bytes)


@dataclass(frozen=True)
class Pool:
    """A pool of one run of the daemon: with the next one it is another, of other memory.

    number        what operations name it by;  socket_path  where it is imported from;  size_bytes  how large it is
    """

    epoch: str
    number: int
    uuid: str
    socket_path: str
    size_bytes: int

    @classmethod
    def offered(cls, epoch: str, offer: pb.PoolOffer) -> Pool:
        """From a Welcome."""
        return cls(epoch, offer.pool, offer.uuid, offer.socket_path, offer.bytes)


def number_of(pool: Pool | None) -> int:
    """What an operation names it by: None is the arena in host memory."""
    return 0 if pool is None else pool.number


def lease_name(lease: int, pool: int) -> int:
    """One number for a lease of any pool, since ids are unique in each only. The id itself where it is host memory's."""
    return lease if not pool else pool << MAX_ID_BITS | lease
