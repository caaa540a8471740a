"""The steps of `put`: slots for the blocks that are not stored yet, committed in order, or sent where the arena cannot be mapped."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from google.protobuf.message import Message

from kvstore import errors
from kvstore.clients import calls, requests
from kvstore.clients.answers import Answer, Failed, Slotted
from kvstore.clients.channel import CALL_TIMEOUT_S
from kvstore.clients.handles import EXISTS, NONE, SLOT, Attached, Namespace, Put, PutBlock
from kvstore.clients.steps import Ask, Attach, Command, Send, Steps, let_go, of_namespace, packed_checksum, persistent, same_epoch
from kvstore.hashing import HASH_BYTES
from kvstore.proto import kvstore_pb2 as pb

PIECE_BYTES = 2**20  # 1 MiB: a quarter of the largest message


def put(namespace: Namespace, hashes: bytes, parent: bytes) -> Steps[Put]:
    """Slots for the blocks of one chain that are not stored yet. A prompt shorter than a block has none."""
    if not hashes:
        return Put(b"", b"", np.zeros(0, np.uint8), [])
    parents = requests.chain_parents(hashes, parent)

    def attempt() -> Steps[Put]:
        attached: Attached | None = yield Attach()
        if attached is None:
            return (yield from _put_copies(namespace, hashes, parents))
        yield from same_epoch(namespace, attached)
        return (yield from _put_in_place(attached, namespace, hashes, parents))

    return (yield from persistent(attempt))


def _put_in_place(attached: Attached, namespace: Namespace, hashes: bytes, parents: bytes) -> Steps[Put]:
    reservation = attached.session.new_id()
    attached.hold()
    try:
        reserved = _slotted((yield Ask(attached, [requests.reserve(reservation, namespace.id, hashes=hashes)]))[0])
        put = Put(hashes, parents, reserved.outcomes.copy(), [], attached, reservation)
        for index in np.flatnonzero(reserved.outcomes == SLOT):
            units = int(reserved.units[index])
            put.slots[int(index)] = (units, int(reserved.generations[index]))
            view = attached.arena.writable_view(units, namespace.geometry.block_bytes)
            put.blocks.append(PutBlock(int(index), _hash_at(hashes, int(index)), view))
    except BaseException:
        yield from let_go(attached, [requests.abandon(reservation)])
        raise
    return put


def _put_copies(namespace: Namespace, hashes: bytes, parents: bytes) -> Steps[Put]:
    present = (yield from calls.lookup(namespace, hashes)).blocks
    outcomes = np.full(len(hashes) // HASH_BYTES, SLOT, np.uint8)
    outcomes[:present] = EXISTS
    size_bytes = namespace.geometry.block_bytes
    blocks = [PutBlock(index, _hash_at(hashes, index), np.zeros(size_bytes, np.uint8)) for index in range(present, len(outcomes))]
    return Put(hashes, parents, outcomes, blocks)


def finish_put(namespace: Namespace, put: Put) -> Steps[None]:
    """Commit what was filled, give the rest back, and wait: afterwards anybody's lookup finds the blocks.

    Raises SessionEnded or StaleEpoch where blocks were filled and the session is over: they are not stored.
    """
    put.seal()
    ready = put.committable()
    put.outcomes[[block.index for block in put.blocks]] = NONE
    if put.attached is None:
        yield from _send_copies(namespace, put, ready)
        return
    if not ready:
        yield from let_go(put.attached, [requests.abandon(put.reservation)])
        return
    attached, lease = put.attached, put.attached.session.new_id()
    try:
        attached.check()
        ops = [_commit(namespace, put, ready, lease), requests.release(lease), requests.abandon(put.reservation)]
        answers: list[Answer] = yield Ask(attached, ops)
        put.outcomes[[block.index for block in ready]] = _slotted(answers[0]).outcomes
    finally:
        attached.drop()


def _commit(namespace: Namespace, put: Put, ready: list[PutBlock], lease: int) -> pb.Op:
    slots = np.array([put.slots[block.index] for block in ready], np.uint32)
    parents = b"".join(put.parent_of(block.index) for block in ready)
    return requests.commit(lease, namespace.id, (slots[:, 0], slots[:, 1]), b"".join(block.hash for block in ready), parents)


def abandon_put(put: Put) -> Steps[None]:
    """Give every slot back; nothing becomes visible."""
    put.seal()
    put.outcomes[[block.index for block in put.blocks]] = NONE
    if put.attached is not None:
        yield from let_go(put.attached, [requests.abandon(put.reservation)])


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


def _hash_at(hashes: bytes, index: int) -> bytes:
    return hashes[HASH_BYTES * index : HASH_BYTES * (index + 1)]
