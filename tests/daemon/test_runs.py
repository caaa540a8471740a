"""Operations that come packed and are carried out as one: the same answers, and the same cache afterwards, as one by one."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from kvstore import errors
from kvstore.cache import invariants
from kvstore.cache.core import Cache
from kvstore.cache.state import CacheSizes
from kvstore.clients import requests
from kvstore.clients.answers import Answer, Failed, Slotted, read_answers
from kvstore.clients.packing import as_they_are, packed
from kvstore.daemon.bounds import PACKED
from kvstore.daemon.hub import Hub
from kvstore.daemon.streams import SessionLimits, SessionStream
from kvstore.geometry import UNIT_BYTES
from kvstore.hashing import fingerprint
from kvstore.proto import kvstore_pb2 as pb
from kvstore.tiers.dram import DramOptions, DramTier
from tests.blocks import GEOMETRY, IDENTITY

CAPACITY_BYTES = 2 << 20  # some dozens of blocks: so that a few steps fill it
EXTENT_BYTES = 1 << 18
STEPS = 25  # batches of one program

Slot = tuple[bytes, bytes]  # units, generation


class Desk:
    """A daemon's hub and one open session, without a loop running: what is sent is answered at once."""

    def __init__(self, directory: Path, eviction: str, limit_bytes: int) -> None:
        self.dram = DramTier(DramOptions(directory, "runs", CAPACITY_BYTES, EXTENT_BYTES // UNIT_BYTES, "e", prefault=False))
        sizes = CacheSizes(CAPACITY_BYTES, nvme_bytes=CAPACITY_BYTES, dram_extent_bytes=EXTENT_BYTES, eviction=eviction)
        self.hub = Hub(Cache(sizes), self.dram, "e")
        opening = requests.open_namespace(IDENTITY, GEOMETRY, "", "", requests.KEEP_ALL)
        self.namespace = self.hub.namespaces.open("default", opening).id
        self.counts: Counter[tuple[str, str]] = Counter()
        self.as_one = 0  # packed operations that were done as one
        self._stream = SessionStream(self.hub, self.dram, "default", SessionLimits(1.0, limit_bytes), self.counts)
        self._stream._receive(pb.ClientMessage(hello=pb.Hello()))  # no arena is mapped, so no lock is needed

    def ask(self, *ops: pb.Op, packs: bool = False) -> list[Answer]:
        """The answers to one batch."""
        outbound = self._stream._out._queue
        outbound.clear()
        queued = [(number, op, op.WhichOneof("kind") or "none") for number, op in enumerate(ops)]
        sent, tickets = packed(queued) if packs else as_they_are(queued)
        assert [number for each in tickets for number in each] == list(range(len(ops)))
        self._stream._receive(pb.ClientMessage(batch=pb.Batch(number=1, ops=sent)))
        replies = [reply for message, _ in outbound for reply in message.reply.replies]
        self.as_one += sum(reply.WhichOneof("kind") == "each" and not reply.each.replies for reply in replies)
        return [answer for reply, each in zip(replies, tickets, strict=True) for answer in read_answers(reply, len(each))]

    def seen(self) -> object:
        """What anybody can know of the cache, and in which order its blocks would leave."""
        state, stats = self.hub.cache.state, self.hub.cache.stats()
        blocks = {h[at : at + 32] for piece in self.hub.cache.snapshot(self.namespace) for _, h, _ in piece for at in range(0, len(h), 32)}
        live = [slot for slot in range(1, state.dram.max_slots) if state.dram.row_at[slot]]
        ages = sorted(live, key=lambda slot: (state.policies[state.dram.tier].rank(slot), slot))
        session = next(iter(state.sessions.values()))
        leases = {lease.id: (list(lease.slots[0]), list(lease.generations[0]), lease.granted) for lease in session.leases.values()}
        held = session.held_bytes, session.counts.tolist(), dict(session.reserved), leases
        return stats.tiers, stats.counters, stats.waiting_writes, blocks, ages, held, dict(self.counts)


class Decoding:
    """Makes batches much as a decoding engine does, with whatever may be wrong in one mixed in."""

    def __init__(self, seed: int, namespace: int) -> None:
        self._random = random.Random(seed)
        self._namespace = namespace
        self._ids = iter(range(1, 1 << 20))
        self.slots: list[Slot] = []
        self.leases: list[int] = []
        self.names = [fingerprint(IDENTITY)]

    def ops(self) -> list[pb.Op]:
        """Runs of reserves, commits and releases."""
        made = [self._reserve() for _ in range(self._random.randrange(12))]
        taken = [self.slots.pop(self._random.randrange(len(self.slots))) for _ in range(min(len(self.slots), self._random.randrange(14)))]
        made += [self._commit(slot) for slot in taken]
        done = [self.leases.pop(self._random.randrange(len(self.leases))) for _ in range(min(len(self.leases), self._random.randrange(14)))]
        return made + [self._release(lease) for lease in done]

    def _odd(self, one_in: int) -> bool:
        return self._random.randrange(one_in) == 0

    def _reserve(self) -> pb.Op:
        number = 0 if self._odd(80) else next(self._ids)
        named = self._random.randbytes(32) if self._odd(60) else b""
        namespace = 9 if self._odd(80) else self._namespace
        return requests.reserve(number, namespace, count=0 if named else 2 if self._odd(40) else 1, hashes=named)

    def _commit(self, slot: Slot) -> pb.Op:
        lease = self._random.choice(self.leases) if self.leases and self._odd(6) else next(self._ids)
        name = self._random.choice(self.names) if self._odd(40) else self._random.randbytes(32)
        parent = self._random.randbytes(32) if self._odd(40) else self._random.choice(self.names[-40:])
        units, generation = slot
        if self._odd(60):
            generation = self._random.randbytes(4)
        commit = pb.Commit(lease=lease, namespace_id=self._namespace, units=units, generations=generation, hashes=name, parents=parent)
        if self._odd(40):
            commit.checksums = bytes(16)
        if self._odd(60):
            commit.units = self._random.randbytes(4)
        self.names.append(name)
        self.leases.append(lease)
        return pb.Op(commit=commit)

    def _release(self, lease: int) -> pb.Op:
        return requests.release(next(self._ids) if self._odd(30) else lease, keep_blocks=1 if self._odd(30) else 0)

    def learn(self, ops: list[pb.Op], answers: list[Answer]) -> None:
        """Note the slots that were granted."""
        for op, answer in zip(ops, answers, strict=True):
            if op.HasField("reserve") and not op.reserve.hashes and isinstance(answer, Slotted):
                words = answer.units.tobytes(), answer.generations.tobytes()
                self.slots += [(words[0][at : at + 4], words[1][at : at + 4]) for at in range(0, len(words[0]), 4)]


def told(answer: Answer) -> object:
    """What an answer says."""
    if isinstance(answer, Slotted):
        return answer.outcomes.tolist(), answer.units.tolist(), answer.generations.tolist()
    return (type(answer.error), str(answer.error)) if isinstance(answer, Failed) else answer


@pytest.mark.parametrize("eviction", ["lru", "s3fifo", "cost"])
@pytest.mark.parametrize("seed", range(6))
def test_neighbours_as_one_are_as_one_by_one(tmp_path: Path, seed: int, eviction: str) -> None:
    """A batch, and the same operations in a batch each: every answer, every count, every hold and every rank is the same."""

    async def run() -> int:
        limit_bytes = CAPACITY_BYTES // 2 if seed % 3 == 2 else 0
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        together, apart = Desk(tmp_path / "a", eviction, limit_bytes), Desk(tmp_path / "b", eviction, limit_bytes)
        decoding = Decoding(seed, together.namespace)
        for _ in range(STEPS):
            ops = decoding.ops()
            if not ops:
                continue
            answers = together.ask(*ops, packs=True)
            assert [*map(told, answers)] == [told(answer) for op in ops for answer in apart.ask(op)]
            assert together.seen() == apart.seen()
            assert [broken for rule in invariants.RULES for broken in invariants.check(together.hub.cache.state, rule)] == []
            decoding.learn(ops, answers)
        together.dram.close()
        apart.dram.close()
        return together.as_one

    assert asyncio.run(run()) > STEPS // 3


def sent(ops: list[pb.Op]) -> list[tuple[str, int]]:
    """What operations leave as: (kind, for how many it stands)."""
    whole, tickets = packed([(number, op, op.WhichOneof("kind") or "none") for number, op in enumerate(ops)])
    assert [number for each in tickets for number in each] == list(range(len(ops)))
    return [(op.WhichOneof("kind") or "none", len(each)) for op, each in zip(whole, tickets, strict=True)]


def test_what_cannot_be_packed_parts_a_run() -> None:
    """A reserve of two slots, or a release from a lease's tail, stands between two runs; the order stays."""
    reserves = [requests.reserve(number, 1, count=1) for number in range(1, 6)]
    releases = [requests.release(number) for number in range(1, 6)]
    assert sent(reserves + releases) == [("reserve_each", 5), ("release_each", 5)]
    assert sent([*reserves, requests.reserve(9, 1, count=2), *reserves]) == [("reserve_each", 5), ("reserve", 1), ("reserve_each", 5)]
    assert sent([*releases, requests.release(9, 3), *releases[:2]]) == [("release_each", 5), *[("release", 1)] * 3]
    assert sent([*reserves, *(requests.reserve(number, 2, count=1) for number in range(11, 16))]) == [("reserve_each", 5)] * 2
    assert sent(reserves[:3]) == [("reserve", 1)] * 3


@pytest.mark.parametrize(
    "op",
    [
        pb.Op(reserve_each=pb.ReserveEach(namespace_id=1)),
        pb.Op(reserve_each=pb.ReserveEach(namespace_id=1, reservations=bytes(12))),
        pb.Op(release_each=pb.ReleaseEach(leases=bytes(7))),
        pb.Op(release_each=pb.ReleaseEach(leases=b"\1" + bytes(7)), pool=1),
        pb.Op(commit_each=pb.CommitEach(leases=b"\1" + bytes(7), namespace_id=1, units=bytes(4), generations=bytes(4), hashes=bytes(32))),
        pb.Op(commit_each=pb.CommitEach(leases=bytes(16), units=bytes(4), generations=bytes(8), hashes=bytes(64), parents=bytes(64))),
        pb.Op(commit_each=pb.CommitEach(leases=bytes(16), units=bytes(8), generations=bytes(8), hashes=bytes(32), parents=bytes(32))),
    ],
)
def test_a_malformed_packed_operation_is_refused_as_a_whole(tmp_path: Path, op: pb.Op) -> None:
    async def run() -> None:
        desk = Desk(tmp_path, "lru", 0)
        before = desk.seen()
        (answer,) = desk.ask(op)
        assert isinstance(answer, Failed)
        assert isinstance(answer.error, errors.InvalidArgument)
        assert desk.counts == {(PACKED[op.WhichOneof("kind") or ""], "invalid_argument"): 1}
        desk.counts.clear()
        assert desk.seen() == before
        desk.dram.close()

    asyncio.run(run())


def test_ids_that_no_lease_has_fail_alone(tmp_path: Path) -> None:
    async def run() -> None:
        desk = Desk(tmp_path, "lru", 0)
        answers = desk.ask(*(requests.reserve(number, desk.namespace, count=1) for number in (1, 0, 2, 2**62, 3)), packs=True)
        assert [isinstance(answer, Slotted) for answer in answers] == [True, False, True, False, True]
        desk.dram.close()

    asyncio.run(run())


def test_operations_on_a_pool_are_not_packed() -> None:
    pooled = [requests.reserve(number, 1, count=1, pool=1) for number in range(1, 6)]
    assert sent(pooled) == [("reserve", 1)] * 5
