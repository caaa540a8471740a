"""The steps of `get`: a lease on blocks in place, or copies of them where the arena cannot be mapped."""

from __future__ import annotations

import numpy as np

from kvstore import errors
from kvstore.clients import requests
from kvstore.clients.handles import Attached, Namespace
from kvstore.clients.lease import Lease, Views
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
    of_namespace,
    packed_checksum,
    persistent,
    same_epoch,
)
from kvstore.hashing import HASH_BYTES
from kvstore.proto import kvstore_pb2 as pb


def get(namespace: Namespace, hashes: bytes, timeout_s: float) -> Steps[Lease]:
    """Lease the leading blocks in place, or bring copies where the arena cannot be mapped. A prompt shorter than a block has none."""
    if not hashes:
        return Lease([])

    def attempt() -> Steps[Lease]:
        attached: Attached | None = yield Attach()
        if attached is None:
            return (yield from _get_copies(namespace, hashes, timeout_s))
        yield from same_epoch(namespace, attached)
        return (yield from _get_in_place(attached, namespace, hashes, timeout_s))

    return (yield from persistent(attempt))


def _get_in_place(attached: Attached, namespace: Namespace, hashes: bytes, timeout_s: float) -> Steps[Lease]:
    lease = attached.session.new_id()
    attached.hold()
    try:
        granting: Granting = yield Take(attached, requests.acquire(lease, namespace.id, hashes, timeout_s), timeout_s + GRACE_S)
        if granting.error is not None:
            raise granting.error
        units, generations = granting.units[0], granting.generations[0]
        if not granting.settled:
            yield Tell(attached, [requests.release(lease, keep_blocks=len(units))])
        return Lease(Views(attached.arena, units, generations, namespace.geometry.block_bytes), attached, lease)
    except BaseException:
        yield from let_go(attached, [requests.release(lease)])
        raise


def close_lease(lease: Lease) -> Steps[None]:
    """Give a lease back; nothing is awaited, and a session that is over needs nothing."""
    attached = lease.attached
    if lease.close() and attached is not None:
        yield from let_go(attached, [requests.release(lease.lease)])


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
