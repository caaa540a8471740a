"""Operations on their way to the daemon: neighbours of one kind and about one block each, as a decode step has them, leave packed."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter

from kvstore.hashing import HASH_BYTES
from kvstore.proto import kvstore_pb2 as pb

LEAST_OPS = 4  # operations: fewer are sent as they are

Queued = tuple[int, pb.Op, str]  # ticket, operation, its kind


def packed(queued: Sequence[Queued]) -> tuple[list[pb.Op], list[Sequence[int]]]:
    """The operations to send for these, in their order, and the tickets that each stands for."""
    ops: list[pb.Op] = []
    tickets: list[Sequence[int]] = []
    for kind, neighbours in groupby(queued, itemgetter(2)):
        run = list(neighbours)
        column = _COLUMNS.get(kind)
        if column is None or len(run) < LEAST_OPS:
            parts = [run]
        elif whole := column([op for _, op, _ in run]):
            ops.append(whole)
            tickets.append([ticket for ticket, _, _ in run])
            continue
        else:
            parts = [list(part) for _, part in groupby(run, lambda each: _alike(each[1], each[2]))]
        for part in parts:
            one = column([op for _, op, _ in part]) if column and len(part) >= LEAST_OPS else None
            ops += [one] if one else [op for _, op, _ in part]
            tickets += [[ticket for ticket, _, _ in part]] if one else [[ticket] for ticket, _, _ in part]
    return ops, tickets


def as_they_are(queued: Sequence[Queued]) -> tuple[list[pb.Op], list[Sequence[int]]]:
    """`packed` for a daemon that does not read packed ones."""
    return [op for _, op, _ in queued], [[ticket] for ticket, _, _ in queued]


def _alike(op: pb.Op, kind: str) -> int:
    """The namespace of an operation that neighbours of the same may be packed with (0 of a release); -1 of one that is sent as it is."""
    one = _COLUMNS[kind]([op])
    if one is None:
        return -1
    return op.reserve.namespace_id if kind == "reserve" else op.commit.namespace_id if kind == "commit" else 0


# ---- field by field rather than operation by operation, which takes half the time


def _reserves(ops: Sequence[pb.Op]) -> pb.Op | None:
    reserves = [op.reserve for op in ops]
    namespaces = {each.namespace_id for each in reserves}
    simple = {each.count for each in reserves} == {1} and {each.hashes for each in reserves} == {b""}
    if not simple or len(namespaces) != 1 or {op.pool for op in ops} != {0}:
        return None
    ids = _ids([each.reservation for each in reserves])
    return pb.Op(reserve_each=pb.ReserveEach(reservations=ids, namespace_id=namespaces.pop()))


def _commits(ops: Sequence[pb.Op]) -> pb.Op | None:
    commits = [op.commit for op in ops]
    namespaces = {each.namespace_id for each in commits}
    units, generations = [each.units for each in commits], [each.generations for each in commits]
    hashes, parents = [each.hashes for each in commits], [each.parents for each in commits]
    single = {*map(len, units), *map(len, generations)} == {4} and {*map(len, hashes), *map(len, parents)} == {HASH_BYTES}
    bare = {each.checksums for each in commits} == {b""} and {each.token_ids for each in commits} == {b""}
    if not single or not bare or len(namespaces) != 1 or {op.pool for op in ops} != {0}:
        return None
    return pb.Op(
        commit_each=pb.CommitEach(
            leases=_ids([each.lease for each in commits]),
            namespace_id=namespaces.pop(),
            units=b"".join(units),
            generations=b"".join(generations),
            hashes=b"".join(hashes),
            parents=b"".join(parents),
        )
    )


def _releases(ops: Sequence[pb.Op]) -> pb.Op | None:
    releases = [op.release for op in ops]
    if {each.keep_blocks for each in releases} != {0} or {op.pool for op in ops} != {0}:
        return None
    return pb.Op(release_each=pb.ReleaseEach(leases=_ids([each.lease for each in releases])))


def _ids(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}Q", *ids)


_COLUMNS: dict[str, Callable[[Sequence[pb.Op]], pb.Op | None]] = {"reserve": _reserves, "commit": _commits, "release": _releases}
