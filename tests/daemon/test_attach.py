"""The session's stream by hand: what the daemon accepts in which order, and what it says to everything else."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import grpc
import pytest

from kvstore.clients import requests
from kvstore.clients.client import KVClient
from kvstore.proto import kvstore_pb2 as pb
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import GEOMETRY, IDENTITY, chain, pattern
from tests.daemon.stream import Stream
from tests.daemon.test_ends_of_sessions import eventually, held_bytes

SLOT = GEOMETRY.slot_bytes


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("daemon")) as process:
        yield process


@pytest.fixture
def client(shared: DaemonProcess) -> Iterator[KVClient]:
    with KVClient(shared.address) as made:
        made.clear()
        yield made
        eventually(lambda: held_bytes(made) == 0)


@pytest.fixture
def stream(shared: DaemonProcess, client: KVClient) -> Iterator[Stream]:
    with Stream(shared.address) as made:
        yield made


@pytest.fixture
def namespace_id(client: KVClient) -> int:
    return client.open_namespace(IDENTITY, GEOMETRY).id


def ended(stream: Stream) -> pb.Ended:
    """The farewell; the stream is over after it."""
    for message in stream.incoming:
        if message.HasField("ended"):
            assert next(stream.incoming, None) is None
            return message.ended
    raise AssertionError("the stream ended without a word")


def last_words(stream: Stream) -> str:
    """As `ended`, where it may have been too late for a farewell: then the status has the reason."""
    try:
        return ended(stream).text
    except grpc.RpcError as error:
        return str(error)


def has_ended(client: KVClient, welcome: pb.Welcome) -> bool:
    """Whether the daemon has ended this session, of which it keeps what its process may touch."""
    return next(session.ended for session in client.stats().sessions if session.session == welcome.session)


def store(client: KVClient, hashes: bytes) -> None:
    with client.put(client.open_namespace(IDENTITY, GEOMETRY), hashes) as put:
        for block in put.blocks:
            block.write(pattern(block.hash))


def test_a_session_opens_only_when_its_lock_is_held(stream: Stream) -> None:
    welcome = stream.attach()
    assert os.path.getsize(welcome.arena_path) >= welcome.arena_header_bytes + welcome.arena_bytes
    assert len(welcome.resume_token) >= 16


def test_saying_locked_without_the_lock_ends_the_session(stream: Stream) -> None:
    stream.send(hello=pb.Hello(maps_arena=True))
    stream.receive()
    stream.send(locked=pb.Locked())
    farewell = ended(stream)
    assert farewell.code == "INVALID_ARGUMENT"
    assert "flock" in farewell.text


@pytest.mark.parametrize(
    "message", [{"locked": pb.Locked()}, {"batch": pb.Batch(number=1, ops=[requests.release(1)])}, {"detach": pb.Detach()}, {}]
)
def test_anything_before_hello_ends_the_stream(stream: Stream, message: dict[str, object]) -> None:
    stream.send(**message)
    assert ended(stream).code == "INVALID_ARGUMENT"


def test_nothing_is_granted_before_ready(stream: Stream, client: KVClient, namespace_id: int) -> None:
    stream.send(hello=pb.Hello(maps_arena=True))
    stream.receive()
    stream.send(batch=pb.Batch(number=1, ops=[requests.reserve(1, namespace_id, count=1)]))
    assert "before Ready" in ended(stream).text
    assert held_bytes(client) == 0


@pytest.mark.parametrize("again", [{"hello": pb.Hello()}, {"locked": pb.Locked()}, {}])
def test_a_second_beginning_ends_the_session(stream: Stream, again: dict[str, object]) -> None:
    stream.attach()
    stream.send(**again)
    assert ended(stream).code == "INVALID_ARGUMENT"


def test_each_operation_of_a_batch_has_its_own_outcome(stream: Stream, client: KVClient, namespace_id: int) -> None:
    stream.attach()
    replies = stream.ask(
        requests.reserve(1, namespace_id, count=2),
        requests.reserve(2, 999, count=2),
        pb.Op(),
        requests.acquire(3, namespace_id, bytes(31), 1),
        requests.release(77),
        requests.abandon(1),
        number=42,
    )
    assert [reply.WhichOneof("kind") for reply in replies] == ["slots", "error", "error", "error", "done", "done"]
    assert [reply.error.code for reply in replies[1:4]] == ["NOT_FOUND", "INVALID_ARGUMENT", "INVALID_ARGUMENT"]
    assert (replies[4].done.count, replies[5].done.count) == (0, 2)


def test_a_batch_that_is_too_large_ends_the_session_with_the_limit(stream: Stream) -> None:
    stream.attach()
    stream.send(batch=pb.Batch(number=1, ops=[requests.release(1)] * 1025))
    farewell = ended(stream)
    assert (farewell.code, "1024" in farewell.text) == ("OUT_OF_RANGE", True)


def test_a_message_that_is_too_large_is_refused(stream: Stream) -> None:
    stream.attach()
    stream.send(hello=pb.Hello(client="x" * 5_000_000))
    with pytest.raises(grpc.RpcError):
        ended(stream)


def test_anothers_slots_cannot_be_committed_or_abandoned(stream: Stream, shared: DaemonProcess, namespace_id: int) -> None:
    with Stream(shared.address) as other:
        other.attach()
        slots = other.ask(requests.reserve(1, namespace_id, count=1))[0].slots
        stream.attach()
        commit = pb.Commit(
            lease=5, namespace_id=namespace_id, units=slots.units, generations=slots.generations, hashes=chain(1, 1), parents=bytes(32)
        )
        abandon = pb.Abandon(reservation=1, units=slots.units, generations=slots.generations)
        committed, abandoned = stream.ask(pb.Op(commit=commit), pb.Op(abandon=abandon))
        assert committed.slots.outcomes == bytes([7]), "BAD_SLOT"
        assert abandoned.done.count == 0
        assert other.ask(pb.Op(commit=commit), number=2)[0].slots.outcomes == bytes([2]), "its own session can"


def test_a_stale_generation_cannot_be_committed(stream: Stream, namespace_id: int) -> None:
    stream.attach()
    slots = stream.ask(requests.reserve(1, namespace_id, count=1))[0].slots
    commit = pb.Commit(lease=5, namespace_id=namespace_id, units=slots.units, generations=bytes(4), hashes=chain(2, 1), parents=bytes(32))
    assert stream.ask(pb.Op(commit=commit))[0].slots.outcomes == bytes([7])


def test_a_half_closed_stream_ends_the_session(stream: Stream, client: KVClient, namespace_id: int) -> None:
    stream.attach()
    stream.ask(requests.reserve(1, namespace_id, count=3))
    stream.half_close()
    assert "without Detach" in ended(stream).text
    time.sleep(0.5)
    assert held_bytes(client) == 3 * SLOT, "the lock is still held: the process may be writing"
    stream.unlock()


def test_detach_ends_all_holds_at_once(stream: Stream, client: KVClient, namespace_id: int) -> None:
    stream.attach()
    stream.ask(requests.reserve(1, namespace_id, count=3))
    stream.send(detach=pb.Detach())
    ended(stream)
    assert held_bytes(client) == 0


def test_a_cut_stream_leaves_orphans_that_a_resumed_session_regains(stream: Stream, client: KVClient, shared: DaemonProcess) -> None:
    hashes = chain(3, 2)
    store(client, hashes)
    namespace = client.open_namespace(IDENTITY, GEOMETRY)
    welcome = stream.attach()
    stream.ask(requests.acquire(1, namespace.id, hashes, 1), requests.reserve(2, namespace.id, count=1))
    stream.cut()
    eventually(lambda: has_ended(client, welcome))
    with Stream(shared.address) as wrong:
        wrong.send(hello=pb.Hello(maps_arena=True, resume_session=welcome.session, resume_token=b"guess"))
        assert ended(wrong).code == "NOT_FOUND"
    with Stream(shared.address) as again:
        again.attach(pb.Hello(maps_arena=True, resume_session=welcome.session, resume_token=welcome.resume_token))
        stream.unlock()
        time.sleep(0.5)
        assert held_bytes(client) == 3 * SLOT
        released, abandoned = again.ask(requests.release(1), requests.abandon(2))
        assert (released.done.count, abandoned.done.count) == (2, 1)
        eventually(lambda: held_bytes(client) == 0)


def test_a_resumed_session_that_never_locks_frees_nothing_while_the_old_lock_is_held(
    stream: Stream, client: KVClient, shared: DaemonProcess, namespace_id: int
) -> None:
    welcome = stream.attach()
    stream.ask(requests.reserve(2, namespace_id, count=1))
    stream.cut()
    eventually(lambda: has_ended(client, welcome))
    with Stream(shared.address) as again:
        again.send(hello=pb.Hello(maps_arena=True, resume_session=welcome.session, resume_token=welcome.resume_token))
        again.receive()
    time.sleep(0.6)
    assert held_bytes(client) == SLOT
    stream.unlock()


def test_a_client_that_does_not_read_is_ended_with_a_reason(stream: Stream, client: KVClient) -> None:
    welcome = stream.attach()
    long_answer = pb.Op(acquire=pb.Acquire(lease=1, group="x" * 4000, hashes=bytes(32), timeout_s=1))
    for number in range(200):
        stream.send(batch=pb.Batch(number=number + 1, ops=[long_answer] * 100))
    eventually(lambda: has_ended(client, welcome), 30.0)
    assert "does not read" in last_words(stream)
    assert client.stats().uptime_s > 0


def test_guarantees_are_at_most_the_capacity(stream: Stream, shared: DaemonProcess) -> None:
    stream.attach(pb.Hello(maps_arena=True, guarantee_bytes=40 * 2**20))
    with Stream(shared.address) as other:
        other.send(hello=pb.Hello(maps_arena=True, guarantee_bytes=40 * 2**20))
        farewell = ended(other)
        assert farewell.code == "RESOURCE_EXHAUSTED"
        assert "guarantee" in farewell.text


def test_a_session_holds_at_most_its_limit(stream: Stream, client: KVClient, namespace_id: int) -> None:
    stream.attach(pb.Hello(maps_arena=True, limit_bytes=3 * SLOT))
    slots = stream.ask(requests.reserve(1, namespace_id, count=5))[0].slots
    assert slots.outcomes == bytes([1, 1, 1, 6]), "three slots, then LIMIT"


def test_a_session_without_the_arena_needs_no_lock(stream: Stream) -> None:
    assert stream.attach(pb.Hello(client="far away")).arena_path == ""


def test_a_group_is_joined_by_attached_sessions_only(stream: Stream, client: KVClient) -> None:
    welcome = stream.attach()
    namespaces = [client.open_namespace(IDENTITY, GEOMETRY, shard) for shard in ("tp0/2", "tp1/2")]
    request = pb.JoinGroupRequest(
        session=welcome.session, group="g", namespace_ids=[each.id for each in namespaces], epoch=namespaces[0].epoch
    )
    stream.stub.JoinGroup(request)
    for each in namespaces:
        with client.put(each, chain(4, 2)) as put:
            for block in put.blocks[: 1 if each is namespaces[0] else 2]:
                block.write(pattern(block.hash))
    lookup = pb.LookupRequest(group="g", hashes=chain(4, 2), epoch=namespaces[0].epoch)
    assert stream.stub.Lookup(lookup).blocks == 1, "the members' minimum"
    request.session = 999_999
    with pytest.raises(grpc.RpcError) as caught:
        stream.stub.JoinGroup(request)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
