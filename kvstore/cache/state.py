"""All that the core knows, and the few steps that every operation is made of. Owned by one event loop; no locks, no I/O, no clock.

`reading`, `writing`, `moving` and `sessions` are functions over this state; `core.Cache` is the façade that the edges call.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count

import numpy as np

from kvstore.cache.eviction.candidates import Candidates
from kvstore.cache.eviction.lru import Lru
from kvstore.cache.index import Index
from kvstore.cache.messages import (
    UNIT_BYTES,
    Decision,
    EndReason,
    Hashes,
    Keep,
    Mark,
    NamespaceSpec,
    Notice,
    NoticeKind,
    Priority,
    StartDelete,
    Tier,
)
from kvstore.cache.slots import DIRTY, QUEUED, SlotIds, SlotState, SlotTable
from kvstore.cache.story import Story

HOLE = -1  # not a count: in a lease, a position for which this member has, or needs, no slot

MIN_INDEX_BLOCKS = 65_536  # rows: some 7 MB when all are used
INDEX_BYTES_PER_BLOCK = 32_768  # of the tiers, when the index is sized by itself: small models in blocks of 16 still fit


@dataclass(frozen=True)
class CacheSizes:
    """What the core is built for. 0 means: decide from the rest."""

    dram_bytes: int
    nvme_bytes: int = 0
    dram_extent_bytes: int = 0
    nvme_extent_bytes: int = 0
    index_blocks: int = 0
    nvme_write: str = "through"  # through, on_evict, off
    seed: int = 0x5DEECE66D  # secret in a daemon, fixed in a test
    silence_s: float = 30.0
    max_sessions: int = 256


def extent_bytes_for(capacity_bytes: int) -> int:
    """An extent size for a tier: a 32nd of it in whole 2 MiB, between 2 MiB and 1 GiB. A block must fit into one."""
    step = 2 << 20  # a huge page
    return min(1 << 30, max(step, capacity_bytes // 32 // step * step))


@dataclass
class Lease:
    """The right to read a run of blocks. `slots[m][i]` is member m's slot at position i; 0 while on its way, HOLE where none is needed."""

    id: int
    session: int
    group: str
    namespaces: tuple[int, ...]
    slots: list[array[int]]
    generations: list[array[int]]
    whole: bool = False  # a member keeps a window: nothing is granted before the length is settled
    granted: int = 0  # leading positions that the client knows of
    pending: int = 0  # loads that have not ended
    cut_at: int = 1 << 30  # a whole lease: the first position whose load failed
    deadline_at: float = 0.0
    reason: EndReason = EndReason.COMPLETE  # why there will be no more
    ended: bool = True  # no more grants will come
    closed: bool = False  # released
    hashes: Hashes | None = None  # a whole lease: what was asked, until it has ended

    def __len__(self) -> int:
        """Positions granted, or still expected to be."""
        return len(self.slots[0])


@dataclass
class Session:
    id: int
    tenant: str
    guarantee_bytes: int
    limit_bytes: int
    counts: np.ndarray[tuple[int], np.dtype[np.uint16]]  # holds of this session on each dram slot
    heard_at: float
    held_bytes: int = 0
    leases: dict[int, Lease] = field(default_factory=dict)
    reserved: dict[int, int] = field(default_factory=dict)  # slot -> reservation
    ended: bool = False


@dataclass
class Group:
    name: str
    tenant: str
    namespaces: tuple[int, ...]
    sessions: set[int] = field(default_factory=set)
    leases: dict[int, Lease] = field(default_factory=dict)


class TransferKind(StrEnum):
    READ = "read"  # nvme to dram
    WRITE = "write"  # dram to nvme
    DELETE = "delete"  # records on nvme


@dataclass
class Transfer:
    """One copy of one block between two tiers, or the deletion of records. `row` becomes 0 when the block is removed meanwhile."""

    id: int
    kind: TransferKind
    row: int
    source: int = 0
    target: int = 0
    priority: Priority = Priority.WRITE
    waiters: list[tuple[Lease, int, int]] = field(default_factory=list)  # (lease, member, position)
    deleting: tuple[int, ...] = ()
    quarantine: bool = False


class WriteQueue:
    """Dram slots whose blocks are to be written to nvme, oldest first: a ring with a place for each slot, so it never overflows."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._ring = np.zeros(table.max_slots + 1, np.int32)
        self._first = self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, slot: int) -> None:
        """Mark a slot dirty. One that is queued already (perhaps for an earlier block) is not queued twice."""
        flags = self._table.flags_at
        if not flags[slot] & QUEUED:
            self._ring[(self._first + self._count) % len(self._ring)] = slot
            self._count += 1
        flags[slot] |= DIRTY | QUEUED

    def add_many(self, slots: SlotIds) -> None:
        """`add` for distinct slots."""
        flags = self._table.flags
        fresh = slots[(flags[slots] & QUEUED) == 0]
        self._ring[(self._first + self._count + np.arange(len(fresh))) % len(self._ring)] = fresh
        self._count += len(fresh)
        flags[slots] |= DIRTY | QUEUED

    def peek(self) -> int:
        """The oldest slot that is still dirty; 0 when there is none."""
        flags = self._table.flags_at
        while self._count:
            slot = int(self._ring[self._first])
            if flags[slot] & DIRTY:
                return slot
            self.pop()
        return 0

    def pop(self) -> None:
        """Drop the oldest; its block is clean, or gone."""
        self._table.flags_at[int(self._ring[self._first])] &= ~(DIRTY | QUEUED)
        self._first = (self._first + 1) % len(self._ring)
        self._count -= 1


class State:
    def __init__(self, sizes: CacheSizes) -> None:
        self.sizes = sizes
        capacities = {Tier.DRAM: sizes.dram_bytes}
        extents = {Tier.DRAM: sizes.dram_extent_bytes, Tier.NVME: sizes.nvme_extent_bytes}
        if sizes.nvme_bytes:
            capacities[Tier.NVME] = sizes.nvme_bytes
        total_bytes = sum(capacities.values())
        rows = sizes.index_blocks or max(MIN_INDEX_BLOCKS, total_bytes // INDEX_BYTES_PER_BLOCK)
        self.index = Index(rows, tuple(capacities), sizes.seed)
        self.tables: dict[Tier, SlotTable] = {}
        for tier, capacity in capacities.items():
            extent = extents[tier] or extent_bytes_for(capacity)
            slots = min(capacity // UNIT_BYTES, 2 * rows)  # twice: extents may hold many free slots
            self.tables[tier] = SlotTable(tier, capacity // UNIT_BYTES, extent // UNIT_BYTES, slots)
        self.dram = self.tables[Tier.DRAM]
        self.nvme = self.tables.get(Tier.NVME)
        self.policies = {tier: Lru(table.max_slots) for tier, table in self.tables.items()}
        self._candidates: dict[tuple[Tier, int], Candidates] = {}
        self.namespaces: list[NamespaceSpec | None] = [None]  # by id; 0 is none
        self.namespace_ids: dict[bytes, int] = {}
        self.sessions: dict[int, Session] = {}
        self.groups: dict[tuple[str, str], Group] = {}  # by tenant and name
        self.writers: dict[int, int] = {}  # row of a reserved key -> the dram slot reserved for it
        self.transfers: dict[int, Transfer] = {}
        self.reading: dict[int, Transfer] = {}  # by row
        self.writing: dict[int, Transfer] = {}  # by row
        self.transfer_ids = count(1)
        self.to_write = WriteQueue(self.dram)
        self.writes_paused_until = 0.0
        self.retry_deletes: list[Transfer] = []
        self.waiting: list[Lease] = []  # leases with loads pending
        self.advanced: list[Lease] = []  # leases that may have more to grant, until the next drain
        self.clears: dict[int, set[int]] = {}  # clear -> transfers that must end before it is durable
        self.counters: Counter[str] = Counter()
        self.story = Story()
        self.now = 0.0
        self._deletes: list[int] = []
        self._out: list[Decision] = []
        self._marks: dict[int, set[int]] = {}  # session -> dram slots whose holds by it began or ended
        self._notices: list[tuple[tuple[NoticeKind, int, Tier | None], list[bytes], list[bytes]]] = []

    # ---- names

    def spec(self, namespace: int) -> NamespaceSpec:
        spec = self.namespaces[namespace]
        if spec is None:
            raise KeyError(namespace)
        return spec

    def keep(self, namespace: int) -> Keep:
        return self.spec(namespace).keep

    def candidates(self, tier: Tier, slot_units: int) -> Candidates:
        key = (tier, slot_units)
        if key not in self._candidates:
            self._candidates[key] = Candidates(self.index, self.tables[tier], self.policies[tier], slot_units)
        return self._candidates[key]

    def listed_candidates(self) -> list[tuple[tuple[Tier, int], Candidates]]:
        """Every size class whose candidates are kept, by (tier, slot_units)."""
        return list(self._candidates.items())

    def waiting_deletes(self) -> list[int]:
        """Nvme slots whose records will be deleted with the next drain."""
        return self._deletes

    # ---- steps that keep the books

    def touch(self, tier: Tier, slot: int) -> None:
        """Somebody asked for this block."""
        self.policies[tier].used(slot)
        self.candidates(tier, self.tables[tier].slot_units_of(slot)).used(slot)

    def expose(self, tier: Tier, slot: int) -> None:
        """Tell the candidates if the slot is evictable now."""
        table = self.tables[tier]
        if table.state_at[slot] == SlotState.LIVE:
            candidates = self.candidates(tier, table.slot_units_of(slot))
            if candidates.evictable(slot):
                candidates.expose(slot)

    def hold_for(self, session: Session | None, slot: int) -> None:
        """One more lease on a dram slot; `session` None: only the group's."""
        self.dram.hold(slot, 1)
        if session is not None:
            self.count_for(session, slot, 1)

    def unhold_for(self, session: Session | None, slot: int) -> None:
        """One lease less; a doomed slot that nobody holds any more is freed."""
        if session is not None:
            self.count_for(session, slot, -1)
        self.dram.hold(slot, -1)
        self.settle(self.dram, slot)

    def hold_many(self, session: Session | None, slots: SlotIds) -> None:
        """`hold_for` for distinct slots."""
        self.dram.hold_many(slots, 1)
        if session is not None:
            self.count_many(session, slots, 1)

    def unhold_many(self, session: Session | None, slots: SlotIds) -> None:
        """`unhold_for` for distinct slots."""
        if session is not None:
            self.count_many(session, slots, -1)
        self.dram.hold_many(slots, -1)
        doomed = self.dram.state[slots] == SlotState.DOOMED
        for slot in slots[doomed].tolist():
            self.settle(self.dram, slot)
        self.expose_many(Tier.DRAM, slots[~doomed])

    def by_size(self, tier: Tier, slots: SlotIds) -> list[tuple[Candidates, SlotIds]]:
        """Slots apart by their size class."""
        table = self.tables[tier]
        sizes = table.extent_slot_units[table.units[slots] // table.extent_units]
        return [(self.candidates(tier, size), slots[sizes == size]) for size in np.unique(sizes).tolist()]

    def expose_many(self, tier: Tier, slots: SlotIds) -> None:
        """`expose` for many."""
        for candidates, mine in self.by_size(tier, slots):
            candidates.expose_many(mine)

    def touch_many(self, tier: Tier, slots: SlotIds) -> None:
        """`touch` for many, in the order of their chain."""
        self.policies[tier].used_many(slots)
        for candidates, mine in self.by_size(tier, slots):
            candidates.used_many(mine)

    def count_many(self, session: Session, slots: SlotIds, change: int) -> None:
        """`count_for` for distinct slots."""
        before = session.counts[slots]
        session.counts[slots] = before + np.uint16(1) if change > 0 else before - np.uint16(1)
        turned = slots[before == (0 if change > 0 else 1)]
        session.held_bytes += change * int(self.dram.bytes_of(turned).sum())
        self._marks.setdefault(session.id, set()).update(turned.tolist())

    def count_for(self, session: Session, slot: int, change: int) -> None:
        """Book a session's hold on a slot, and mark the slot in its session file when it is the first or was the last."""
        before = int(session.counts[slot])
        session.counts[slot] = before + change
        if before and before + change:
            return
        session.held_bytes += change * self.dram.slot_units_of(slot) * UNIT_BYTES
        self._marks.setdefault(session.id, set()).add(slot)

    def mark_all(self, session: Session) -> None:
        """Mark everything that the session holds, in a session file that is new."""
        self._marks[session.id] = set(np.flatnonzero(session.counts).tolist())

    def settle(self, table: SlotTable, slot: int) -> None:
        """After a hold or transfer ended: free what was doomed, list what became evictable."""
        if table.state_at[slot] == SlotState.DOOMED and not table.holds_at[slot] and not table.transfers_at[slot]:
            if table.tier is Tier.NVME:
                self.delete_record(slot)
            else:
                table.become(slot, SlotState.FREE)
        else:
            self.expose(table.tier, slot)

    # ---- decisions

    def decide(self, decision: Decision) -> None:
        self._out.append(decision)

    def notice(self, kind: NoticeKind, tier: Tier | None, row: int, namespace: int = 0) -> None:
        """Tell watchers; neighbours of one kind become one notice, and the order of kinds is kept."""
        key = (kind, namespace or self.index.namespace_at[row], tier)
        if not self._notices or self._notices[-1][0] != key:
            self._notices.append((key, [], []))
        _, hashes, parents = self._notices[-1]
        if row:
            hashes.append(self.index.hash_bytes(row))
        if kind is NoticeKind.STORED:
            parents.append(self.index.hash_bytes(self.index.parent_at[row]))

    def notice_stored(self, namespace: int, tier: Tier, hashes: bytes, parents: bytes) -> None:
        """`notice` of many stored blocks."""
        key: tuple[NoticeKind, int, Tier | None] = (NoticeKind.STORED, namespace, tier)
        if not self._notices or self._notices[-1][0] != key:
            self._notices.append((key, [], []))
        self._notices[-1][1].append(hashes)
        self._notices[-1][2].append(parents)

    def take_decisions(self) -> list[Decision]:
        """All decisions since the last call. Marks come first: a slot is marked before it is granted."""
        self.flush_deletes()
        marks = [self._mark(session, slots) for session, slots in self._marks.items() if session in self.sessions]
        notices = [Notice(*key, b"".join(hashes), b"".join(parents)) for key, hashes, parents in self._notices]
        out: list[Decision] = [*marks, *self._out, *notices]
        self._marks, self._out, self._notices = {}, [], []
        return out

    def delete_record(self, slot: int) -> None:
        """Have the record of a doomed nvme slot overwritten; the slot is free when that is done."""
        self.tables[Tier.NVME].busy(slot, 1)
        self._deletes.append(slot)

    def flush_deletes(self) -> set[int]:
        """Start the deletion of all records that wait for it, as one transfer. Answers its id, if there was one."""
        if not self._deletes:
            return set()
        transfer = self.new_transfer(TransferKind.DELETE, 0)
        transfer.deleting, self._deletes = tuple(self._deletes), []
        self.decide(StartDelete(transfer.id, self.tables[Tier.NVME].units[list(transfer.deleting)]))
        return {transfer.id}

    def new_transfer(self, kind: TransferKind, row: int, source: int = 0, target: int = 0) -> Transfer:
        transfer = Transfer(next(self.transfer_ids), kind, row, source, target)
        self.transfers[transfer.id] = transfer
        return transfer

    def _mark(self, session: int, slots: set[int]) -> Mark:
        counts = self.sessions[session].counts
        ordered = np.array(sorted(slots), np.int32)
        units, held = self.dram.units[ordered], counts[ordered] > 0
        return Mark(session, units[held], units[~held])
