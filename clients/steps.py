"""The steps that make a client's call, without I/O: the commands that they are made of, and what all calls share.

A call is a generator. It yields commands, is sent each one's result, or thrown its error, and returns the call's result.
`client.py` carries commands out with threads, `aio.py` on an event loop: the one body of code (calls.py, reading.py, writing.py)
serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

from kvstore import errors
from kvstore.checksum import block_checksum
from kvstore.clients.channel import CALL_TIMEOUT_S
from kvstore.clients.gpus import MappedPool
from kvstore.clients.handles import Attached, Namespace
from kvstore.clients.hold import Hold
from kvstore.proto import kvstore_pb2 as pb

RETRY_PAUSES_S = (0.05, 0.2, 0.8)  # seconds between tries: a daemon that is being restarted is back within about one
GRACE_S = 2.0  # seconds past a request's own deadline until its answer is given up

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """One unary call; its result is the reply."""

    method: str
    request: Message
    timeout_s: float = CALL_TIMEOUT_S


@dataclass(frozen=True)
class Receive:
    """A call whose answer is a stream; its result is the list of messages."""

    method: str
    request: Message
    timeout_s: float


@dataclass(frozen=True)
class Send:
    """A call whose request is a stream; its result is the reply."""

    method: str
    messages: Callable[[], Iterator[Message]]
    timeout_s: float


@dataclass(frozen=True)
class Attach:
    """A live session: the one there is, or a new one. Its result is None where the arena cannot be mapped here."""


@dataclass(frozen=True)
class Ask:
    """Operations of a session, waiting for their answers."""

    attached: Attached
    ops: list[pb.Op]
    timeout_s: float = CALL_TIMEOUT_S


@dataclass(frozen=True)
class Tell:
    """Operations of a session whose answers nobody waits for."""

    attached: Attached
    ops: list[pb.Op]


@dataclass(frozen=True)
class Take:
    """An Acquire, waiting until its lease is settled or the time is up. Its result is what was granted."""

    attached: Attached
    op: pb.Op
    timeout_s: float


@dataclass(frozen=True)
class MapPool:
    """The pool of a GPU, by its number in this process, mapped. Its result is a MappedPool."""

    attached: Attached
    gpu: int


@dataclass(frozen=True)
class Pause:
    """Wait so long."""

    seconds: float


Command = Call | Receive | Send | Attach | Ask | Tell | Take | MapPool | Pause
Steps = Generator[Command, Any, T]


def persistent(attempt: Callable[[], Steps[T]]) -> Steps[T]:
    """Try again, a few times, where the daemon went away or was restarted meanwhile."""
    for pause_s in RETRY_PAUSES_S:
        try:
            return (yield from attempt())
        except (errors.Unavailable, errors.StaleEpoch, errors.SessionEnded):
            yield Pause(pause_s)
    return (yield from attempt())


def reopen(namespace: Namespace) -> Steps[Namespace]:
    """Give the namespace its id in the daemon's present epoch."""
    reply: pb.OpenNamespaceReply = yield Call("OpenNamespace", namespace.request)
    if reply.block_bytes != namespace.geometry.block_bytes:
        raise errors.InternalFault(f"the daemon has blocks of {reply.block_bytes} bytes, this client of {namespace.geometry.block_bytes}")
    namespace.opened, namespace.digest = (reply.epoch, reply.namespace_id), reply.digest
    return namespace


def of_namespace(namespace: Namespace, make: Callable[[int, str], Command]) -> Steps[Any]:
    """A call about a namespace, given its id and epoch; reopened where the daemon is another one by now."""

    def attempt() -> Steps[Any]:
        if not namespace.epoch:
            yield from reopen(namespace)
        epoch, number = namespace.opened
        try:
            return (yield make(number, epoch))
        except errors.StaleEpoch:
            if namespace.epoch == epoch:  # another thread may have opened it anew
                namespace.opened = ("", 0)
            raise

    return (yield from persistent(attempt))


def same_epoch(namespace: Namespace, attached: Attached) -> Steps[None]:
    """Give the namespace its id in the session's epoch. Raises StaleEpoch where the daemon has yet another one."""
    if namespace.epoch != attached.session.epoch:
        yield from reopen(namespace)
    namespace.id_in(attached.session.epoch)


def no_pools() -> errors.ConfigError:
    """The error where a pool is asked for and the arena cannot be mapped."""
    return errors.ConfigError("blocks in GPU memory need the daemon's shared memory in this process; leave `pool` out")


def pool_mapped(attached: Attached, gpu: int) -> Steps[MappedPool]:
    """A GPU's pool. Raises InvalidArgument and ConfigError where there is none for this client."""
    found: MappedPool = yield MapPool(attached, gpu)
    return found


def let_go(hold: Hold, ops: list[pb.Op]) -> Steps[None]:
    """Give a hold back without waiting, unless it was. A session that is over has given it up already."""
    told = Tell(hold.attached, ops)
    try:
        if ops and hold.held and hold.attached.error is None:
            try:
                yield told
            except (errors.KVStoreError, GeneratorExit):
                raise
            except BaseException:  # an interrupt, perhaps before they were queued; to tell them twice does no harm
                yield told
                raise
    except errors.KVStoreError:
        pass  # the session ended meanwhile, and its holds with it
    finally:
        hold.drop()


def packed_checksum(digest: bytes, block_hash: bytes, data: bytes | memoryview) -> bytes:
    """A block's checksum as it travels: 16 bytes, low word first."""
    low, high = block_checksum(digest, block_hash, memoryview(data))
    return low.to_bytes(8, "little") + high.to_bytes(8, "little")
