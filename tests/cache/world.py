"""A naive world around the cache core: what bytes lie where, who was promised what. It knows no rule but that bytes must be right."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np

from kvstore.cache.core import Cache
from kvstore.cache.index import HAS_CHECKSUM
from kvstore.cache.invariants import all_leases, violations
from kvstore.cache.messages import (
    Acquired,
    Attach,
    BlockOutcome,
    Claimed,
    Commit,
    Committed,
    Decision,
    Done,
    Granted,
    Hashes,
    Keep,
    KeepKind,
    Mark,
    NamespaceSpec,
    Refused,
    Reserve,
    Reserved,
    SessionEnded,
    StartDelete,
    StartRead,
    StartVerify,
    StartWrite,
    Tier,
    TransferDone,
    TransferResult,
    unpack_hashes,
)
from kvstore.cache.slots import SlotState
from kvstore.cache.state import CacheSizes
from kvstore.hashing import block_hash

EXTENT_UNITS = 4
SMALL, LARGE = 1, 2  # units of the two slot sizes
UNIT = 4096
BLOCK_TOKENS = 20  # more than one chunk of ids
TAILS = 1  # the namespace that has them
ROOT = b"\0" * 32

Path = tuple[int, ...]
Slot = tuple[int, int]  # units, generation


def tokens_of(path: Path) -> list[int]:
    """The tokens of a path: each word is a block, and any two blocks begin with some of the same tokens."""
    return [1 if i < 7 * word % BLOCK_TOKENS else word + 2 for word in path for i in range(BLOCK_TOKENS)]


@functools.cache
def key_of(path: Path) -> bytes:
    """The hash of the block that ends a path in a small tree of tokens; the empty path is the fingerprint."""
    return block_hash(key_of(path[:-1]), tokens_of(path[-1:])) if path else ROOT


def chain(path: Path) -> list[bytes]:
    """The hashes of a path's prefix, first block first."""
    return [key_of(path[: i + 1]) for i in range(len(path))]


def pack(keys: list[bytes]) -> Hashes:
    return unpack_hashes(b"".join(keys))


def sizes(**changes: object) -> CacheSizes:
    """A cache of a few slots: 4 dram extents, 5 nvme extents, 40 index rows; passes of the background check are close together."""
    fixed = {
        "dram_bytes": 4 * EXTENT_UNITS * UNIT,
        "nvme_bytes": 5 * EXTENT_UNITS * UNIT,
        "dram_extent_bytes": EXTENT_UNITS * UNIT,
        "nvme_extent_bytes": EXTENT_UNITS * UNIT,
        "index_blocks": 40,
        "scrub_rest_s": 1.0,
    }
    return CacheSizes(**{**fixed, **changes})  # type: ignore[arg-type]


@dataclass
class Client:
    """One attached process as the world knows it."""

    session: int
    reserved: dict[Slot, bytes | None] = field(default_factory=dict)  # named key, or None
    reserved_in: dict[Slot, int] = field(default_factory=dict)  # namespace
    leases: dict[int, list[list[tuple[Slot, object] | None]]] = field(default_factory=dict)  # per member, granted positions
    asked: dict[int, tuple[tuple[int, ...], list[bytes]]] = field(default_factory=dict)  # namespaces and keys of an acquire
    donors: dict[int, list[bytes]] = field(default_factory=dict)  # of which an acquire's last block may be any
    marked: set[int] = field(default_factory=set)
    ended: bool = False


class World:
    """Drives a Cache and checks every promise it makes."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.now = 0.0
        self.dram: dict[int, object] = {}  # units -> content
        self.nvme: dict[int, object] = {}
        self.records: dict[int, bytes] = {}  # nvme units -> key: what a restart would find
        self.truth: dict[tuple[int, bytes], object] = {}
        self.paths: dict[bytes, Path] = {}  # of keys that were committed with their tokens
        self.spoiled: set[int] = set()  # units of dram whose content changed by itself
        self.pending: dict[int, StartRead | StartWrite | StartVerify | StartDelete] = {}
        self.clients: dict[int, Client] = {}
        self.next_session, self.next_id, self.contents = 1, 1, 0
        kinds = [(SMALL, Keep()), (LARGE, Keep()), (SMALL, Keep(KeepKind.WINDOW, 2))]
        self.units = {1: SMALL, 2: LARGE, 3: SMALL}
        for i, (units, keep) in enumerate(kinds):
            spec = NamespaceSpec("default", bytes([i]) * 32, units, units * UNIT, keep, BLOCK_TOKENS, i + 1 == TAILS)
            assert cache.open_namespace(spec) == i + 1

    # ---- the edge

    def step(self) -> None:
        """Carry out decisions, then check all rules."""
        while decisions := self.cache.drain():
            for decision in decisions:
                self._carry_out(decision)
        broken = violations(self.cache.state)
        assert not broken, "\n".join(broken)
        self._promises_hold()

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Granted():
                self._granted(decision)
            case Mark():
                if client := self.clients.get(decision.session):
                    client.marked |= set(decision.granted.tolist())
                    client.marked -= set(decision.withdrawn.tolist())
            case StartRead() | StartWrite() | StartVerify() | StartDelete():
                self.pending[decision.transfer] = decision
            case SessionEnded():
                if client := self.clients.get(decision.session):
                    client.ended = True
                    if not decision.orphans:
                        self.cache.process_gone(decision.session)
                        del self.clients[decision.session]
            case _:
                pass

    def _granted(self, grant: Granted) -> None:
        client = self.clients.get(grant.session)
        if client is None or grant.lease not in client.asked:
            return
        namespaces, keys = client.asked[grant.lease]
        held = client.leases.setdefault(grant.lease, [[] for _ in namespaces])
        for member, namespace in enumerate(namespaces):
            assert len(held[member]) == grant.first, "grants come in chain order"
            for i in range(grant.units.shape[1]):
                slot = (int(grant.units[member, i]), int(grant.generations[member, i]))
                if not slot[1]:
                    assert namespace == 3, "only a window has holes"
                    held[member].append(None)
                    continue
                content = self.dram[slot[0]]
                position = grant.first + i
                mine = [keys[position]] if position < len(keys) else client.donors[grant.lease]
                assert content in [self.truth[namespace, key] for key in mine], "a granted block has the bytes that were committed"
                assert slot[0] in client.marked, "a slot is marked before it is granted"
                held[member].append((slot, content))
        if grant.ended and len(namespaces) == 2:
            window = held[namespaces.index(3)]
            assert all(entry is not None for entry in window[-2:]), "a window has its last blocks"

    def _promises_hold(self) -> None:
        for client in self.clients.values():
            for members in client.leases.values():
                for position in (entry for member in members for entry in member if entry):
                    (units, _), content = position
                    assert self.dram[units] == content or units in self.spoiled, "a leased slot keeps its bytes"
                    assert units in client.marked

    # ---- what clients do

    def attach(self, guarantee: int, limit: int, resume: int) -> None:
        session, self.next_session = self.next_session, self.next_session + 1
        answer = self.cache.attach(Attach(session, "default", guarantee * UNIT, limit * UNIT, resume), self.now)
        if isinstance(answer, Refused):
            return
        self.clients[session] = Client(session)
        if resume:
            old = self.clients.pop(resume)
            self.clients[session] = Client(session, dict.fromkeys(old.reserved), old.reserved_in, old.leases)  # keys went with the end

    def reserve(self, client: Client, namespace: int, keys: list[bytes], count: int) -> None:
        self.next_id += 1
        request = Reserve(client.session, self.next_id, namespace, count, pack(keys) if keys else None)
        answer = self.cache.reserve(request)
        assert isinstance(answer, Reserved)
        named: list[bytes | None] = list(keys) if keys else [None] * count
        for i, outcome in enumerate(answer.outcomes.tolist()):
            if outcome == BlockOutcome.SLOT:
                slot = (int(answer.units[i]), int(answer.generations[i]))
                assert slot not in client.reserved
                client.reserved[slot] = named[i]
                client.reserved_in[slot] = namespace
            elif outcome == BlockOutcome.EXISTS:
                assert (namespace, named[i]) in self.truth

    def commit(self, client: Client, slots: list[Slot], path: Path, lease: int, bare: bool = False) -> None:
        """`bare`: without token ids."""
        namespace = client.reserved_in[slots[0]]
        slots = [slot for slot in slots if client.reserved_in[slot] == namespace][: len(path)]
        keys = chain(path)[: len(slots)]
        for slot in slots:
            self._fill(slot[0], self._fresh())
        units, generations = (np.array(column, np.uint32) for column in zip(*slots, strict=True))
        tokens = None if bare or namespace != TAILS else np.array(tokens_of(path[: len(slots)]), np.uint32)
        request = Commit(client.session, lease, namespace, units, generations, pack(keys), pack([ROOT]), tokens=tokens)
        answer = self.cache.commit(request)
        if isinstance(answer, Refused):
            return
        if tokens is not None:
            self.paths.update((key, path[: i + 1]) for i, key in enumerate(keys))
        assert isinstance(answer, Committed)
        held = client.leases.setdefault(lease, [[]])
        for i, (slot, key) in enumerate(zip(slots, keys, strict=True)):
            named = client.reserved[slot]
            match answer.outcomes[i]:
                case BlockOutcome.STORED:
                    assert named in (None, key)
                    self.truth[namespace, key] = self.dram[slot[0]]
                    held[0].append((slot, self.dram[slot[0]]))
                    del client.reserved[slot], client.reserved_in[slot]
                    self._void(namespace, key)
                case BlockOutcome.EXISTS:
                    shared = (int(answer.units[i]), int(answer.generations[i]))
                    client.reserved[slot] = None
                    assert not shared[1] or shared[0] not in self.spoiled, "a shared slot has the bytes that were committed"
                    held[0].append((shared, self.truth[namespace, key]) if shared[1] else None)
                case BlockOutcome.BAD_KEY:
                    assert named not in (None, key)
                case BlockOutcome.NO_ROOM:
                    pass
                case other:
                    raise AssertionError(other)

    def _void(self, namespace: int, key: bytes) -> None:
        """Reservations of a key that somebody else has committed first are reservations of nothing in particular."""
        for client in self.clients.values():
            for slot, named in client.reserved.items():
                if named == key and client.reserved_in[slot] == namespace:
                    client.reserved[slot] = None

    def release(self, client: Client, lease: int, keep: int, answer: Done | Refused) -> None:
        assert isinstance(answer, Done)
        if keep:
            for member in client.leases.get(lease, []):
                del member[keep:]
            if lease in client.asked:
                namespaces, keys = client.asked[lease]
                client.asked[lease] = (namespaces, keys[:keep])
        else:
            client.leases.pop(lease, None)
            client.asked.pop(lease, None)

    def acquired(self, client: Client, lease: int, namespaces: tuple[int, ...], keys: list[bytes], answer: object) -> None:
        if isinstance(answer, Acquired):
            assert answer.expected - (answer.tail_tokens > 0) <= len(keys)
            client.asked[lease] = (namespaces, keys)
            client.leases[lease] = [[] for _ in namespaces]

    def claimed(self, client: Client, lease: int, source: Client, member: int, answer: object) -> None:
        if isinstance(answer, Claimed) and client is not source:
            client.leases[lease] = [list(source.leases[lease][member])]
            got = [(int(u), int(g)) for u, g in zip(answer.units, answer.generations, strict=True)]
            assert got == [entry[0] if entry else (0, 0) for entry in client.leases[lease][0]]

    # ---- what memory and disk do by themselves

    def rot(self, seed: int, tier: Tier) -> None:
        """The bytes of a block with a checksum change. In dram not of one that was verified for a lease and is not granted yet."""
        state = self.cache.state
        if tier not in state.tables or (tier is Tier.DRAM and not state.verifies_hits):
            return
        table = state.tables[tier]
        live = np.flatnonzero(table.state == SlotState.LIVE)
        live = live[(state.index.flags[table.row[live]] & HAS_CHECKSUM) > 0]
        if tier is Tier.DRAM:
            soon = {slot for lease in all_leases(state) for member in lease.slots for slot in member[lease.granted :]}
            live = live[~np.isin(live, list(soon))]
        if live.size:
            units = table.units_at[int(live[seed % len(live)])]
            (self.dram if tier is Tier.DRAM else self.nvme)[units] = self._fresh()
            if tier is Tier.DRAM:
                self.spoiled.add(units)

    def _fresh(self) -> int:
        self.contents += 1
        return self.contents

    def _fill(self, units: int, content: object) -> None:
        self.dram[units] = content
        self.spoiled.discard(units)

    # ---- what the mover does

    def finish(self, transfer: int, result: TransferResult) -> None:
        job = self.pending.pop(transfer)
        checksum = None
        match job:
            case StartWrite():
                content = self.dram[job.source_units]
                checksum = summed(content)
                if self.cache.state.verifies_hits and job.checksum not in (None, checksum):
                    result = TransferResult.CORRUPT
                self.nvme[job.target_units] = content if result is TransferResult.OK else "torn"
                if result is not TransferResult.FAILED:
                    self.records[job.target_units] = job.hash
            case StartRead():
                content = self.nvme.get(job.source_units)
                checksum = summed(content)
                if result is TransferResult.OK and checksum != job.checksum:
                    result = TransferResult.CORRUPT
                self._fill(job.target_units, content if result is TransferResult.OK else "half")
            case StartVerify():
                checksum = summed((self.dram if job.tier is Tier.DRAM else self.nvme).get(job.units))
                if result is TransferResult.OK and job.checksum not in (None, checksum):
                    result = TransferResult.CORRUPT
            case StartDelete():
                if result is TransferResult.OK:
                    for units in job.units.tolist():
                        self.records.pop(units, None)
        self.cache.transfer_done(TransferDone(transfer, result, checksum), self.now)


def summed(content: object) -> tuple[int, int]:
    return hash(("sum", content)) & 0xFFFF_FFFF, 1
