"""Every message is checked before it becomes an input: values in, values or a typed error out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import errors, hashing
from kvstore.cache.messages import (
    Acquire,
    Acquired,
    BlockOutcome,
    Claimed,
    Commit,
    Committed,
    Done,
    EndReason,
    Granted,
    KeepKind,
    Refused,
    Reserve,
    Reserved,
)
from kvstore.clients import requests
from kvstore.clients.answers import Expected, Failed, Finished, Slotted, read_answer
from kvstore.clients.blocks import Prompt
from kvstore.daemon import bounds, wire
from kvstore.daemon.runs import each_of, singles_of
from kvstore.proto import kvstore_pb2 as pb
from tests.blocks import GEOMETRY, IDENTITY, chain

MESSAGES = (pb.Op, pb.Batch, pb.OpenNamespaceRequest, pb.Geometry)


def to_input(op: pb.Op) -> wire.Input:
    return wire.input_of(op, session=7, now=100.0, longest_wait_s=10.0)


def checked(*ops: pb.Op) -> list[str]:
    batch = pb.Batch(ops=ops)
    return bounds.check_batch(batch, batch.ops)


@given(kind=st.sampled_from(MESSAGES), junk=st.binary(max_size=200))
@settings(max_examples=500, deadline=None)
def test_whatever_bytes_arrive_are_an_input_or_a_callers_error(kind: type, junk: bytes) -> None:
    message = kind()
    try:
        message.ParseFromString(junk)
    except Exception:  # noqa: BLE001 — protobuf's own error, which grpc answers
        return
    try:
        match message:
            case pb.Op():
                to_input(message)
            case pb.Batch():
                bounds.check_batch(message, message.ops)
                for op in message.ops:
                    to_input(op)
            case pb.OpenNamespaceRequest():
                wire.identity_of(message)
            case pb.Geometry():
                wire.geometry_of(message)
    except errors.CallerError:
        pass


@st.composite
def ops(draw: st.DrawFn) -> pb.Op:
    number, count = draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 2**32 - 1))
    packed, other = draw(st.binary(max_size=130)), draw(st.binary(max_size=130))
    each = (
        pb.Op(acquire=pb.Acquire(lease=number, namespace_id=count, hashes=packed, timeout_s=float(count))),
        pb.Op(claim=pb.Claim(lease=number, namespace_id=count)),
        pb.Op(reserve=pb.Reserve(reservation=number, namespace_id=1, count=count, hashes=packed)),
        pb.Op(acquire=pb.Acquire(lease=number, namespace_id=count, hashes=packed, token_ids=other, root=packed[:32])),
        pb.Op(commit=pb.Commit(lease=number, namespace_id=count, units=packed, generations=other, hashes=packed, parents=other)),
        pb.Op(commit=pb.Commit(lease=1, units=bytes(4), generations=bytes(4), hashes=bytes(32), parents=bytes(32), token_ids=other)),
        pb.Op(abandon=pb.Abandon(reservation=number, units=packed, generations=other)),
        pb.Op(release=pb.Release(lease=number, keep_blocks=count)),
    )
    return draw(st.sampled_from(each))


@given(op=ops())
@settings(max_examples=500, deadline=None)
def test_whatever_an_operation_holds_it_is_an_input_or_a_callers_error(op: pb.Op) -> None:
    try:
        checked(op)
        to_input(op)
    except errors.CallerError:
        pass


@given(number=st.integers(0, 2**32 - 1), columns=st.lists(st.binary(max_size=70), min_size=5, max_size=5))
@settings(max_examples=300, deadline=None)
def test_whatever_a_packed_operation_holds_it_is_an_input_or_a_callers_error(number: int, columns: list[bytes]) -> None:
    ids, units, generations, hashes, parents = columns
    commit = pb.CommitEach(leases=ids, namespace_id=number, units=units, generations=generations, hashes=hashes, parents=parents)
    reserve = pb.ReserveEach(reservations=ids, namespace_id=number)
    for op in (pb.Op(commit_each=commit), pb.Op(reserve_each=reserve), pb.Op(release_each=pb.ReleaseEach(leases=ids))):
        try:
            checked(op)
            assert len(singles_of(each_of(op, 7))) == len(ids) // 8
        except errors.CallerError:
            pass


def test_what_the_client_writes_the_daemon_reads() -> None:
    hashes = chain(1, 3)
    acquire = to_input(requests.acquire(5, 2, hashes, 1.5))
    assert isinstance(acquire, Acquire)
    assert (acquire.session, acquire.lease, acquire.namespace, acquire.deadline_at) == (7, 5, 2, 101.5)
    assert acquire.hashes.tobytes() == hashes
    reserve = to_input(requests.reserve(6, 2, count=4))
    assert reserve == Reserve(7, 6, 2, 4)
    slots = (np.array([1, 2, 3], np.uint32), np.array([9, 8, 7], np.uint32))
    commit = to_input(requests.commit(5, 2, slots, hashes, bytes(32)))
    assert isinstance(commit, Commit)
    assert commit.units.tolist() == [1, 2, 3]
    assert commit.generations.tolist() == [9, 8, 7]
    assert commit.parents.shape == (1, 4)
    assert commit.tokens is None
    tokens = [0, 1, 2**32 - 1]
    commit = to_input(requests.commit(5, 2, slots, hashes, bytes(32), hashing.token_bytes(tokens)))
    assert isinstance(commit, Commit)
    assert commit.tokens is not None
    assert commit.tokens.tolist() == tokens
    for asked in (hashes, b""):
        acquire = to_input(requests.acquire(5, 2, asked, 1.5, Prompt(tokens, b"r" * 32)))
        assert isinstance(acquire, Acquire)
        assert acquire.prompt is not None
        assert (acquire.prompt.root, acquire.prompt.tokens.tolist()) == (b"r" * 32, tokens)
        assert acquire.hashes.tobytes() == asked


def test_what_the_daemon_answers_the_client_reads() -> None:
    numbers = np.array([4, 5], np.uint32)
    assert read_answer(wire.reply_of(Acquired(5, 2, EndReason.MISSING), 5)) == Expected(2, "missing")
    assert read_answer(wire.reply_of(Acquired(5, 2, EndReason.MISSING, 7), 5)) == Expected(2, "missing", 7)
    assert read_answer(wire.reply_of(Done(3), 5)) == Finished(3)
    slotted = read_answer(wire.reply_of(Reserved(6, np.array([1, 5], np.uint8), numbers, numbers + 1), 6))
    assert isinstance(slotted, Slotted)
    assert (slotted.outcomes.tolist(), slotted.units.tolist(), slotted.generations.tolist()) == ([1, 5], [4, 5], [5, 6])
    claimed = read_answer(wire.reply_of(Claimed(5, numbers, numbers), 5))
    assert isinstance(claimed, Slotted)
    refused = read_answer(wire.reply_of(Refused("FAILED_PRECONDITION", "the lease is still being granted"), 5))
    assert isinstance(refused, Failed)
    assert isinstance(refused.error, errors.InvalidArgument), "the session itself is well"
    failed = read_answer(wire.error_reply(errors.LimitExceeded("too many")))
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, errors.LimitExceeded)
    assert str(failed.error) == "too many"


def test_a_commits_answer_names_the_shared_slot_also_where_it_is_the_arenas_first() -> None:
    outcomes, none = np.array([BlockOutcome.EXISTS, BlockOutcome.STORED], np.uint8), np.zeros(2, np.uint32)
    shared = read_answer(wire.reply_of(Committed(6, outcomes, none, np.array([9, 0], np.uint32)), 6))
    assert isinstance(shared, Slotted)
    assert (shared.units.tolist(), shared.generations.tolist()) == ([0, 0], [9, 0])


def test_a_reserve_that_found_no_room_names_no_slot() -> None:
    none = np.zeros(0, np.uint32)
    full = read_answer(wire.reply_of(Reserved(6, np.array([BlockOutcome.NO_ROOM], np.uint8), none, none), 6))
    assert isinstance(full, Slotted)
    assert (full.outcomes.tolist(), full.units.tolist(), full.generations.tolist()) == ([BlockOutcome.NO_ROOM], [], [])


def test_an_acquires_wait_is_cut_to_what_the_daemon_allows() -> None:
    acquire = to_input(requests.acquire(5, 2, bytes(32), 3000.0))
    assert isinstance(acquire, Acquire)
    assert acquire.deadline_at == 110.0


@pytest.mark.parametrize("timeout_s", [math.nan, math.inf, -1.0, 1e9])
def test_a_time_that_is_none_is_refused(timeout_s: float) -> None:
    with pytest.raises(errors.InvalidArgument, match="timeout_s"):
        to_input(requests.acquire(5, 2, bytes(32), timeout_s))


@pytest.mark.parametrize(
    ("op", "says"),
    [
        (requests.acquire(0, 1, bytes(32), 1), "lease"),
        (requests.acquire(2**63, 1, bytes(32), 1), "lease"),
        (requests.acquire(1, 0, bytes(32), 1), "one of them"),
        (requests.acquire(1, 1, b"", 1), "at least one"),
        (requests.acquire(1, 1, bytes(33), 1), "32 a block"),
        (pb.Op(acquire=pb.Acquire(lease=1, namespace_id=1, hashes=bytes(32), token_ids=bytes(5), root=bytes(32))), "token_ids"),
        (pb.Op(acquire=pb.Acquire(lease=1, namespace_id=1, hashes=bytes(32), token_ids=bytes(4), root=bytes(31))), "root"),
        (pb.Op(acquire=pb.Acquire(lease=1, namespace_id=1, root=bytes(32))), "at least one"),
        (requests.reserve(1, 1), "one of them"),
        (requests.reserve(1, 1, count=1, hashes=bytes(32)), "one of them"),
        (requests.reserve(0, 1, count=1), "reservation"),
        (pb.Op(commit=pb.Commit(lease=1, hashes=bytes(64), parents=bytes(32), units=bytes(4), generations=bytes(8))), "units"),
        (pb.Op(commit=pb.Commit(lease=1, hashes=bytes(64), parents=bytes(32), units=bytes(8), generations=bytes(4))), "generations"),
        (pb.Op(commit=pb.Commit(lease=1, hashes=bytes(96), parents=bytes(64), units=bytes(12), generations=bytes(12))), "parents"),
        (
            pb.Op(commit=pb.Commit(lease=1, hashes=bytes(32), parents=bytes(32), units=bytes(4), generations=bytes(4), checksums=b"x")),
            "checksums",
        ),
        (pb.Op(abandon=pb.Abandon(reservation=1, units=bytes(4))), "generations"),
        (pb.Op(), "empty"),
    ],
)
def test_a_malformed_operation_is_refused_and_named(op: pb.Op, says: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=says):
        to_input(op)


def test_a_batch_has_bounds_on_operations_and_on_blocks() -> None:
    with pytest.raises(errors.LimitExceeded, match="1024"):
        checked(*[requests.release(1)] * 1025)
    with pytest.raises(errors.LimitExceeded, match="8192"):
        checked(requests.reserve(1, 1, count=8000), requests.acquire(1, 1, bytes(32 * 200), 1))
    acquire = pb.Acquire(lease=1, namespace_id=1, token_ids=bytes(2**20), root=bytes(32))
    with pytest.raises(errors.LimitExceeded, match="524288"):
        checked(pb.Op(acquire=acquire), pb.Op(commit=pb.Commit(token_ids=bytes(2**20 + 4))))
    with pytest.raises(errors.LimitExceeded):
        checked()
    packed_ops = pb.Op(release_each=pb.ReleaseEach(leases=bytes(8 * 1000)))
    checked(packed_ops, *[requests.release(1)] * 24)
    with pytest.raises(errors.LimitExceeded, match="1025"):
        checked(packed_ops, *[requests.release(1)] * 25)
    each = pb.Op(reserve_each=pb.ReserveEach(reservations=bytes(8 * 200)))
    with pytest.raises(errors.LimitExceeded, match="8192"):
        checked(each, requests.reserve(1, 1, count=8000))
    commits = pb.CommitEach(leases=bytes(8), hashes=bytes(32 * 8193))
    with pytest.raises(errors.LimitExceeded, match="8193"):
        checked(pb.Op(commit_each=commits))


def test_a_long_answer_comes_in_parts_that_say_where_they_begin() -> None:
    outcomes = np.ones(4096, np.uint8)
    numbers = np.arange(4096, dtype=np.uint32)
    replies = [wire.reply_of(Reserved(1, outcomes, numbers, numbers), 1) for _ in range(100)]
    messages = list(wire.batch_messages(3, replies, [pb.Grant(lease=7), pb.Grant(lease=8)]))
    parts = [message.reply for message in messages]
    assert len(parts) > 1
    assert [[grant.lease for grant in part.grants] for part in parts] == [[]] * (len(parts) - 1) + [[7, 8]]
    assert all(part.ByteSize() < 2 * wire.MAX_REPLY_BYTES for part in parts)
    assert [part.first_op for part in parts] == list(np.cumsum([0, *(len(part.replies) for part in parts[:-1])]))
    assert sum(len(part.replies) for part in parts) == 100


def test_grants_that_do_not_fit_beside_the_answer_follow_it() -> None:
    grants = [pb.Grant(lease=number, units=bytes(400_000)) for number in range(1, 6)]
    first, *rest = wire.batch_messages(3, [pb.OpReply()], grants)
    assert first.ByteSize() < 2 * wire.MAX_REPLY_BYTES
    assert [grant.lease for grant in [*first.reply.grants, *(message.grant for message in rest)]] == [1, 2, 3, 4, 5]
    assert rest


def test_a_large_grant_comes_in_parts_and_the_last_says_that_it_ended() -> None:
    units = np.arange(100 * 8000, dtype=np.uint32).reshape(100, 8000)
    parts = list(wire.grants_of(Granted(1, 5, 10, units, units, EndReason.COMPLETE)))
    assert [part.ended for part in parts] == [""] * (len(parts) - 1) + ["complete"]
    assert parts[1].first_block == 10 + len(parts[0].units) // 4 // 100
    joined = np.concatenate([np.frombuffer(part.units, "<u4").reshape(100, -1) for part in parts], axis=1)
    assert (joined == units).all()


def test_an_empty_grant_still_says_why_it_ended() -> None:
    none = np.zeros((1, 0), np.uint32)
    (part,) = wire.grants_of(Granted(1, 5, 0, none, none, EndReason.FAILED))
    assert part.ended == "failed"


def test_a_namespace_needs_exactly_the_five_model_facts() -> None:
    request = requests.open_namespace(IDENTITY, GEOMETRY, "", "", requests.KEEP_ALL)
    assert wire.identity_of(request).model == IDENTITY.model
    request.facts["salt"] = "x"
    with pytest.raises(errors.InvalidArgument, match="exactly"):
        wire.identity_of(request)


def test_a_geometry_travels_unchanged() -> None:
    assert wire.geometry_of(requests.geometry_message(GEOMETRY)) == GEOMETRY


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (16, 1), (17, 2), (4096, 256)])
def test_a_window_of_tokens_becomes_the_blocks_that_cover_it(tokens: int, blocks: int) -> None:
    keep = wire.keep_of(pb.Keep(kind="window", window_tokens=tokens), 16)
    assert (keep.kind, keep.window_blocks) == (KeepKind.WINDOW, blocks)


@pytest.mark.parametrize("keep", [pb.Keep(kind="window"), pb.Keep(kind="all", window_tokens=3), pb.Keep(kind="some")])
def test_a_keep_that_says_nothing_clear_is_refused(keep: pb.Keep) -> None:
    with pytest.raises(errors.InvalidArgument):
        wire.keep_of(keep, 16)


def test_outcomes_have_the_same_numbers_on_both_sides() -> None:
    from kvstore.clients.handles import OUTCOME_NAMES

    assert [outcome.name.lower() for outcome in BlockOutcome] == list(OUTCOME_NAMES)


def test_tiers_have_the_same_names_on_both_sides() -> None:
    from kvstore.cache.finding import NOT_NEEDED
    from kvstore.cache.messages import Tier
    from kvstore.clients.handles import TIER_NAMES

    assert {**{int(tier): tier.name.lower() for tier in Tier}, NOT_NEEDED: ""} == TIER_NAMES


def test_both_sides_know_the_same_limits() -> None:
    from kvstore.cache import messages
    from kvstore.clients import channel, session
    from kvstore.daemon import server

    assert session.MAX_OPS_PER_BATCH == bounds.MAX_OPS_PER_BATCH
    assert session.MAX_TOKENS_PER_BATCH == requests.MAX_TOKENS_PER_CALL == bounds.MAX_TOKENS_PER_BATCH
    assert session.MAX_BLOCKS_PER_BATCH == requests.MAX_BLOCKS_PER_CALL == messages.MAX_BLOCKS_PER_BATCH
    assert channel.MAX_MESSAGE_BYTES == server.MAX_MESSAGE_BYTES > 2 * wire.MAX_REPLY_BYTES
