"""Many operations of one kind about one block each, as a decode step sends them: carried out as one where each is the common case.

Each function does all that `writing` and `claims` would do for one operation after the other, or touches nothing and answers None.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from kvstore.cache import leases
from kvstore.cache.finding import members_of
from kvstore.cache.holders import Lease, Session
from kvstore.cache.index import Rows
from kvstore.cache.messages import (
    MAX_LEASE_BLOCKS,
    MAX_SESSION_LEASES,
    UNIT_BYTES,
    EndReason,
    Hashes,
    NoticeKind,
    Refused,
    Tier,
    Units,
)
from kvstore.cache.moving import make_room
from kvstore.cache.sessions import open_session
from kvstore.cache.slots import FEW_SLOTS, SlotIds, SlotState
from kvstore.cache.state import State


@dataclass(frozen=True)
class ReserveEach:
    """One anonymous slot for each reservation."""

    session: int
    namespace: int
    reservations: list[int]


@dataclass(frozen=True)
class CommitEach:
    """One block under each lease, without checksum or token ids: all arrays are parallel to `leases`."""

    session: int
    namespace: int
    leases: list[int]
    units: Units
    generations: Units
    hashes: Hashes
    parents: Hashes


@dataclass(frozen=True)
class ReleaseEach:
    """The whole of each lease."""

    session: int
    leases: list[int]


Each = ReserveEach | CommitEach | ReleaseEach


def _writer(state: State, request: ReserveEach | CommitEach) -> Session | None:
    session = open_session(state, request.session)
    if isinstance(session, Refused) or isinstance(members_of(state, session.tenant, request.namespace, ""), Refused):
        return None
    return session


def reserve_each(state: State, request: ReserveEach) -> tuple[Units, Units] | None:
    """The slots, (units, generations): of the first reservations where there is no room for all, of the others each having failed."""
    session, wanted = _writer(state, request), len(request.reservations)
    if session is None:
        return None
    slot_units = state.spec(request.namespace).slot_units
    if not leases.may_hold(state, session, [], slot_units * wanted):
        return None
    taken = _take(state, slot_units, wanted)
    session.reserved.update(zip(taken, request.reservations, strict=False))
    slots = np.array(taken, np.int32)
    state.count_new(session, slots, slot_units)
    if len(taken) < wanted:
        state.counters["no_room"] += wanted - len(taken)
    return state.dram.units[slots], state.dram.generation[slots]


def _take(state: State, slot_units: int, wanted: int) -> list[int]:
    """Up to `wanted` slots: at once where there are so many free ones, else one after the other, so that the same blocks leave for each."""
    if len(state.dram.free.get(slot_units, ())) >= wanted:
        return make_room(state, Tier.DRAM, slot_units, wanted, SlotState.RESERVED)
    taken: list[int] = []
    while len(taken) < wanted and (one := make_room(state, Tier.DRAM, slot_units, 1, SlotState.RESERVED)):
        taken += one
    return taken


def commit_each(state: State, request: CommitEach) -> bool | None:
    """True: all of them are stored."""
    session, words = _writer(state, request), request.hashes[:, 0].tolist()
    if session is None or state.index.room <= len(words) or len(set(words)) < len(words):
        return None
    # Keys that nobody has or is writing, under parents that are known: so nothing below them can be a parent of theirs.
    found = _look(state, request)
    if found is None or not _may_lease(session, request):
        return None
    slots, above = found
    named = slots.tolist()
    if len(set(named)) < len(named) or not session.reserved.keys() >= set(named):
        return None
    _publish(state, request, slots, above)
    _lease_each(state, session, request, named)
    _tell(state, request, slots)
    state.story.tell_many(request.namespace, words, "commit", named, session.id)
    return True


def _look(state: State, request: CommitEach) -> tuple[SlotIds, Rows] | None:
    """The slots that blocks are to be in, anonymous and of this tenure and size, and their parents' rows; None unless all are new."""
    index, slot_units, where = state.index, state.spec(request.namespace).slot_units, (request.units, request.generations)
    if index.native is not None and state.publishing is not None:
        return state.publishing.look_each(index.native, request.namespace, slot_units, request.hashes, request.parents, where)
    rows = index.find(request.namespace, np.concatenate([request.hashes, request.parents]))
    above = rows[len(request.hashes) :]
    if rows[: len(request.hashes)].any() or not above.all():
        return None
    dram, slots = state.dram, list[int]()
    for unit, generation in zip(request.units.tolist(), request.generations.tolist(), strict=True):
        slot = dram.locate(unit)
        if dram.state_at[slot] != SlotState.RESERVED or dram.generation_at[slot] != generation or dram.row_at[slot]:
            return None
        if dram.slot_units_of(slot) != slot_units:
            return None
        slots.append(slot)
    return np.array(slots, np.int32), above


def _may_lease(session: Session, request: CommitEach) -> bool:
    """Whether each lease is a new one that the session may begin, or takes another block."""
    count = len(request.leases)
    if len(session.leases) + count > MAX_SESSION_LEASES:
        return False
    known = [session.leases[lease_id] for lease_id in request.leases if lease_id in session.leases]
    return all(lease.ended and lease.namespaces == (request.namespace,) and len(lease) + count <= MAX_LEASE_BLOCKS for lease in known)


def _publish(state: State, request: CommitEach, slots: SlotIds, above: Rows) -> None:
    """The step in which the blocks become visible; their reservations become leases."""
    index, dram = state.index, state.dram
    if index.native is not None and state.publishing is not None:
        rows = index.take_rows(len(slots))
        state.publishing.publish_each(index.native, request.namespace, request.hashes, rows, slots, above)
    else:
        slot_at, children_at = index.slot_at[Tier.DRAM], index.children_at[Tier.DRAM]
        rows = index.add(request.namespace, request.hashes)
        for row, parent, slot in zip(rows.tolist(), above.tolist(), slots.tolist(), strict=True):
            index.link(row, parent)
            slot_at[row] = slot
            children_at[parent] += 1
            dram.publish(slot, row)
    dram.published(len(slots), state.spec(request.namespace).slot_units)


def _lease_each(state: State, session: Session, request: CommitEach, slots: list[int]) -> None:
    """Their counts in the session, which stood for reservations, stand for leases from now on."""
    policies, inserted = list(state.policies.values()), state.policies[Tier.DRAM].inserted
    leases_of, reserved = session.leases, session.reserved
    for slot, generation, lease_id in zip(slots, request.generations.tolist(), request.leases, strict=True):
        del reserved[slot]
        lease = leases_of.get(lease_id)
        if lease is None:
            leases_of[lease_id] = Lease(
                lease_id, session.id, "", (request.namespace,), [array("i", (slot,))], [array("I", (generation,))], granted=1
            )
        else:
            lease.slots[0].append(slot)
            lease.generations[0].append(generation)
            lease.granted = len(lease.slots[0])
        for policy in policies:
            policy.advance()  # each is an operation of its own
        inserted(slot)


def _tell(state: State, request: CommitEach, slots: SlotIds) -> None:
    state.notice_many(NoticeKind.STORED, request.namespace, Tier.DRAM, request.hashes, (request.parents,))
    state.counters["committed"] += len(slots)
    if state.nvme is not None and state.sizes.nvme_write == "through":
        state.to_write.add_many(slots)
    if state.verifies_hits:
        state.to_sum.add_many(slots)


def release_each(state: State, request: ReleaseEach) -> list[int] | None:
    """How many blocks each lease had; 0 for one that there is not (any more)."""
    session = open_session(state, request.session)
    if isinstance(session, Refused):
        return None
    found = [session.leases.get(lease_id) for lease_id in request.leases]
    for lease in found:
        simple = not state.groups if lease is None else lease.ended and not lease.group and len(lease.slots) == 1
        if not simple:
            return None
    counts, held = [], array("i")
    for lease in found:
        counts.append(0 if lease is None or lease.closed else len(lease.slots[0]))
        if lease is not None and not lease.closed:
            held.extend(lease.slots[0])
            _close(session, lease)
    slots = [slot for slot in held if slot > 0]
    if 0 < len(slots) <= FEW_SLOTS:
        _unhold_few(state, session, slots)
    elif slots:
        state.unhold_many(session, *leases.each_once(np.array(slots, np.int32)))
    return counts


def _close(session: Session, lease: Lease) -> None:
    """What letting go of all of it leaves of a lease."""
    lease.slots[0], lease.generations[0] = array("i"), array("I")
    lease.granted = 0
    lease.reason = EndReason.RELEASED
    lease.closed = True
    del session.leases[lease.id]


def _unhold_few(state: State, session: Session, slots: list[int]) -> None:
    """`unhold_for` for slots of which one may be named several times."""
    dram, counts_at, last = state.dram, session.counts.data, []
    holds_at, state_at, transfers_at, live = dram.holds_at, dram.state_at, dram.transfers_at, int(SlotState.LIVE)
    row_at, children_at = dram.row_at, state.index.children_at[Tier.DRAM]
    for slot in slots:
        left = counts_at[slot] - 1
        counts_at[slot] = left
        if not left:
            last.append(slot)
        holds = holds_at[slot] - 1
        if state_at[slot] != live or transfers_at[slot]:
            dram.hold(slot, -1)
            state.settle(dram, slot)
            continue
        holds_at[slot] = holds
        if not holds:
            slot_units = dram.slot_units_of(slot)
            dram.held_bytes -= slot_units * UNIT_BYTES
            if not children_at[row_at[slot]]:
                state.candidates(Tier.DRAM, slot_units).expose(slot)
    state.count_gone(session, np.array(last, np.int32))
