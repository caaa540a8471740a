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
from kvstore.clients.handles import EXISTS, NONE, SLOT, STORED, Attached, Namespace
from kvstore.clients.put import Put, PutBlock
from kvstore.clients.steps import Ask, Attach, Command, Send, Steps, let_go, of_namespace, packed_checksum, persistent, same_epoch
from kvstore.hashing import HASH_BYTES
from kvstore.proto import kvstore_pb2 as pb

PIECE_BYTES = 2**20  # 1 MiB: a quarter of the largest message


def put(namespace: Namespace, hashes: bytes, parent: bytes) -> Steps[Put]:
    """Slots for the blocks of one chain that are not stored yet. A prompt shorter than a block has none."""
    requests.checked_parent(parent)
    if not hashes:
        return Put(b"", parent, np.zeros(0, np.uint8), namespace.geometry.block_bytes)

    def attempt() -> Steps[Put]:
        attached: Attached | None = yield Attach()
        if attached is None:
            return (yield from _put_copies(namespace, hashes, parent))
        yield from same_epoch(namespace, attached)
        return (yield from _put_in_place(attached, namespace, hashes, parent))

    return (yield from persistent(attempt))


def _put_in_place(attached: Attached, namespace: Namespace, hashes: bytes, parent: bytes) -> Steps[Put]:
    reservation = attached.session.new_id()
    attached.hold()
    try:
        reserved = _slotted((yield Ask(attached, [requests.reserve(reservation, namespace.id, hashes=hashes)]))[0])
        put = Put(hashes, parent, reserved.outcomes.copy(), namespace.geometry.block_bytes)
        put.give_slots(attached, reservation, reserved.units, reserved.generations)
    except BaseException:
        yield from let_go(attached, [requests.abandon(reservation)])
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
    ready = put.committable()
    put.outcomes[put.blocks.indices] = NONE
    if put.attached is None:
        yield from _send_copies(namespace, put, [put.blocks[place] for place in range(len(ready))])
        return
    if not len(ready):
        yield from let_go(put.attached, [requests.abandon(put.reservation)])
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
        rest = [] if stored else [requests.abandon(put.reservation)]
        yield from let_go(attached, [requests.release(lease), *rest])


def _commit(namespace: Namespace, put: Put, ready: NDArray[np.intp], lease: int) -> pb.Op:
    first, last = int(ready[0]), int(ready[-1])
    if last - first == len(ready) - 1:  # neighbours: one chain
        hashes, parents = put.hashes[HASH_BYTES * first : HASH_BYTES * (last + 1)], put.parent_of(first)
    else:
        hashes, parents = (b"".join(map(each, ready.tolist())) for each in (put.hash_at, put.parent_of))
    return requests.commit(lease, namespace.id, (put.units[ready], put.generations[ready]), hashes, parents)


def abandon_put(put: Put) -> Steps[None]:
    """Give every slot back; nothing becomes visible."""
    put.seal()
    put.outcomes[put.blocks.indices] = NONE
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
