"""The rules that always hold, one function a rule, each by brute force over the arrays.

Run after every step of the property test and the simulation, and by an idle daemon whose cache is small enough for it. Each returns the
violations it found, as sentences; none means that the rule holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from kvstore.cache.holders import Lease, TransferKind
from kvstore.cache.index import HAS_CHECKSUM, IN_FLIGHT
from kvstore.cache.messages import UNIT_BYTES, Tier
from kvstore.cache.slots import QUEUED, SUM_QUEUED, WRONG, SlotState, SlotTable
from kvstore.cache.state import State
from kvstore.hashing import block_hash

Rule = Callable[[State], Iterator[str]]


def all_leases(state: State) -> list[Lease]:
    """Every lease that stands, each once."""
    found: dict[int, Lease] = {}
    for mine in [session.leases for session in state.sessions.values()] + [group.leases for group in state.groups.values()]:
        found.update({id(lease): lease for lease in mine.values()})
    return list(found.values())


def _used_slots(table: SlotTable) -> list[int]:
    return np.flatnonzero((table.state != SlotState.UNASSIGNED) & (table.state != SlotState.FREE)).tolist()


def visible_after_stored(state: State) -> Iterator[str]:
    """A block can be found only after all its bytes are in a tier; row and slot agree about it, and the table finds the row."""
    index = state.index
    rows = index.rows()
    found = index.find_each(index.namespace[rows], index.hash[rows])
    for row in rows[found != rows].tolist():
        yield f"row {row} is not found by its own key"
    for tier, table in state.tables.items():
        stored = rows[index.slot[tier][rows] > 0]
        slots = index.slot[tier][stored]
        for row in stored[(table.state[slots] != SlotState.LIVE) | (table.row[slots] != stored)].tolist():
            slot = index.slot_at[tier][row]
            there = SlotState(table.state_at[slot]).name
            yield f"row {row} names {tier.name} slot {slot}, which is {there} for row {table.row_at[slot]}"
        live = np.flatnonzero(table.state == SlotState.LIVE)
        for slot in live[index.slot[tier][table.row[live]] != live].tolist():
            yield f"live {tier.name} slot {slot} is not its row's"
    in_flight = set(rows[(index.flags[rows] & IN_FLIGHT) > 0].tolist())
    if in_flight != (written := set(np.flatnonzero(state.writer).tolist())):
        yield f"rows in flight {in_flight} and their writers {written} differ"
    for row in in_flight:
        if index.stored(row):
            yield f"row {row} is both stored and in flight"


def never_wrong(state: State) -> Iterator[str]:
    """What is below dram can be verified; what returned wrong bytes is out of use."""
    index = state.index
    rows = np.flatnonzero(index.slot[Tier.NVME]) if Tier.NVME in state.tables else np.zeros(0, np.intp)
    for row in rows[(index.flags[rows] & HAS_CHECKSUM) == 0].tolist():
        yield f"row {row} is on nvme without a checksum"
    for tier, table in state.tables.items():
        for slot in np.flatnonzero(table.state == SlotState.QUARANTINED).tolist():
            if table.row_at[slot]:
                yield f"quarantined {tier.name} slot {slot} still has row {table.row_at[slot]}"
        for slot in np.flatnonzero(table.flags & WRONG).tolist():
            if table.state_at[slot] not in (SlotState.DOOMED, SlotState.QUARANTINED):
                yield f"{tier.name} slot {slot} returned wrong bytes and is {SlotState(table.state_at[slot]).name}"
    for row, transfer in state.verifying.items():
        if transfer.row != row or index.slot_at[Tier.DRAM][row] != transfer.source:
            yield f"slot {transfer.source} is verified for row {row}, which is elsewhere"
    looking = {transfer.id for transfer in state.verifying.values()}
    for transfer in state.transfers.values():
        if transfer.kind is TransferKind.VERIFY and transfer.row and transfer.id not in looking:
            yield f"transfer {transfer.id} verifies row {transfer.row}, and nobody would find it"


def leased_stays(state: State) -> Iterator[str]:
    """A slot with a lease, reservation, transfer or orphan on it is not reused: the counts are right, and such slots are not free."""
    holds: Counter[int] = Counter(slot for lease in all_leases(state) for member in lease.slots for slot in member if slot > 0)
    transfers = {tier: Counter[int]() for tier in state.tables}
    for transfer in state.transfers.values():
        if transfer.kind is TransferKind.DELETE:
            transfers[Tier.NVME].update(transfer.deleting)
            continue
        if transfer.kind is TransferKind.VERIFY:
            transfers[Tier.DRAM][transfer.source] += 1
            continue
        if transfer.kind is TransferKind.SCRUB:  # holds nothing
            continue
        down = transfer.kind is TransferKind.WRITE
        transfers[Tier.DRAM if down else Tier.NVME][transfer.source] += 1
        transfers[Tier.NVME if down else Tier.DRAM][transfer.target] += 1
    for slot in state.waiting_deletes():
        transfers[Tier.NVME][slot] += 1
    for tier, table in state.tables.items():
        expected = holds if tier is Tier.DRAM else Counter[int]()
        for slot in set(np.flatnonzero(table.holds).tolist()) | set(expected):
            if table.holds_at[slot] != expected[slot]:
                yield f"{tier.name} slot {slot} counts {table.holds_at[slot]} leases, {expected[slot]} stand"
        for slot in set(np.flatnonzero(table.transfers).tolist()) | set(transfers[tier]):
            if table.transfers_at[slot] != transfers[tier][slot]:
                yield f"{tier.name} slot {slot} counts {table.transfers_at[slot]} transfers, {transfers[tier][slot]} run"
        idle = (SlotState.FREE, SlotState.UNASSIGNED)
        for slot in np.flatnonzero((table.holds > 0) | (table.transfers > 0)).tolist():
            if table.state_at[slot] in idle:
                yield f"{tier.name} slot {slot} is held and {SlotState(table.state_at[slot]).name}"
    yield from _reserved_agree(state)


def _reserved_agree(state: State) -> Iterator[str]:
    for session in state.sessions.values():
        wanted = SlotState.ORPHANED if session.ended else SlotState.RESERVED
        for slot in session.reserved:
            if state.dram.state_at[slot] != wanted:
                yield f"slot {slot} reserved by session {session.id} is {SlotState(state.dram.state_at[slot]).name}"


def promise_kept(state: State) -> Iterator[str]:
    """What was granted stays readable until released: same slot, same generation, live or doomed."""
    for lease in all_leases(state):
        for slots, generations in zip(lease.slots, lease.generations, strict=True):
            for position, (slot, generation) in enumerate(zip(slots, generations, strict=True)):
                if slot <= 0:
                    continue
                if state.dram.generation_at[slot] != generation or state.dram.state_at[slot] not in (SlotState.LIVE, SlotState.DOOMED):
                    yield f"lease {lease.id} position {position}: slot {slot} is no longer what was granted"


def conserved(state: State) -> Iterator[str]:
    """In bytes, per tier, the classes add up to the capacity, and each is what the slots say."""
    for tier, table in state.tables.items():
        counted = np.zeros(len(SlotState), np.int64)
        for extent in np.flatnonzero(table.extent_slot_units).tolist():
            slot_units = int(table.extent_slot_units[extent])
            first, count = int(table.extent_first[extent]), table.extent_units // slot_units
            by_state = np.bincount(table.state[first : first + count], minlength=len(SlotState))
            counted += by_state * (slot_units * UNIT_BYTES)
            busy = count - int(by_state[SlotState.FREE])
            if busy != table.extent_used[extent]:
                yield f"{tier.name} extent {extent} counts {table.extent_used[extent]} used slots, {busy} are"
        counted[SlotState.UNASSIGNED] += table.capacity_bytes - int(counted.sum())
        if counted.tolist() != table.bytes_in:
            yield f"{tier.name}: classes are booked as {table.bytes_in} and counted as {counted.tolist()}"
        spare = int(np.count_nonzero(table.extent_used == 0))
        if spare != table.spare_extents:
            yield f"{tier.name} counts {table.spare_extents} spare extents, {spare} are"
        free = sorted(slot for stack in table.free.values() for slot in stack)
        really = np.flatnonzero(table.state == SlotState.FREE).tolist()
        if free != really:
            yield f"{tier.name}: the free stacks hold {len(free)} slots, {len(really)} are free"


def leaves_first(state: State) -> Iterator[str]:
    """The count of children per block and tier is right, so that only leaves can be candidates; links are sound."""
    index = state.index
    rows = index.rows()
    for tier in index.tiers:
        stored = rows[index.slot[tier][rows] > 0]
        counted = np.bincount(index.parent[stored], minlength=index.capacity + 1)
        for row in rows[counted[rows] != index.children[tier][rows]].tolist():
            yield f"row {row} counts {index.children_at[tier][row]} children in {tier.name}, has {counted[row]}"
    for row in rows.tolist():
        for child in index.children_of(row):
            if index.parent_at[child] != row:
                yield f"row {child} is listed under {row} and names {index.parent_at[child]} as its parent"
        empty = not index.stored(row) and not index.first_child_at[row] and not index.flags_at[row] & IN_FLIGHT
        if empty:
            yield f"row {row} has no bytes, no child and no writer, and is still there"


def bounded(state: State) -> Iterator[str]:
    """Every queue and table is within its limit."""
    if state.index.used > state.index.capacity:
        yield f"{state.index.used} rows of {state.index.capacity} are used"
    if len(state.sessions) > state.sizes.max_sessions:
        yield f"{len(state.sessions)} sessions, {state.sizes.max_sessions} allowed"
    for flag, what, queue in ((QUEUED, "writes", state.to_write), (SUM_QUEUED, "sums", state.to_sum)):
        queued = int(np.count_nonzero(state.dram.flags & flag))
        if queued != len(queue):
            yield f"{len(queue)} {what} are queued, {queued} slots say so"
    for session in state.sessions.values():
        if session.limit_bytes and session.held_bytes > session.limit_bytes:
            yield f"session {session.id} holds {session.held_bytes} bytes of {session.limit_bytes}"
    promised = sum(session.guarantee_bytes for session in state.sessions.values() if not session.ended)
    if promised > state.dram.capacity_bytes:
        yield f"{promised} bytes are guaranteed of {state.dram.capacity_bytes}"


def isolated(state: State) -> Iterator[str]:
    """No lease or group of one tenant names a namespace of another."""
    for session in state.sessions.values():
        for lease in session.leases.values():
            for namespace in lease.namespaces:
                if state.spec(namespace).tenant != session.tenant:
                    yield f"session {session.id} of {session.tenant} holds a lease in a namespace of {state.spec(namespace).tenant}"
    for group in state.groups.values():
        for namespace in group.namespaces:
            if state.spec(namespace).tenant != group.tenant:
                yield f"group {group.name} of {group.tenant} has a member of {state.spec(namespace).tenant}"


def progress(state: State) -> Iterator[str]:
    """Whatever may be evicted will be found when room is needed."""
    for (tier, slot_units), candidates in state.listed_candidates():
        for slot in candidates.missing().tolist():
            yield f"{tier.name} slot {slot} of {slot_units} units may be evicted and is not listed"


def honest(state: State) -> Iterator[str]:
    """The figures that status and metrics show are those of the slots."""
    for tier, table in state.tables.items():
        live = int(np.count_nonzero(table.state == SlotState.LIVE))
        if live != table.blocks:
            yield f"{tier.name} reports {table.blocks} blocks, has {live}"
        held = sum(table.slot_units_of(slot) for slot in _used_slots(table) if table.is_held(slot)) * UNIT_BYTES
        if held != table.held_bytes:
            yield f"{tier.name} reports {table.held_bytes} bytes held, {held} are"
    for session in state.sessions.values():
        counts: Counter[int] = Counter(session.reserved.keys())
        for lease in session.leases.values():
            if lease.session == session.id:
                counts.update(slot for member in lease.slots for slot in member if slot > 0)
        booked = {int(slot): int(session.counts[slot]) for slot in np.flatnonzero(session.counts)}
        if booked != dict(counts):
            yield f"session {session.id} books {booked}, holds {dict(counts)}"
        held = sum(state.dram.slot_units_of(slot) for slot in counts) * UNIT_BYTES
        if held != session.held_bytes:
            yield f"session {session.id} reports {session.held_bytes} bytes held, {held} are"


def tokens_true(state: State) -> Iterator[str]:
    """Token ids are kept of stored blocks alone, hash to the block's name, and their chunks are each in one place."""
    index, table = state.index, state.index.tokens
    if table is None:
        return
    rows = np.flatnonzero(table.first).astype(np.int32)
    if len(rows) != table.blocks:
        yield f"ids of {table.blocks} blocks are counted, of {len(rows)} kept"
    for row in rows.tolist():
        spec = state.namespaces[index.namespace_at[row]]
        if spec is None or not spec.tails or not index.stored(row):
            yield f"row {row} has token ids, and is no stored block of a namespace with tails"
        elif block_hash(index.hash_bytes(index.parent_at[row]), table.tokens_of(row, spec.block_tokens)) != index.hash_bytes(row):
            yield f"the token ids of row {row} are not its own"
    if not table.conserved(rows):
        yield f"of {table.used_chunks} chunks of token ids some are in no block's list, or in two"


RULES: tuple[Rule, ...] = (
    visible_after_stored,
    never_wrong,
    leased_stays,
    promise_kept,
    conserved,
    leaves_first,
    bounded,
    isolated,
    progress,
    honest,
    tokens_true,
)


def check(state: State, rule: Rule) -> list[str]:
    """What breaks one rule, as `rule-name: what`."""
    return [f"{rule.__name__.replace('_', '-')}: {what}" for what in rule(state)]


def violations(state: State) -> list[str]:
    """What breaks any rule."""
    return [what for rule in RULES for what in check(state, rule)]
