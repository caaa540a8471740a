"""Neighbouring operations of a batch that are of one kind and about one block each, as a decode step sends them: read as columns,
carried out as one where the cache can do that, and each answered as if it had come alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

import numpy as np

from kvstore.cache.core import Cache
from kvstore.cache.messages import HASH_BYTES, BlockOutcome, unpack_hashes
from kvstore.cache.singles import CommitEach, Each, ReleaseEach, ReserveEach
from kvstore.daemon.wire import MAX_ID, Reply, packed
from kvstore.proto import kvstore_pb2 as pb

LEAST_OPS = 4  # operations: fewer are done sooner one by one

_SLOT, _NO_ROOM, _STORED = (bytes([outcome]) for outcome in (BlockOutcome.SLOT, BlockOutcome.NO_ROOM, BlockOutcome.STORED))
_NOWHERE = bytes(4)  # units, and generation, of a block whose slot is the session's own

Answers = tuple[Sequence[Reply], Counter[str]]  # and how often there was which outcome


@dataclass(frozen=True)
class Run:
    """Neighbours of one kind. `each` stands for all of them; None: they are to be done one by one."""

    kind: str
    ops: Sequence[pb.Op]
    each: Each | None


def runs_of(ops: Iterable[pb.Op], kinds: Sequence[str], session: int) -> list[Run]:
    """All operations, in their order; `kinds` are theirs."""
    runs: list[Run] = []
    rest = iter(ops)
    for kind, neighbours in groupby(kinds):
        run = list(islice(rest, len(list(neighbours))))
        read = _COLUMNS.get(kind) if len(run) >= LEAST_OPS and {op.pool for op in run} == {0} else None
        if read is None or (each := read(run, session)) is not None:
            runs.append(Run(kind, run, each if read else None))
            continue
        for _, alike in groupby(run, _alike):  # what can be done as one lies between what cannot
            part = list(alike)
            runs.append(Run(kind, part, read(part, session) if len(part) >= LEAST_OPS else None))
    return runs


def carry_out(cache: Cache, run: Run) -> Answers | None:
    """The run's answers; None, with nothing done, where its operations are to be done one by one."""
    match run.each:
        case ReserveEach(reservations=reservations) as reserve:
            return _reserve(cache, reserve, reservations)
        case CommitEach(leases=leases) as commit if cache.commit_each(commit):
            return [_slot_reply(lease, _STORED, _NOWHERE, _NOWHERE) for lease in leases], Counter(stored=len(leases))
        case ReleaseEach() as release if (counts := cache.release_each(release)) is not None:
            return [{"done": {"count": count}} for count in counts], Counter(ok=len(counts))
    return None


def _reserve(cache: Cache, request: ReserveEach, reservations: list[int]) -> Answers | None:
    slots = cache.reserve_each(request)
    if slots is None:
        return None
    units, generations = (packed(words) for words in slots)
    got, missing = len(slots[0]), len(reservations) - len(slots[0])
    places = range(0, 4 * got, 4)
    replies = [_slot_reply(id_, _SLOT, units[at : at + 4], generations[at : at + 4]) for id_, at in zip(reservations, places, strict=False)]
    replies += [_slot_reply(id_, _NO_ROOM, b"", b"") for id_ in reservations[got:]]
    return replies, Counter({name: count for name, count in (("slot", got), ("no_room", missing)) if count})


def _slot_reply(id_: int, outcome: bytes, units: bytes, generations: bytes) -> Reply:
    return {"slots": {"id": id_, "outcomes": outcome, "units": units, "generations": generations}}


# ---- reading; field by field rather than operation by operation, which takes half the time


def _alike(op: pb.Op) -> int:
    """The namespace of an operation that neighbours of the same may be done with (0 of a release); -1 for one that is done by itself."""
    match op.WhichOneof("kind"):
        case "reserve":
            return op.reserve.namespace_id if _reserves([op], 0) else -1
        case "commit":
            return op.commit.namespace_id if _commits([op], 0) else -1
    return 0 if _releases([op], 0) else -1


def _are_ids(values: list[int]) -> bool:
    return min(values) > 0 and max(values) < MAX_ID


def _reserves(ops: Sequence[pb.Op], session: int) -> Each | None:
    reserves = [op.reserve for op in ops]
    reservations, namespaces = [each.reservation for each in reserves], {each.namespace_id for each in reserves}
    anonymous = {each.count for each in reserves} == {1} and {each.hashes for each in reserves} == {b""}
    if not anonymous or len(namespaces) != 1 or not _are_ids(reservations):
        return None
    return ReserveEach(session, namespaces.pop(), reservations)


def _commits(ops: Sequence[pb.Op], session: int) -> Each | None:
    commits = [op.commit for op in ops]
    units, generations = [each.units for each in commits], [each.generations for each in commits]
    hashes, parents = [each.hashes for each in commits], [each.parents for each in commits]
    leases, namespaces = [each.lease for each in commits], {each.namespace_id for each in commits}
    single = {*map(len, units), *map(len, generations)} == {4} and {*map(len, hashes), *map(len, parents)} == {HASH_BYTES}
    bare = {each.checksums for each in commits} == {b""} and {each.token_ids for each in commits} == {b""}
    if not single or not bare or len(namespaces) != 1 or not _are_ids(leases):
        return None
    slots = [np.frombuffer(b"".join(words), "<u4") for words in (units, generations)]
    names = [unpack_hashes(b"".join(keys)) for keys in (hashes, parents)]
    return CommitEach(session, namespaces.pop(), leases, slots[0], slots[1], names[0], names[1])


def _releases(ops: Sequence[pb.Op], session: int) -> Each | None:
    releases = [op.release for op in ops]
    leases = [each.lease for each in releases]
    return ReleaseEach(session, leases) if {each.keep_blocks for each in releases} == {0} and _are_ids(leases) else None


_COLUMNS: dict[str, Callable[[Sequence[pb.Op], int], Each | None]] = {"reserve": _reserves, "commit": _commits, "release": _releases}
