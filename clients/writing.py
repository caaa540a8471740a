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
from kvstore.clients.hold import Hold
from kvstore.clients.pools import number_of
from kvstore.clients.put import Put, PutBlock
from kvstore.clients.steps import (
    Ask,
    Attach,
    Command,
    Send,
    Steps,
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

PIECE_BYTES = 2**20  # 1 MiB: a quarter of the largest message

_NOTHING = np.zeros(0, np.uint8)


def put(namespace: Namespace, hashes: bytes, parent: bytes, gpu: int | None, begun: list[Put]) -> Steps[Put]:
    """Slots for the blocks of one chain that are not stored yet, in memory or in a GPU's. A prompt shorter than a block has none.

    begun   gets the put too, before anything can be interrupted: where anything is raised, the caller abandons what is in it
    """
    requests.checked_parent(parent)

    def attempt() -> Steps[Put]:
        attached: Attached | None = yield Attach()
        if attached is not None:
            return (yield from _put_in_place(attached, namespace, hashes, parent, gpu, begun))
        if gpu is not None:
            raise no_pools()
        return (yield from _put_copies(namespace, hashes, parent))

    made = (yield from persistent(attempt)) if hashes or gpu is not None else Put(b"", parent, _NOTHING, namespace.geometry.block_bytes)
    if not begun:
        begun.append(made)
    return made


def _put_in_place(
    attached: Attached, namespace: Namespace, hashes: bytes, parent: bytes, gpu: int | None, begun: list[Put]
) -> Steps[Put]:
    pool = None if gpu is None else (yield from pool_mapped(attached, gpu))
    reservation, number, size_bytes = attached.session.new_id(), number_of(pool.pool if pool else None), namespace.geometry.block_bytes
    hold = Hold(attached, pool)
    try:
        hold.take()
        put = Put(hashes, parent, _NOTHING, size_bytes, pool)
        units = generations = put.units
        if hashes:
            yield from same_epoch(namespace, attached)
            asked = requests.reserve(reservation, namespace.id_in(attached.session.epoch), hashes=hashes, pool=number)
            reserved = _slotted((yield Ask(attached, [asked]))[0])
            put = Put(hashes, parent, reserved.outcomes.copy(), size_bytes, pool)
            units, generations = reserved.units, reserved.generations
        put.give_slots(hold, reservation, units, generations)
        begun.append(put)
        return put
    except BaseException:
        yield from let_go(hold, [requests.abandon(reservation, pool=number)])
        raise


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
    if put.hold is None:
        yield from _send_copies(namespace, put, [put.blocks[place] for place in range(len(ready))])
        return
    attached = put.hold.attached
    try:
        if len(ready):
            attached.check()
            lease = attached.session.new_id()
            put.releases.append(requests.release(lease, pool=put.pool_number))
            answers: list[Answer] = yield Ask(attached, [_commit(namespace, attached, put, ready, lease)])
            put.outcomes[ready] = _slotted(answers[0]).outcomes
    except errors.Unavailable as error:  # the stream broke, and so the session ended
        raise errors.SessionEnded(f"session {attached.session.id} is over ({error}); put again: its blocks may be lost") from error
    finally:
        yield from let_go(put.hold, _ending(put))


def _commit(namespace: Namespace, attached: Attached, put: Put, ready: NDArray[np.intp], lease: int) -> pb.Op:
    first, last = int(ready[0]), int(ready[-1])
    if last - first == len(ready) - 1:  # neighbours: one chain
        hashes, parents = put.hashes[HASH_BYTES * first : HASH_BYTES * (last + 1)], put.parent_of(first)
    else:
        hashes, parents = (b"".join(map(each, ready.tolist())) for each in (put.hash_at, put.parent_of))
    number = namespace.id_in(attached.session.epoch)
    return requests.commit(lease, number, (put.units[ready], put.generations[ready]), hashes, parents, pool=put.pool_number)


def _ending(put: Put) -> list[pb.Op]:
    """What gives back all that is left. The slot of a block that was not stored, as another session came first, is still reserved."""
    stored = (put.outcomes[put.blocks.indices] == STORED).all()
    return put.releases if stored else [*put.releases, requests.abandon(put.reservation, pool=put.pool_number)]


def abandon_put(put: Put) -> Steps[None]:
    """Give every slot back that has not been; nothing becomes visible."""
    if not put.sealed:
        put.seal()
        put.outcomes[put.blocks.indices] = NONE
    if put.hold is not None:
        yield from let_go(put.hold, _ending(put))


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
