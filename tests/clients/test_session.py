"""The session protocol as values: no stream, no thread, no daemon."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore import errors
from kvstore.clients import requests
from kvstore.clients.answers import Expected, Failed, Finished, Slotted
from kvstore.clients.blocks import Prompt, Tail
from kvstore.clients.session import (
    MAX_BLOCKS_PER_BATCH,
    MAX_OPS_PER_BATCH,
    MAX_TOKENS_PER_BATCH,
    Answered,
    AnsweredAll,
    Opened,
    Over,
    Session,
    Settled,
    State,
    Welcomed,
)
from kvstore.proto import kvstore_pb2 as pb

EPOCH = "e1"


def server(**kind: object) -> pb.ServerMessage:
    return pb.ServerMessage(epoch=EPOCH, **kind)  # type: ignore[arg-type]


def opened(*, packs: bool = False) -> Session:
    session = Session()
    session.hello(pb.Hello())
    session.next_message()
    session.receive(server(welcome=pb.Welcome(session=7, each=packs)))
    session.locked()
    session.next_message()
    session.receive(server(ready=pb.Ready()))
    return session


def words(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


def sent_batch(session: Session) -> pb.Batch:
    message = session.next_message()
    assert message is not None
    return message.batch


def test_a_session_opens_by_hello_welcome_locked_ready() -> None:
    session = Session()
    session.hello(pb.Hello(client="me"))
    first = session.next_message()
    assert first is not None
    assert first.hello.client == "me"
    assert session.receive(server(welcome=pb.Welcome(session=7, arena_path="/a"))) == [Welcomed(pb.Welcome(session=7, arena_path="/a"))]
    assert session.next_message() is None, "nothing is sent before the lock is held"
    session.locked()
    second = session.next_message()
    assert second is not None
    assert second.HasField("locked")
    assert session.receive(server(ready=pb.Ready())) == [Opened()]
    assert (session.state, session.id, session.epoch) == (State.OPEN, 7, EPOCH)


def test_nothing_can_be_submitted_before_it_is_open() -> None:
    session = Session()
    session.hello(pb.Hello())
    with pytest.raises(errors.SessionEnded, match="greeted"):
        session.submit([requests.release(1)])


@pytest.mark.parametrize("kind", ["ready", "reply", "grant", "welcome"])
def test_a_message_out_of_turn_ends_the_session(kind: str) -> None:
    session = opened() if kind in ("ready", "welcome") else Session()
    if session.state is State.FRESH:
        session.hello(pb.Hello())
    message = server()
    getattr(message, kind).SetInParent()
    events = session.receive(message)
    assert isinstance(events[-1], Over)
    assert isinstance(session.error, errors.InternalFault)


def test_a_message_of_another_epoch_ends_the_session() -> None:
    session = opened()
    message = server(grant=pb.Grant(lease=1))
    message.epoch = "e2"
    assert isinstance(session.receive(message)[-1], Over)


def test_operations_queued_together_leave_as_one_batch_in_order() -> None:
    session = opened()
    session.submit([requests.release(1), requests.release(2)])
    session.submit([requests.abandon(3)])
    batch = sent_batch(session)
    assert [op.WhichOneof("kind") for op in batch.ops] == ["release", "release", "abandon"]
    assert session.next_message() is None


def test_a_batch_keeps_to_the_limits_on_operations_and_blocks() -> None:
    session = opened()
    session.submit([requests.release(number + 1) for number in range(MAX_OPS_PER_BATCH + 1)])
    assert len(sent_batch(session).ops) == MAX_OPS_PER_BATCH
    assert len(sent_batch(session).ops) == 1
    half = MAX_BLOCKS_PER_BATCH // 2 + 1
    session.submit([requests.reserve(1, 1, count=half), requests.reserve(2, 1, count=half)])
    assert len(sent_batch(session).ops) == 1
    assert len(sent_batch(session).ops) == 1


def test_replies_find_their_operations_across_batches_and_parts() -> None:
    session = opened()
    first = session.submit([requests.release(1), requests.reserve(2, 1, count=2)])
    one = sent_batch(session).number
    second = session.submit([requests.release(9)])
    two = sent_batch(session).number
    done = pb.OpReply(done=pb.Done(count=5))
    slots = pb.OpReply(slots=pb.SlotReply(id=2, outcomes=bytes([1, 1]), units=words(4, 8), generations=words(1, 2)))
    assert session.receive(server(reply=pb.BatchReply(number=two, replies=[done]))) == [Answered(second[0], Finished(5))]
    assert session.receive(server(reply=pb.BatchReply(number=one, replies=[done]))) == [Answered(first[0], Finished(5))]
    (event,) = session.receive(server(reply=pb.BatchReply(number=one, replies=[slots], first_op=1)))
    assert isinstance(event, Answered)
    assert event.ticket == first[1]
    assert isinstance(event.answer, Slotted)
    assert event.answer.units.tolist() == [4, 8]
    assert event.answer.generations.tolist() == [1, 2]


def test_a_reply_to_a_batch_that_was_not_sent_ends_the_session() -> None:
    session = opened()
    assert isinstance(session.receive(server(reply=pb.BatchReply(number=99)))[-1], Over)


def commits(count: int) -> list[pb.Op]:
    slot = np.array([4], np.uint32), np.array([1], np.uint32)
    return [requests.commit(lease, 1, slot, bytes([lease]) * 32, bytes(32)) for lease in range(1, 1 + count)]


def test_operations_of_one_kind_leave_packed_where_the_daemon_reads_that() -> None:
    ops = [*(requests.reserve(number, 1, count=1) for number in range(1, 6)), *commits(5), *(requests.release(9 + n) for n in range(5))]
    plain, session = opened(), opened(packs=True)
    plain.submit(ops)
    session.submit(ops)
    assert list(sent_batch(plain).ops) == ops
    assert [op.WhichOneof("kind") for op in sent_batch(session).ops] == ["reserve_each", "commit_each", "release_each"]
    session.submit([requests.release(number + 1) for number in range(MAX_OPS_PER_BATCH + 1)])
    assert [len(sent_batch(session).ops[0].release_each.leases) for _ in range(1)] == [8 * MAX_OPS_PER_BATCH]
    assert len(sent_batch(session).ops) == 1
    session.submit([*commits(200), requests.reserve(1, 1, count=8000)])
    assert [op.WhichOneof("kind") for op in sent_batch(session).ops] == ["commit_each"]
    assert [op.WhichOneof("kind") for op in sent_batch(session).ops] == ["reserve"]


def test_packed_answers_find_their_operations() -> None:
    """Together, one by one, as one error, and too few."""
    session = opened(packs=True)
    tickets = session.submit([*commits(4), *(requests.release(number) for number in range(1, 5)), requests.release(8, 3)])
    number = sent_batch(session).number
    stored = pb.EachReply(outcomes=bytes([2, 3, 2, 2]), units=words(0, 7, 0, 0), generations=words(0, 9, 0, 0))
    part = pb.BatchReply(number=number, replies=[pb.OpReply(each=stored)])
    (event,) = session.receive(server(reply=part))
    assert isinstance(event, AnsweredAll)
    assert list(event.tickets) == tickets[:4]
    told = [(each.outcomes.tolist(), each.units.tolist(), each.generations.tolist()) for each in event.answers if isinstance(each, Slotted)]
    assert told[:2] == [([2], [0], [0]), ([3], [7], [9])]
    counts = pb.OpReply(each=pb.EachReply(counts=words(1, 0, 2, 1)))
    tail = pb.OpReply(done=pb.Done(count=3))
    all_of, last = session.receive(server(reply=pb.BatchReply(number=number, first_op=1, replies=[counts, tail])))
    assert all_of == AnsweredAll(tickets[4:8], [Finished(count) for count in (1, 0, 2, 1)])
    assert last == Answered(tickets[8], Finished(3))
    one_by_one = pb.EachReply(replies=[tail, pb.OpReply(error=pb.Error(code="NOT_FOUND", text="NotFound: no")), tail, tail])
    whole = pb.OpReply(error=pb.Error(code="NOT_FOUND", text="NotFound: no"))
    few = pb.OpReply(each=pb.EachReply(counts=words(1, 1)))
    for reply, failed in ((pb.OpReply(each=one_by_one), [1]), (whole, [0, 1, 2, 3]), (few, [0, 1, 2, 3])):
        session.submit([requests.release(number) for number in range(1, 5)])
        (event,) = session.receive(server(reply=pb.BatchReply(number=sent_batch(session).number, replies=[reply])))
        assert isinstance(event, AnsweredAll)
        assert [n for n, answer in enumerate(event.answers) if isinstance(answer, Failed)] == failed
        assert len(event.answers) == 4


def test_the_end_of_a_session_fails_every_packed_operation() -> None:
    session = opened(packs=True)
    tickets = session.submit([requests.release(number) for number in range(1, 7)])
    sent_batch(session)
    *failed, _ = session.lost(errors.Unavailable("gone"))
    assert [event.ticket for event in failed if isinstance(event, Answered)] == tickets


def test_one_failed_operation_leaves_its_neighbours_alone() -> None:
    session = opened()
    tickets = session.submit([requests.release(1), requests.release(2)])
    number = sent_batch(session).number
    replies = [pb.OpReply(error=pb.Error(code="NOT_FOUND", text="NotFound: no such")), pb.OpReply(done=pb.Done(count=1))]
    failed, done = session.receive(server(reply=pb.BatchReply(number=number, replies=replies)))
    assert isinstance(failed, Answered)
    assert isinstance(failed.answer, Failed)
    assert isinstance(failed.answer.error, errors.NotFound)
    assert done == Answered(tickets[1], Finished(1))


def acquired(session: Session, lease: int, blocks: int, expected: int, reason: str = "complete") -> list[object]:
    session.submit([requests.acquire(lease, 1, bytes(32 * blocks), 1.0)])
    number = sent_batch(session).number
    reply = pb.OpReply(acquired=pb.Acquired(lease=lease, expected_blocks=expected, reason=reason))
    return list(session.receive(server(reply=pb.BatchReply(number=number, replies=[reply]))))


def test_grants_add_up_in_order_until_the_last_settles_the_lease() -> None:
    session = opened()
    acquired(session, 5, 3, 3)
    assert session.receive(server(grant=pb.Grant(lease=5, members=1, units=words(10), generations=words(1)))) == []
    grant = pb.Grant(lease=5, first_block=1, members=1, units=words(20, 30), generations=words(2, 3), ended="complete")
    (event,) = session.receive(server(grant=grant))
    assert isinstance(event, Settled)
    assert event.granting.units.tolist() == [[10, 20, 30]]
    assert event.granting.generations.tolist() == [[1, 2, 3]]
    assert event.granting.ended == "complete"


def test_a_groups_grant_has_one_row_a_member() -> None:
    session = opened()
    acquired(session, 5, 2, 2)
    grant = pb.Grant(lease=5, members=2, units=words(1, 2, 3, 4), generations=words(1, 1, 0, 1), ended="complete")
    (event,) = session.receive(server(grant=grant))
    assert isinstance(event, Settled)
    assert event.granting.units.tolist() == [[1, 2], [3, 4]]


def test_an_acquire_of_nothing_is_settled_by_its_reply() -> None:
    session = opened()
    answered, settled = acquired(session, 5, 2, 0, "missing")
    assert isinstance(answered, Answered)
    assert answered.answer == Expected(0, "missing")
    assert isinstance(settled, Settled)
    assert settled.granting.ended == "missing"


def test_an_acquire_that_was_refused_is_settled_with_its_error() -> None:
    session = opened()
    session.submit([requests.acquire(5, 1, bytes(32), 1.0)])
    number = sent_batch(session).number
    reply = pb.OpReply(error=pb.Error(code="NOT_FOUND", text="NotFound: namespace"))
    _, settled = session.receive(server(reply=pb.BatchReply(number=number, replies=[reply])))
    assert isinstance(settled, Settled)
    assert isinstance(settled.granting.error, errors.NotFound)


def test_grants_of_a_forgotten_lease_are_ignored() -> None:
    session = opened()
    acquired(session, 5, 1, 1)
    session.forget(5)
    assert session.receive(server(grant=pb.Grant(lease=5, members=1, units=words(1), generations=words(1), ended="complete"))) == []


def test_the_end_of_the_stream_fails_everything_that_waits() -> None:
    session = opened()
    acquired(session, 5, 2, 2)
    waiting = session.submit([requests.release(1)])
    sent_batch(session)
    queued = session.submit([requests.release(2)])
    events = session.lost(errors.Unavailable("gone"))
    failed = {event.ticket for event in events if isinstance(event, Answered)}
    assert failed == {waiting[0], queued[0]}
    assert [event.lease for event in events if isinstance(event, Settled)] == [5]
    assert isinstance(events[-1], Over)
    assert session.next_message() is None
    with pytest.raises(errors.Unavailable, match="gone"):
        session.submit([requests.release(3)])


def test_the_end_is_told_once() -> None:
    session = opened()
    session.lost(errors.Unavailable("gone"))
    assert session.lost(errors.Unavailable("again")) == []


def test_what_the_daemon_says_of_the_end_is_the_error() -> None:
    session = opened()
    (over,) = session.receive(server(ended=pb.Ended(code="RESOURCE_EXHAUSTED", text="ResourceExhausted: too slow")))
    assert isinstance(over, Over)
    assert isinstance(over.error, errors.ResourceExhausted)


def test_more_operations_than_are_ever_sent_are_refused() -> None:
    session = opened()
    many = [requests.release(1)] * 40_000
    session.submit(many)
    with pytest.raises(errors.ResourceExhausted):
        session.submit(many)


def test_a_batch_has_no_more_token_ids_than_the_daemon_takes() -> None:
    session = opened()
    each = Prompt([1] * (MAX_TOKENS_PER_BATCH // 2), bytes(32))
    session.submit([requests.acquire(lease, 1, b"", 1.0, each) for lease in (1, 2, 3)])
    assert [len(sent_batch(session).ops) for _ in range(2)] == [2, 1]


def test_the_last_block_is_a_tails_donor_once_all_are_granted() -> None:
    session = opened()
    session.submit([requests.acquire(3, 1, bytes(64), 1.0, Prompt([1] * 40, bytes(32)))])
    number = sent_batch(session).number
    acquired = pb.OpReply(acquired=pb.Acquired(lease=3, expected_blocks=3, reason="complete", tail_tokens=5))
    session.receive(server(reply=pb.BatchReply(number=number, replies=[acquired])))
    session.receive(server(grant=pb.Grant(lease=3, members=1, units=words(10, 20), generations=words(1, 2))))
    granting = session.granting(3)
    assert granting is not None
    assert granting.tail is None
    session.receive(server(grant=pb.Grant(lease=3, first_block=2, members=1, units=words(30), generations=words(3), ended="complete")))
    assert granting.tail == Tail(30, 3, 5)


def test_a_donor_that_did_not_come_is_no_tail() -> None:
    session = opened()
    session.submit([requests.acquire(3, 1, bytes(64), 1.0, Prompt([1] * 40, bytes(32)))])
    number = sent_batch(session).number
    acquired = pb.OpReply(acquired=pb.Acquired(lease=3, expected_blocks=3, reason="complete", tail_tokens=5))
    session.receive(server(reply=pb.BatchReply(number=number, replies=[acquired])))
    session.receive(server(grant=pb.Grant(lease=3, members=1, units=words(10, 20), generations=words(1, 2), ended="failed")))
    granting = session.granting(3)
    assert granting is not None
    assert (granting.blocks, granting.tail) == (2, None)
