"""All that the core knows, and the few steps that every operation is made of. Owned by one event loop; no locks, no I/O, no clock.

`reading`, `writing`, `moving` and `sessions` are functions over this state; `core.Cache` is the façade that the edges call.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import count

import numpy as np

from kvstore.cache.eviction.base import PolicyMaker
from kvstore.cache.eviction.candidates import Candidates
from kvstore.cache.eviction.choice import POLICIES
from kvstore.cache.holders import Group, Lease, Session, Transfer, TransferKind
from kvstore.cache.index import Index
from kvstore.cache.messages import (
    UNIT_BYTES,
    Decision,
    Hashes,
    Keep,
    Mark,
    NamespaceSpec,
    Notice,
    NoticeKind,
    StartDelete,
    Tier,
)
from kvstore.cache.scrub import Scrub
from kvstore.cache.slotqueue import SlotQueue
from kvstore.cache.slots import DIRTY, FEW_SLOTS, GONE_BELOW, QUEUED, SUM_QUEUED, UNSUMMED, WRONG, SlotIds, SlotState, SlotTable
from kvstore.cache.story import Story
from kvstore.native.publishing import TIER_ARRAYS, NativePublishing

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
    verify: str = "transfer"  # transfer; read: also every hit in dram
    scrub_rest_s: float = 60.0  # from the start of one pass of the background check to the next
    eviction: str = "lru"  # a name in eviction.choice
    seed: int = 0x5DEECE66D  # secret in a daemon, fixed in a test
    silence_s: float = 30.0
    max_sessions: int = 256


def extent_bytes_for(capacity_bytes: int) -> int:
    """An extent size for a tier: a 32nd of it in whole 2 MiB, between 2 MiB and 1 GiB. A block must fit into one."""
    step = 2 << 20  # a huge page
    return min(1 << 30, max(step, capacity_bytes // 32 // step * step))


def _publishing(index: Index, dram: SlotTable) -> NativePublishing | None:
    """The compiled way to publish many blocks; None without the library."""
    if index.native is None:
        return None
    of_index = {"slot_of": index.slot[Tier.DRAM], "children": index.children[Tier.DRAM]}
    arrays = of_index | {name: getattr(dram, name) for name in TIER_ARRAYS if name not in of_index}
    return NativePublishing(arrays, dram.extent_units, SlotState.RESERVED, SlotState.LIVE)


class State:
    def __init__(self, sizes: CacheSizes, make_policy: PolicyMaker | None = None) -> None:
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
        self.namespaces: list[NamespaceSpec | None] = [None]  # by id; 0 is none
        make = make_policy or POLICIES[sizes.eviction]
        self.policies = {tier: make(self.index, table, self.namespaces) for tier, table in self.tables.items()}
        self._candidates: dict[tuple[Tier, int], Candidates] = {}
        self.namespace_ids: dict[bytes, int] = {}
        self.sessions: dict[int, Session] = {}
        self.groups: dict[tuple[str, str], Group] = {}  # by tenant and name
        self.writer = np.zeros(len(self.index.namespace), np.int32)  # by row, of a reserved key: the dram slot reserved for it
        self.writer_at = self.writer.data
        self.transfers: dict[int, Transfer] = {}
        self.reading: dict[int, Transfer] = {}  # by row
        self.writing: dict[int, Transfer] = {}  # by row
        self.verifying: dict[int, Transfer] = {}  # by row; in dram
        self.verifies_hits = sizes.verify == "read"
        self.scrub = Scrub(self.index, self.tables, sizes.scrub_rest_s)
        self.transfer_ids = count(1)
        self.publishing = _publishing(self.index, self.dram)
        self.to_write = SlotQueue(self.dram, DIRTY, QUEUED)
        self.to_sum = SlotQueue(self.dram, UNSUMMED, SUM_QUEUED)
        self.writes_paused_until = 0.0
        self.retry_deletes: list[Transfer] = []
        self.waiting: list[Lease] = []  # leases with loads pending
        self.advanced: list[Lease] = []  # leases that may have more to grant, until the next drain
        self.clears: dict[int, set[int]] = {}  # clear -> transfers that must end before it is durable
        self.counters: Counter[str] = Counter()
        self.story = Story()
        self.now = 0.0
        np.unique(self.dram.row[:1])  # numpy imports some 10 ms of modules at its first call: now, and not while a client waits
        self._deletes: list[int] = []
        self._out: list[Decision] = []
        self._marks: dict[int, list[SlotIds]] = {}  # session -> dram slots whose holds by it began or ended
        self._notices: list[tuple[tuple[NoticeKind, int, Tier | None], list[bytes | Hashes], list[bytes | Hashes]]] = []

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
        if tier is Tier.DRAM:
            self.dram.flags_at[slot] &= ~GONE_BELOW
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

    def unhold_many(self, session: Session | None, slots: SlotIds, times: int | SlotIds = 1) -> None:
        """`unhold_for` for distinct slots, for each so many times."""
        if session is not None:
            self.count_many(session, slots, -times)
        self.dram.hold_many(slots, -times)
        doomed = self.dram.state[slots] == SlotState.DOOMED
        for slot in slots[doomed].tolist():
            self.settle(self.dram, slot)
        self.expose_many(Tier.DRAM, slots[~doomed])

    def by_size(self, tier: Tier, slots: SlotIds) -> list[tuple[Candidates, SlotIds]]:
        """Slots apart by their size class."""
        table = self.tables[tier]
        if table.only_slot_units:
            return [(self.candidates(tier, table.only_slot_units), slots)] if len(slots) else []
        sizes = table.extent_slot_units[table.units[slots] // table.extent_units]
        if len(sizes) and (sizes == sizes[0]).all():
            return [(self.candidates(tier, int(sizes[0])), slots)]
        return [(self.candidates(tier, size), slots[sizes == size]) for size in np.unique(sizes).tolist()]

    def expose_many(self, tier: Tier, slots: SlotIds) -> None:
        """`expose` for many."""
        for candidates, mine in self.by_size(tier, slots):
            candidates.expose_many(mine)

    def touch_many(self, tier: Tier, slots: SlotIds) -> None:
        """`touch` for many, in the order of their chain."""
        if tier is Tier.DRAM and self.sizes.nvme_write == "on_evict":  # the only use of that flag
            self.dram.flags[slots] &= ~np.uint8(GONE_BELOW)
        self.policies[tier].used_many(slots)
        for candidates, mine in self.by_size(tier, slots):
            candidates.used_many(mine)

    def begin_holds(self, session: Session, slots: SlotIds, size_bytes: int) -> None:
        """Book that the session holds these slots, which it did not, of so many bytes; they are counted already."""
        session.held_bytes += size_bytes
        self._marks.setdefault(session.id, []).append(slots)

    def count_many(self, session: Session, slots: SlotIds, change: int | SlotIds) -> None:
        """`count_for` for distinct slots."""
        before = session.counts[slots].astype(np.int32)
        after = before + change
        session.counts[slots] = after
        turned = slots[(before == 0) | (after == 0)]
        session.held_bytes += int((self.dram.bytes_of(slots) * ((after > 0).astype(np.int64) - (before > 0))).sum())
        self._marks.setdefault(session.id, []).append(turned)

    def count_for(self, session: Session, slot: int, change: int) -> None:
        """Book a session's hold on a slot, and mark the slot in its session file when it is the first or was the last."""
        before = int(session.counts[slot])
        session.counts[slot] = before + change
        if before and before + change:
            return
        session.held_bytes += change * self.dram.slot_units_of(slot) * UNIT_BYTES
        self._marks.setdefault(session.id, []).append(np.array([slot], np.int32))

    def count_new(self, session: Session, slots: SlotIds, slot_units: int) -> None:
        """Book the first hold on distinct slots of one size, which nobody held."""
        session.counts[slots] = 1
        session.held_bytes += len(slots) * slot_units * UNIT_BYTES
        self._marks.setdefault(session.id, []).append(slots)

    def count_gone(self, session: Session, slots: SlotIds) -> None:
        """Book what the session held by slots whose last hold of it is gone."""
        session.held_bytes -= int(self.dram.bytes_of(slots).sum())
        self._marks.setdefault(session.id, []).append(slots)

    def mark_all(self, session: Session) -> None:
        """Mark everything that the session holds, in a session file that is new."""
        self._marks[session.id] = [np.flatnonzero(session.counts).astype(np.int32)]

    def settle(self, table: SlotTable, slot: int) -> None:
        """After a hold or transfer ended: free what was doomed (or put it into quarantine), list what became evictable."""
        if table.state_at[slot] == SlotState.DOOMED and not table.holds_at[slot] and not table.transfers_at[slot]:
            wrong = bool(table.flags_at[slot] & WRONG)
            if table.tier is Tier.DRAM:
                table.become(slot, SlotState.QUARANTINED if wrong else SlotState.FREE)
            elif wrong:
                self.quarantine_record(slot)
            else:
                self.delete_record(slot)
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

    def notice_many(self, kind: NoticeKind, namespace: int, tier: Tier, hashes: Hashes, parents: tuple[Hashes, ...] = ()) -> None:
        """`notice` of many blocks of one namespace; parents of stored ones only. The arrays are kept, and must not change."""
        key: tuple[NoticeKind, int, Tier | None] = (kind, namespace, tier)
        if not self._notices or self._notices[-1][0] != key:
            self._notices.append((key, [], []))
        self._notices[-1][1].append(hashes)
        self._notices[-1][2].extend(parents)

    def take_decisions(self) -> list[Decision]:
        """All decisions since the last call. Marks come first: a slot is marked before it is granted."""
        self.flush_deletes()
        marks = [self._mark(session, slots) for session, slots in self._marks.items() if session in self.sessions]
        out: list[Decision] = [*marks, *self._out, *(Notice(*key, hashes, parents) for key, hashes, parents in self._notices)]
        self._marks, self._out, self._notices = {}, [], []
        return out

    def delete_record(self, slot: int) -> None:
        """Have the record of a doomed nvme slot overwritten; the slot is free when that is done."""
        self.tables[Tier.NVME].busy(slot, 1)
        self._deletes.append(slot)

    def doom_records(self, slots: SlotIds) -> None:
        """`delete_record` for many live nvme slots of one size whose blocks have left; they are doomed from now on."""
        nvme = self.tables[Tier.NVME]
        nvme.move_many(slots, SlotState.LIVE, SlotState.DOOMED)
        nvme.held_bytes += int(nvme.bytes_of(slots).sum())
        nvme.transfers[slots] += 1
        self._deletes.extend(slots.tolist())

    def quarantine_record(self, slot: int) -> None:
        """Take an nvme slot out of use, and have its record say so."""
        nvme = self.tables[Tier.NVME]
        nvme.become(slot, SlotState.QUARANTINED)
        nvme.busy(slot, 1)
        transfer = self.new_transfer(TransferKind.DELETE, 0)
        transfer.deleting, transfer.quarantine = (slot,), True
        self.decide(StartDelete(transfer.id, nvme.units[[slot]], quarantine=True))

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

    def _mark(self, session: int, slots: list[SlotIds]) -> Mark:
        counts = self.sessions[session].counts
        changed = slots[0] if len(slots) == 1 else _each_once(np.concatenate(slots))
        units, held = self.dram.units[changed], counts[changed] > 0
        return Mark(session, units[held], units[~held])


def _each_once(slots: SlotIds) -> SlotIds:
    if len(slots) > FEW_SLOTS:
        return np.unique(slots)
    return np.array(sorted(set(slots.tolist())), np.int32)
