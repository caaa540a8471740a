"""The steps of `put`: slots for the blocks that are not stored yet, committed in order, or sent where the arena cannot be mapped."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from kvstore import errors
from kvstore.clients import calls, requests
from kvstore.clients.answers import Answer, Failed, Slotted
from kvstore.clients.channel import CALL_TIMEOUT_S
from kvstore.clients.gpus import MappedPool
from kvstore.clients.handles import EXISTS, NONE, SLOT, STORED, Attached, Namespace
from kvstore.clients.pools import number_of
from kvstore.clients.put import Put, PutBlock
from kvstore.clients.steps import (
    Ask,
    Attach,
    Command,
    Send,
    Steps,
    let_go,
    of_namespace,
    packed_checksum,
    persistent,
    pool_mapped,
    same_epoch,
)
from kvstore.hashing import HASH_BYTES
from kvstore.proto import kvstore_pb2 as pb

PIECE_BYTES = 2**20  # 1 MiB: a quarter of the largest message


def put(namespace: Namespace, hashes: bytes, parent: bytes, gpu: int | None = None) -> Steps[Put]:
    """Slots for the blocks of one chain that are not stored yet, in memory or in a GPU's. A prompt shorter than a block has none."""
    requests.checked_parent(parent)
    if not hashes and gpu is None:
        return Put(b"", parent, np.zeros(0, np.uint8), namespace.geometry.block_bytes)

    def attempt() -> Steps[Put]:
        attached: Attached | None = yield Attach()
        if gpu is not None:
            return (yield from _put_in_pool(attached, namespace, hashes, parent, gpu))
        if attached is None:
            return (yield from _put_copies(namespace, hashes, parent))
        yield from same_epoch(namespace, attached)
        return (yield from _put_in_place(attached, namespace, hashes, parent, None))

    return (yield from persistent(attempt))


def _put_in_pool(attached: Attached | None, namespace: Namespace, hashes: bytes, parent: bytes, gpu: int) -> Steps[Put]:
    pool = yield from pool_mapped(attached, gpu)
    try:
        if attached is None or not hashes:
            return Put(b"", parent, np.zeros(0, np.uint8), namespace.geometry.block_bytes, pool)
        yield from same_epoch(namespace, attached)
        return (yield from _put_in_place(attached, namespace, hashes, parent, pool))
    except BaseException:
        pool.drop()
        raise


def _put_in_place(attached: Attached, namespace: Namespace, hashes: bytes, parent: bytes, pool: MappedPool | None) -> Steps[Put]:
    reservation, number = attached.session.new_id(), number_of(pool.pool if pool else None)
    attached.hold()
    try:
        asked = requests.reserve(reservation, namespace.id_in(attached.session.epoch), hashes=hashes, pool=number)
        reserved = _slotted((yield Ask(attached, [asked]))[0])
        put = Put(hashes, parent, reserved.outcomes.copy(), namespace.geometry.block_bytes, pool)
        put.give_slots(attached, reservation, reserved.units, reserved.generations)
    except BaseException:
        yield from let_go(attached, [requests.abandon(reservation, pool=number)])
        raise
    return put


def _put_copies(namespace: Namespace, hashes: bytes, parent: bytes) -> Steps[Put]:
    present = (yield from calls.lookup(namespace, hashes)).blocks
    outcomes = np.full(len(hashes) // HASH_BYTES, SLOT, np.uint8)
    outcomes[:present] = EXISTS
    return Put(hashes, parent, outcomes, namespace.geometry.block_bytes)


def finish_put(namespace: Namespace, put: Put) -> Steps[None]:
    """Commit what was filled, give the rest back, and wait: afterwards anybody's lookup finds the blocks.

    Raises SessionEnded or StaleEpoch where blocks were filled and the session is over: look before you count on them.
    """
    put.seal()
    try:
        yield from _finish(namespace, put)
    finally:
        if put.pool is not None:
            put.pool.drop()


def _finish(namespace: Namespace, put: Put) -> Steps[None]:
    ready = put.committable()
    put.outcomes[put.blocks.indices] = NONE
    if put.attached is None:
        yield from _send_copies(namespace, put, [put.blocks[place] for place in range(len(ready))])
        return
    if not len(ready):
        yield from let_go(put.attached, [_abandon(put)])
        return
    attached, lease = put.attached, put.attached.session.new_id()
    try:
        attached.check()
        answers: list[Answer] = yield Ask(attached, [_commit(namespace, put, ready, lease)])
        put.outcomes[ready] = _slotted(answers[0]).outcomes
    except errors.Unavailable as error:  # the stream broke, and so the session ended
        raise errors.SessionEnded(f"session {attached.session.id} is over ({error}); put again: its blocks may be lost") from error
    finally:
        # The slot of a block that was not stored, say because another session's commit came first, is still reserved.
        stored = (put.outcomes[put.blocks.indices] == STORED).all()
        rest = [] if stored else [_abandon(put)]
        yield from let_go(attached, [requests.release(lease, pool=put.pool_number), *rest])


def _commit(namespace: Namespace, put: Put, ready: NDArray[np.intp], lease: int) -> pb.Op:
    first, last = int(ready[0]), int(ready[-1])
    if last - first == len(ready) - 1:  # neighbours: one chain
        hashes, parents = put.hashes[HASH_BYTES * first : HASH_BYTES * (last + 1)], put.parent_of(first)
    else:
        hashes, parents = (b"".join(map(each, ready.tolist())) for each in (put.hash_at, put.parent_of))
    assert put.attached is not None
    number = namespace.id_in(put.attached.session.epoch)
    return requests.commit(lease, number, (put.units[ready], put.generations[ready]), hashes, parents, pool=put.pool_number)


def _abandon(put: Put) -> pb.Op:
    return requests.abandon(put.reservation, pool=put.pool_number)


def abandon_put(put: Put) -> Steps[None]:
    """Give every slot back; nothing becomes visible."""
    put.seal()
    put.outcomes[put.blocks.indices] = NONE
    try:
        if put.attached is not None:
            yield from let_go(put.attached, [_abandon(put)])
    finally:
        if put.pool is not None:
            put.pool.drop()


def _send_copies(namespace: Namespace, put: Put, ready: list[PutBlock]) -> Steps[None]:
    if not ready:
        return

    def make(namespace_id: int, epoch: str) -> Command:
        return Send("Write", lambda: _pieces(namespace_id, epoch, namespace.digest, put, ready), CALL_TIMEOUT_S + len(ready))

    reply: pb.WriteReply = yield from of_namespace(namespace, make)
    outcomes = np.frombuffer(reply.outcomes, np.uint8)
    put.outcomes[[block.index for block in ready[: len(outcomes)]]] = outcomes


def _pieces(namespace_id: int, epoch: str, digest: bytes, put: Put, ready: list[PutBlock]) -> Iterator[Message]:
    for block in ready:
        data = block.view.tobytes()
        checksum = packed_checksum(digest, block.hash, data)
        for start in range(0, len(data), PIECE_BYTES):
            last = start + PIECE_BYTES >= len(data)
            yield pb.BlockBytes(
                namespace_id=namespace_id,
                epoch=epoch,
                hash=block.hash,
                parent=put.parent_of(block.index),
                offset_bytes=start,
                data=data[start : start + PIECE_BYTES],
                last=last,
                checksum=checksum if last else b"",
            )


def _slotted(answer: Answer) -> Slotted:
    if isinstance(answer, Failed):
        raise answer.error
    if not isinstance(answer, Slotted):
        raise errors.InternalFault(f"the daemon answered with {type(answer).__name__} where slots were asked for")
    return answer
