"""Publishing in C does what its twins in numpy and Python do: the same answers, and the same arrays afterwards."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from kvstore.cache import invariants, leases, ready
from kvstore.cache.core import Cache
from kvstore.cache.messages import (
    Acquire,
    Acquired,
    Attach,
    Commit,
    Committed,
    Hashes,
    NamespaceSpec,
    Refused,
    Release,
    Reserve,
    Reserved,
    Tier,
    TransferDone,
    TransferResult,
    Units,
    unpack_hashes,
)
from kvstore.cache.singles import CommitEach
from kvstore.cache.state import CacheSizes
from kvstore.native.library import library

UNIT = 4096
TENANT, SMALL, LARGE = "t", 1, 2  # namespaces with slots of one and of two units
STEPS = 60  # of one program
pytestmark = pytest.mark.skipif(library() is None, reason="the compiled library was not built, or is switched off")


def caches(verify: str) -> tuple[Cache, Cache]:
    """One that publishes and leases in C, and one that does not."""
    made = []
    for compiled in (True, False):
        sizes = CacheSizes(160 * UNIT, nvme_bytes=160 * UNIT, dram_extent_bytes=16 * UNIT, index_blocks=400, verify=verify)
        cache = Cache(replace(sizes, nvme_extent_bytes=16 * UNIT))
        for namespace, units in ((SMALL, 1), (LARGE, 2)):
            assert cache.open_namespace(NamespaceSpec(TENANT, bytes([namespace]) * 32, units, units * UNIT)) == namespace
        cache.attach(Attach(1, TENANT), 0.0)
        cache.attach(Attach(2, TENANT, limit_bytes=24 * UNIT), 0.0)
        if not compiled:
            cache.state.index.native = None
        made.append(cache)
    return made[0], made[1]


def arrays_of(cache: Cache) -> list[object]:
    """All that publishing writes."""
    index, dram, state = cache.state.index, cache.state.dram, cache.state
    links = (index.parent, index.first_child, index.next_sibling, index.previous_sibling, index.flags, index.namespace, index.hash)
    slots = (dram.row, dram.holds, dram.state, dram.generation, index.slot[Tier.DRAM], index.children[Tier.DRAM], index.checksum)
    leases = [lease for each in state.sessions.values() for lease in each.leases.values()]
    held = [(lease.id, lease.slots, lease.generations, lease.granted) for lease in leases]
    sessions = [(each.reserved, each.held_bytes, each.counts.tolist()) for each in state.sessions.values()]
    queues = len(state.to_write), len(state.to_sum), np.flatnonzero(state.writer).tolist()
    books = dram.bytes_in, dram.held_bytes, dram.blocks, dict(state.counters), queues, dram.transfers.tolist()
    return [array.tolist() for array in (*links, *slots)] + [held, sessions, books, sorted(index.table.tolist())]


class Writer:
    """Makes the same operations for both, most of them right."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.pair = caches("read" if seed % 2 else "transfer")
        self.free: list[tuple[int, int, int]] = []  # anonymous slots: namespace, unit, generation
        self.known = [bytes(32)]
        self.leases: list[int] = []
        self.acquired: list[tuple[int, int]] = []  # session and lease
        self.stored: dict[int, list[bytes]] = {SMALL: [], LARGE: []}  # keys by namespace
        self.writing: list[int] = []  # transfers to the disk
        self.as_one = 0  # packed commits, and leases, that were done as one
        self.ids = iter(range(1, 1 << 20))

    def both(self, request: Reserve | Commit | CommitEach | Release | Acquire) -> object:
        """What both answer."""
        answers = []
        for cache in self.pair:
            match request:
                case Reserve():
                    answers.append(told(cache.reserve(request)))
                case Commit():
                    answers.append(told(cache.commit(request)))
                case CommitEach():
                    answers.append(cache.commit_each(request))
                case Release():
                    answers.append(told(cache.release(request)))
                case Acquire():
                    answers.append(told(cache.acquire(request, 0.0)))
        assert answers[0] == answers[1]
        return answers[0]

    def odd(self, one_in: int) -> bool:
        return self.chance.randrange(one_in) == 0

    def keys(self, count: int) -> Hashes:
        return unpack_hashes(self.chance.randbytes(32 * count)).copy()

    def reserve(self) -> None:
        namespace, count = self.chance.choice((SMALL, LARGE)), self.chance.randrange(1, 9)
        answer = self.pair[0].reserve(request := Reserve(1, next(self.ids), namespace, count))
        assert told(self.pair[1].reserve(request)) == told(answer)
        assert isinstance(answer, Reserved)
        self.free += [(namespace, unit, tenure) for unit, tenure in zip(answer.units.tolist(), answer.generations.tolist(), strict=True)]

    def where(self, taken: list[tuple[int, int, int]]) -> tuple[Units, Units]:
        """Slots as they are named, sometimes wrongly."""
        units, generations = (np.array([each[place] for each in taken], np.uint32) for place in (1, 2))
        if self.odd(8):
            generations[self.chance.randrange(len(taken))] += 1
        if self.odd(8):
            units[self.chance.randrange(len(taken))] = self.chance.choice([units[0], 3, 1 << 20, 2**32 - 1])
        return units, generations

    def commit_each(self) -> None:
        """Anonymous slots, each below some known key."""
        namespace = self.chance.choice((SMALL, LARGE))
        taken = [each for each in self.free if each[0] == namespace][: self.chance.randrange(1, 12)]
        if not taken:
            return
        units, generations = self.where(taken)
        keys = self.keys(len(taken))
        if self.odd(8):
            keys[0] = keys[-1] if self.odd(2) else unpack_hashes(self.chance.choice(self.known))
        parents = unpack_hashes(b"".join(self.chance.choices(self.stored[namespace][-6:] or self.known, k=len(taken))))
        leases = [self.chance.choice(self.leases) if self.leases and self.odd(9) else next(self.ids) for _ in taken]
        session = 2 if self.odd(12) else 1
        if self.both(CommitEach(session, namespace, leases, units, generations, keys, parents)):
            self.as_one += 1
            self.free = [each for each in self.free if each not in taken]
            self.known += (stored := [key.tobytes() for key in keys])
            self.stored[namespace] += stored
            self.leases += leases

    def commit_chain(self) -> None:
        """Reserved by name, or anonymous; in one go or in two."""
        namespace, count = self.chance.choice((SMALL, LARGE)), self.chance.randrange(1, 20)
        keys, before, named = self.keys(count), unpack_hashes(self.chance.choice(self.known)), self.odd(2)
        reserve = Reserve(1, next(self.ids), namespace, hashes=keys) if named else Reserve(1, next(self.ids), namespace, count)
        answer = self.pair[0].reserve(reserve)
        assert told(self.pair[1].reserve(reserve)) == told(answer)
        assert isinstance(answer, Reserved)
        count = int(np.count_nonzero(answer.units))
        units, generations = answer.units[:count].copy(), answer.generations[:count].copy()
        if not count:
            return
        if self.odd(6):
            keys = keys.copy()
            keys[self.chance.randrange(count)] = keys[0] if self.odd(2) else self.keys(1)[0]
        if self.odd(8):
            units, generations = self.where([(namespace, *each) for each in zip(units.tolist(), generations.tolist(), strict=True)])
        sums = np.arange(2 * count, dtype=np.uint64).reshape(count, 2) if self.odd(2) else None
        parents = keys[:1] if self.odd(10) else before if self.odd(2) else np.concatenate([before, keys[: count - 1]])
        whole = Commit(1, next(self.ids), namespace, units, generations, keys[:count], parents, sums)
        for start, end in [(0, count)] if self.odd(2) or len(parents) > 1 else [(count // 2, count), (0, count // 2)]:
            if end > start:
                part = replace(whole, units=units[start:end], generations=generations[start:end], hashes=keys[start:end], checksums=None)
                self.both(part if end - start < count else whole)
        self.known += [key.tobytes() for key in keys[:count]]
        self.stored[namespace] += [key.tobytes() for key in keys[:count][self.pair[0].has(namespace, keys[:count])]]
        self.leases.append(whole.lease)

    def look(self) -> None:
        """A prefix of what was committed once, and something new in it."""
        asked = self.known[(first := self.chance.randrange(len(self.known))) : first + self.chance.randrange(1, 40)]
        if self.odd(2):
            asked.insert(self.chance.randrange(len(asked)), self.chance.randbytes(32))
        for namespace in (SMALL, LARGE, 3):
            looked = self.pair[0].lookup(TENANT, namespace, "", unpack_hashes(b"".join(asked)))
            codes = looked if isinstance(looked, Refused) else looked.tiers[0][: looked.blocks].tobytes()
            assert [cache.leading(TENANT, namespace, b"".join(asked)) for cache in self.pair] == [codes, codes]

    def acquire(self) -> None:
        """A run of what was committed, mostly still there, now and then with something twice or new in it."""
        namespace = self.chance.choice((SMALL, LARGE))
        stored = self.stored[namespace]
        if not stored:
            return
        first = self.chance.randrange(len(stored))
        asked = stored[first : first + self.chance.randrange(1, 12)]
        if self.odd(4):
            asked.insert(self.chance.randrange(len(asked) + 1), self.chance.choice([stored[first], self.chance.randbytes(32)]))
        session, lease = self.chance.choice((1, 1, 2)), next(self.ids)
        answer = self.both(Acquire(session, lease, unpack_hashes(b"".join(asked)), 1.0, namespace))
        self.as_one += isinstance(answer, Acquired) and answer.expected == len(asked) and not self.pair[0].state.verifies_hits
        self.acquired.append((session, lease))

    def write_down(self) -> None:
        """Begin to copy some blocks to the disk, and end with others: what is being copied is held, though by no session."""
        begun = [cache.next_writes(4) for cache in self.pair]
        assert [str(write) for write in begun[0]] == [str(write) for write in begun[1]]
        self.writing += [write.transfer for write in begun[0]]
        for _ in range(self.chance.randrange(6)):
            if self.writing:
                done = TransferDone(self.writing.pop(self.chance.randrange(len(self.writing))), TransferResult.OK, (1, 1))
                for cache in self.pair:
                    cache.transfer_done(done, 0.0)

    def release(self) -> None:
        for _ in range(min(len(self.leases), self.chance.randrange(8))):
            self.both(Release(1, self.leases.pop(self.chance.randrange(len(self.leases)))))
        for _ in range(min(len(self.acquired), self.chance.randrange(4))):
            self.both(Release(*self.acquired.pop(self.chance.randrange(len(self.acquired)))))


def told(answer: object) -> object:
    """What an answer says, to be compared."""
    if isinstance(answer, Reserved | Committed):
        return answer.outcomes.tolist(), answer.units.tolist(), answer.generations.tolist()
    return answer


@pytest.mark.parametrize("seed", range(8))
def test_compiled_and_plain_publishing_are_the_same_after_any_sequence(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (leases, ready):
        monkeypatch.setattr(module, "MAX_SLOT_HOLDS", 3)  # so that a session comes to the most that it may hold
    writer, copied = Writer(seed), False
    for _ in range(STEPS):
        writer.chance.choice((writer.reserve, writer.commit_each, writer.commit_chain, writer.acquire, writer.release, writer.write_down))()
        writer.look()
        copied |= bool(writer.pair[0].state.dram.transfers.any())
        compiled, plain = (arrays_of(cache) for cache in writer.pair)
        assert compiled == plain
        for cache in writer.pair:
            assert [broken for rule in invariants.RULES for broken in invariants.check(cache.state, rule)] == []
        granted = [[str(decision) for decision in cache.drain()] for cache in writer.pair]
        assert granted[0] == granted[1]
    assert writer.as_one
    assert copied
