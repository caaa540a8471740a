"""Packed operations, many of one kind and about one block each, as a decode step has them: carried out as one where each of them is the
common case, and else one by one. Either way each is answered as if it had come alone.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence

import numpy as np

from kvstore import errors
from kvstore.cache.core import Cache
from kvstore.cache.messages import HASH_BYTES, BlockOutcome
from kvstore.cache.singles import CommitEach, Each, ReleaseEach, ReserveEach
from kvstore.daemon.bounds import ID_BYTES
from kvstore.daemon.wire import MAX_ID, Reply, hashes_of, packed, words_of
from kvstore.proto import kvstore_pb2 as pb

Answers = tuple[Reply, Counter[str]]  # and how often there was which outcome


def each_of(op: pb.Op, session: int) -> Each:
    """What a packed operation asks for. Raises InvalidArgument; of ids that no lease can have too, which single ones do not share."""
    if op.pool:
        raise errors.InvalidArgument("packed operations are about slots in host memory alone; send those of a pool one by one")
    match op.WhichOneof("kind"):
        case "reserve_each":
            return ReserveEach(session, op.reserve_each.namespace_id, _ids(op.reserve_each.reservations, "reservations"))
        case "commit_each":
            commit = op.commit_each
            leases, hashes, parents = _ids(commit.leases, "leases"), hashes_of(commit.hashes), hashes_of(commit.parents, "parents")
            count = len(leases)
            if not len(hashes) == len(parents) == count:
                raise errors.InvalidArgument(f"{len(hashes)} hashes and {len(parents)} parents for {count} commits; give one each")
            slots = words_of(commit.units, count, "units"), words_of(commit.generations, count, "generations")
            return CommitEach(session, commit.namespace_id, leases, *slots, hashes, parents)
    return ReleaseEach(session, _ids(op.release_each.leases, "leases"))


def _ids(packed_ids: bytes, what: str) -> list[int]:
    if not packed_ids or len(packed_ids) % ID_BYTES:
        raise errors.InvalidArgument(f"{what} has {len(packed_ids)} bytes; give {ID_BYTES} each, and at least one")
    return list(struct.unpack(f"<{len(packed_ids) // ID_BYTES}Q", packed_ids))


def carry_out(cache: Cache, each: Each) -> Answers | None:
    """The answer; None, with nothing done, where the operations are to be done one by one."""
    ids = each.reservations if isinstance(each, ReserveEach) else each.leases
    if min(ids) <= 0 or max(ids) >= MAX_ID:
        return None
    match each:
        case ReserveEach():
            return _reserve(cache, each)
        case CommitEach() if cache.commit_each(each):
            count = len(ids)
            stored = {"outcomes": bytes([BlockOutcome.STORED]) * count, "units": bytes(4 * count), "generations": bytes(4 * count)}
            return {"each": stored}, Counter(stored=count)
        case ReleaseEach() if (counts := cache.release_each(each)) is not None:
            return {"each": {"counts": struct.pack(f"<{len(counts)}I", *counts)}}, Counter(ok=len(counts))
    return None


def _reserve(cache: Cache, request: ReserveEach) -> Answers | None:
    slots = cache.reserve_each(request)
    if slots is None:
        return None
    got, missing = len(slots[0]), len(request.reservations) - len(slots[0])
    outcomes = bytes([BlockOutcome.SLOT]) * got + bytes([BlockOutcome.NO_ROOM]) * missing
    answer = {"outcomes": outcomes, "units": packed(slots[0]), "generations": packed(slots[1])}
    return {"each": answer}, Counter({name: count for name, count in (("slot", got), ("no_room", missing)) if count})


def singles_of(each: Each) -> list[pb.Op]:
    """The operations one by one."""
    match each:
        case ReserveEach(namespace=namespace, reservations=ids):
            return [pb.Op(reserve=pb.Reserve(reservation=id_, namespace_id=namespace, count=1)) for id_ in ids]
        case ReleaseEach(leases=ids):
            return [pb.Op(release=pb.Release(lease=id_)) for id_ in ids]
        case CommitEach():
            return [pb.Op(commit=commit) for commit in _commits(each)]


def _commits(each: CommitEach) -> Sequence[pb.Commit]:
    units, generations = packed(each.units), packed(each.generations)
    hashes, parents = (np.ascontiguousarray(keys, "<u8").tobytes() for keys in (each.hashes, each.parents))
    return [
        pb.Commit(
            lease=lease,
            namespace_id=each.namespace,
            units=units[4 * at : 4 * at + 4],
            generations=generations[4 * at : 4 * at + 4],
            hashes=hashes[HASH_BYTES * at : HASH_BYTES * (at + 1)],
            parents=parents[HASH_BYTES * at : HASH_BYTES * (at + 1)],
        )
        for at, lease in enumerate(each.leases)
    ]
