"""Neighbours that are carried out as one: the same answers, and the same cache afterwards, as one by one."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from kvstore.cache import invariants
from kvstore.cache.core import Cache
from kvstore.cache.state import CacheSizes
from kvstore.clients import requests
from kvstore.daemon.hub import Hub
from kvstore.daemon.runs import Run, runs_of
from kvstore.daemon.streams import SessionLimits, SessionStream
from kvstore.daemon.wire import check_batch
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
        self._stream = SessionStream(self.hub, self.dram, "default", SessionLimits(1.0, limit_bytes), self.counts)
        self._stream._receive(pb.ClientMessage(hello=pb.Hello()))  # no arena is mapped, so no lock is needed

    def ask(self, *ops: pb.Op) -> list[pb.OpReply]:
        """The answers to one batch."""
        outbound = self._stream._out._queue
        outbound.clear()
        self._stream._receive(pb.ClientMessage(batch=pb.Batch(number=1, ops=ops)))
        return [reply for message, _ in outbound for reply in message.reply.replies]

    def seen(self) -> object:
        """What anybody can know of the cache, and in which order its blocks would leave."""
        state, stats = self.hub.cache.state, self.hub.cache.stats()
        blocks = {hashes[at : at + 32] for _, hashes, _ in self.hub.cache.snapshot(self.namespace) for at in range(0, len(hashes), 32)}
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

    def learn(self, ops: list[pb.Op], replies: list[pb.OpReply]) -> None:
        """Note the slots that were granted."""
        for op, reply in zip(ops, replies, strict=True):
            if op.HasField("reserve") and not op.reserve.hashes:
                words = reply.slots.units, reply.slots.generations
                self.slots += [(words[0][at : at + 4], words[1][at : at + 4]) for at in range(0, len(words[0]), 4)]


@pytest.mark.parametrize("eviction", ["lru", "s3fifo", "cost"])
@pytest.mark.parametrize("seed", range(6))
def test_neighbours_as_one_are_as_one_by_one(tmp_path: Path, seed: int, eviction: str) -> None:
    """A batch, and the same operations in a batch each: every answer, every count, every hold and every rank is the same."""

    async def run() -> int:
        limit_bytes = CAPACITY_BYTES // 2 if seed % 3 == 2 else 0
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        together, apart = Desk(tmp_path / "a", eviction, limit_bytes), Desk(tmp_path / "b", eviction, limit_bytes)
        decoding, as_one = Decoding(seed, together.namespace), 0
        for _ in range(STEPS):
            ops = decoding.ops()
            if not ops:
                continue
            before = together.hub.cache.stats().counters.get("committed", 0)
            replies = together.ask(*ops)
            assert replies == [reply for op in ops for reply in apart.ask(op)]
            assert together.seen() == apart.seen()
            assert [broken for rule in invariants.RULES for broken in invariants.check(together.hub.cache.state, rule)] == []
            as_one += together.hub.cache.stats().counters.get("committed", 0) - before >= 4
            decoding.learn(ops, replies)
        together.dram.close()
        apart.dram.close()
        return as_one

    assert asyncio.run(run()) > STEPS // 6


def kinds_of(runs: list[Run]) -> list[tuple[str, int, bool]]:
    return [(run.kind, len(run.ops), run.each is not None) for run in runs]


def read(ops: list[pb.Op]) -> list[tuple[str, int, bool]]:
    batch = pb.Batch(ops=ops)
    return kinds_of(runs_of(batch.ops, check_batch(batch), 1))


def test_what_cannot_be_done_as_one_parts_a_run() -> None:
    """A reserve of two slots, or a release from a lease's tail, stands between two runs; the order stays."""
    reserves = [requests.reserve(number, 1, count=1) for number in range(1, 6)]
    releases = [requests.release(number) for number in range(1, 6)]
    assert read(reserves + releases) == [("reserve", 5, True), ("release", 5, True)]
    two = [("reserve", 5, True), ("reserve", 1, False), ("reserve", 5, True)]
    assert read([*reserves, requests.reserve(9, 1, count=2), *reserves]) == two
    tail = [("release", 5, True), ("release", 1, False), ("release", 2, False)]
    assert read([*releases, requests.release(9, 3), *releases[:2]]) == tail
    assert read(reserves[:3]) == [("reserve", 3, False)]


def test_operations_on_a_pool_are_done_one_by_one() -> None:
    """The cache of host memory is not asked about them."""
    pooled = [requests.reserve(number, 1, count=1, pool=1) for number in range(1, 6)]
    assert read(pooled) == [("reserve", 5, False)]
