"""The steps of `get`: a lease on blocks in place, in GPU memory and the arena, or copies of them where the arena cannot be mapped."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore import errors
from kvstore.clients import requests
from kvstore.clients.handles import Attached, Namespace
from kvstore.clients.hbm import DeviceBytes
from kvstore.clients.hold import Hold
from kvstore.clients.lease import Lease, Views
from kvstore.clients.pools import Pool, number_of
from kvstore.clients.requests import Words
from kvstore.clients.session import Granting
from kvstore.clients.steps import (
    GRACE_S,
    Attach,
    Command,
    Receive,
    Steps,
    Take,
    Tell,
    let_go,
    no_pools,
    of_namespace,
    packed_checksum,
    persistent,
    pool_mapped,
    same_epoch,
)
from kvstore.hashing import HASH_BYTES
from kvstore.proto import kvstore_pb2 as pb

_NONE = np.zeros(0, np.uint32)


def get(namespace: Namespace, hashes: bytes, timeout_s: float, gpu: int | None, begun: list[Lease]) -> Steps[Lease]:
    """Lease the leading blocks in place, or bring copies where the arena cannot be mapped. A prompt shorter than a block has none.

    gpu     whose pool comes first, by its number in this process
    begun   gets the lease too, before anything can be interrupted: the caller closes what is in it, whatever was raised
    """
    requests.checked_timeout(timeout_s)

    def attempt() -> Steps[Lease]:
        attached: Attached | None = yield Attach()
        if attached is not None:
            return (yield from _get_in_place(attached, namespace, hashes, timeout_s, gpu, begun))
        if gpu is not None:
            raise no_pools()
        return (yield from _get_copies(namespace, hashes, timeout_s))

    lease = (yield from persistent(attempt)) if hashes or gpu is not None else Lease([])
    if not begun:
        begun.append(lease)
    return lease


def _get_in_place(
    attached: Attached, namespace: Namespace, hashes: bytes, timeout_s: float, gpu: int | None, begun: list[Lease]
) -> Steps[Lease]:
    """What the GPU's pool has of the leading blocks, if one is given, and what memory has of those that follow."""
    size_bytes = namespace.geometry.block_bytes
    pool = None if gpu is None else (yield from pool_mapped(attached, gpu))
    hold, leases = Hold(attached, pool), list[pb.Op]()
    try:
        hold.take()
        above: Sequence[DeviceBytes] = ()
        units = generations = _NONE
        if hashes:
            yield from same_epoch(namespace, attached)
        if pool is not None and hashes:
            above = pool.views(*(yield from _taken(attached, namespace, hashes, timeout_s, leases, pool.pool)), size_bytes)
            hashes = hashes[HASH_BYTES * len(above) :]
        if hashes:
            units, generations = yield from _taken(attached, namespace, hashes, timeout_s, leases, None)
        lease = Lease(Views(attached.arena, units, generations, size_bytes), hold, leases, above)
        begun.append(lease)
        return lease
    except BaseException:
        yield from let_go(hold, leases)
        raise


def _taken(
    attached: Attached, namespace: Namespace, hashes: bytes, timeout_s: float, leases: list[pb.Op], pool: Pool | None
) -> Steps[tuple[Words, Words]]:
    """The slots (units, generations) of the leading blocks, under a lease whose release is added to `leases`."""
    lease, number = attached.session.new_id(), number_of(pool)
    leases.append(requests.release(lease, pool=number))
    asked = requests.acquire(lease, namespace.id_in(attached.session.epoch), hashes, timeout_s, pool=number)
    granting: Granting = yield Take(attached, asked, timeout_s + GRACE_S)
    if granting.error is not None:
        raise granting.error
    if not granting.settled:
        yield Tell(attached, [requests.release(lease, keep_blocks=granting.blocks, pool=number)])
    return granting.units[0], granting.generations[0]


def close_lease(lease: Lease) -> Steps[None]:
    """Give a lease back; nothing is awaited, and a session that is over needs nothing."""
    lease.close()
    if lease.hold is not None:
        yield from let_go(lease.hold, lease.leases)


def _get_copies(namespace: Namespace, hashes: bytes, timeout_s: float) -> Steps[Lease]:
    def make(namespace_id: int, epoch: str) -> Command:
        request = pb.ReadRequest(namespace_id=namespace_id, hashes=hashes, timeout_s=timeout_s, epoch=epoch)
        return Receive("Read", request, timeout_s + GRACE_S + len(hashes) // HASH_BYTES)

    pieces: list[pb.BlockBytes] = yield from of_namespace(namespace, make)
    blocks: list[bytes] = []
    parts: list[bytes] = []
    for piece in pieces:
        parts.append(piece.data)
        if piece.last:
            blocks.append(_verified(namespace, piece, b"".join(parts)))
            parts.clear()
    return Lease([np.frombuffer(block, np.uint8) for block in blocks])


def _verified(namespace: Namespace, last: pb.BlockBytes, data: bytes) -> bytes:
    if not data and not last.checksum:
        return data  # before the window that the namespace keeps
    if len(data) != namespace.geometry.block_bytes or packed_checksum(namespace.digest, last.hash, data) != last.checksum:
        raise errors.Corruption(f"block {last.hash.hex()[:16]} arrived other than it was sent; try again")
    return data
