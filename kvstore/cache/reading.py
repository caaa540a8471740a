"""Acquire: the leases on a prefix, what must come up for them, and their ends by deadline or failure."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore.cache import leases
from kvstore.cache.checking import start_verify
from kvstore.cache.finding import complete_prefix, members_of, present_in
from kvstore.cache.holders import HOLE, Lease, Session, Transfer, TransferKind
from kvstore.cache.index import Rows
from kvstore.cache.messages import (
    Acquire,
    Acquired,
    EndReason,
    Hashes,
    KeepKind,
    Priority,
    Prompt,
    Refused,
    StartRead,
    Tier,
)
from kvstore.cache.moving import is_in_flight, make_room
from kvstore.cache.ready import lease_ready
from kvstore.cache.recency import use, use_many
from kvstore.cache.sessions import group_of, open_session
from kvstore.cache.slots import SlotIds, SlotState
from kvstore.cache.state import State
from kvstore.cache.tails import refuse_prompt, with_donor


@dataclass(frozen=True)
class Again:
    """What is known when a lease is planned a second time: the dram slots that it had been given, and whether it may still wait."""

    verified: SlotIds = field(default_factory=lambda: np.zeros(0, np.int32))
    may_wait: bool = True


FIRST = Again()


def _first_time(rows: Rows) -> NDArray[np.bool_]:
    """False where a row stood before: no chain names a block twice."""
    ordered = np.sort(rows)
    if not ((ordered[1:] == ordered[:-1]) & (ordered[1:] > 0)).any():
        return np.ones(len(rows), bool)
    first = np.zeros(len(rows), bool)
    first[np.unique(rows, return_index=True)[1]] = True
    return first


def acquire(state: State, request: Acquire) -> Acquired | Refused:
    """Lease what is here of a prefix, and start to bring up what is below."""
    session = open_session(state, request.session)
    if isinstance(session, Refused):
        return session
    members = members_of(state, session.tenant, request.namespace, request.group)
    if isinstance(members, Refused):
        return members
    group = group_of(state, session, request.group)
    if request.group and group is None:
        return Refused("FAILED_PRECONDITION", f"this session is no member of group {request.group!r}; JoinGroup first")
    if request.lease in session.leases or (group and request.lease in group.leases):
        return Refused("ALREADY_EXISTS", f"lease {request.lease} is in use; choose another id or release it")
    if refused := leases.may_begin(session, group) or refuse_prompt(state, request):
        return refused
    empty = [array("i") for _ in members]
    lease = Lease(request.lease, session.id, request.group, members, empty, [array("I") for _ in members], ended=False)
    lease.deadline_at = request.deadline_at
    lease.whole = any(state.keep(member).kind is not KeepKind.ALL for member in members)
    session.leases[lease.id] = lease
    if group:
        group.leases[lease.id] = lease
    if request.prompt is not None:
        return _acquire_with_tail(state, session, lease, request, request.prompt)
    if not lease_ready(state, session, lease, request.hashes):
        plan(state, session, lease, request.hashes, len(request.hashes))
    return Acquired(lease.id, len(lease), lease.reason)


def _acquire_with_tail(state: State, session: Session, lease: Lease, request: Acquire, prompt: Prompt) -> Acquired:
    """The donor of a tail is one more block of the lease, after those that were asked for."""
    hashes, usable = with_donor(state, request, prompt)
    asked = len(request.hashes)
    plan(state, session, lease, hashes, asked)
    if not usable or len(lease) < len(hashes):
        return Acquired(lease.id, len(lease), lease.reason)
    whole = len(hashes) - 1
    lease.reason = _why_short(state, [state.index.find(request.namespace, request.hashes)], whole, asked)
    state.counters["tail_hits"] += 1
    state.counters["tail_hit_tokens"] += usable
    return Acquired(lease.id, len(lease), lease.reason, usable)


def plan(state: State, session: Session, lease: Lease, hashes: Hashes, asked: int, again: Again = FIRST) -> None:
    """Fill an empty lease: hold what is in dram, take slots for what must come up; shorten until all of it fits."""
    rows = [state.index.find(member, hashes) for member in lease.namespaces]
    keeps = [state.keep(member) for member in lease.namespaces]
    present = [present_in(state, mine) if again.may_wait else _ready(state, mine, again) for mine in rows]
    for mine, has in zip(rows, present, strict=True):
        has &= _first_time(mine)
    length = complete_prefix(present, keeps)
    reason = _why_short(state, rows, length, asked)
    while True:
        for slots, generations, keep in zip(lease.slots, lease.generations, keeps, strict=True):
            holes = keep.first_needed(length)
            slots.extend(array("i", [HOLE]) * holes)
            slots.frombytes(bytes(4 * (length - holes)))
            generations.frombytes(bytes(4 * length))
        reached, why, targets = _take(state, session, lease, rows, length, again)
        if reached == length:
            break
        for _, _, slot in targets:
            state.dram.become(slot, SlotState.FREE)
        lease.pending = sum(member.count(0) for member in lease.slots)  # so that the cut books them out
        leases.cut(state, lease, 0, why)
        length, reason = complete_prefix([mine[:reached] for mine in present], keeps), why
    lease.reason = reason
    lease.pending = sum(member.count(0) for member in lease.slots)
    lease.hashes = hashes if lease.whole and lease.pending else None
    for member, position, slot in targets:
        start_read(state, int(rows[member][position]), slot, Priority.DEMAND, lease.deadline_at)
    _wait(state, lease, rows)
    state.advanced.append(lease)


def _ready(state: State, rows: Rows, again: Again) -> NDArray[np.bool_]:
    """Which blocks can be had without waiting."""
    slots = state.index.slot[Tier.DRAM][rows]
    return np.isin(slots, again.verified) & (slots > 0) if state.verifies_hits else slots > 0


def _take(
    state: State, session: Session, lease: Lease, rows: list[Rows], length: int, again: Again
) -> tuple[int, EndReason, list[tuple[int, int, int]]]:
    """Hold dram copies first, so that making room cannot take them; then a target slot for each load that nobody has begun."""
    in_dram = [
        np.where(np.frombuffer(slots, np.int32) == 0, state.index.slot[Tier.DRAM][mine[:length]], 0)
        for mine, slots in zip(rows, lease.slots, strict=True)
    ]
    affordable = _affordable(state, session, in_dram, length)
    unsure_bytes = 0  # of dram copies that will be the session's when they are verified
    for member, held in enumerate(in_dram):
        here = sure = np.flatnonzero(held[:affordable])
        if state.verifies_hits:
            sure, new_bytes = _verify(state, session, rows[member], held, here, again)
            unsure_bytes += new_bytes
        leases.put_many(state, lease, member, sure, held[sure])
        use_many(state, rows[member][here])
    if affordable < length:
        return affordable, EndReason.LIMIT, []
    targets: list[tuple[int, int, int]] = []
    coming = 0  # units that will be held when the loads have ended
    empty = np.zeros(length, bool)
    for slots in lease.slots:
        empty |= np.array(slots, np.int32) == 0
    for position in np.flatnonzero(empty).tolist():
        for member, slots in enumerate(lease.slots):
            if slots[position]:
                continue
            slot_units = state.spec(lease.namespaces[member]).slot_units
            row = int(rows[member][position])
            if row in state.verifying:
                continue
            coming += slot_units
            if row in state.reading:
                continue
            affords = leases.may_hold(state, session, [], coming, unsure_bytes)
            got = make_room(state, Tier.DRAM, slot_units, 1, SlotState.FILLING) if affords else []
            if not got:
                return position, EndReason.NO_ROOM, targets
            targets.append((member, position, got[0]))
    return length, EndReason.COMPLETE, targets


def _verify(
    state: State, session: Session, rows: Rows, slots: SlotIds, here: NDArray[np.intp], again: Again
) -> tuple[NDArray[np.intp], int]:
    """See to it that dram copies are verified: the positions of those that are, and the bytes of the others that are new to the session."""
    known = np.isin(slots[here], again.verified)
    unsure = here[~known]
    for row in rows[unsure].tolist():
        if row not in state.verifying:
            state.decide(start_verify(state, row))
    new = slots[unsure][session.counts[slots[unsure]] == 0]
    return here[known], int(state.dram.bytes_of(new).sum())


def _affordable(state: State, session: Session, in_dram: list[NDArray[np.int32]], length: int) -> int:
    """How many leading positions the session may hold of what is in dram."""
    wanted = np.stack(in_dram, axis=1)[:length]  # [positions, members]
    if leases.may_hold(state, session, wanted[wanted > 0]):
        return length
    low, high = 0, length  # the first `low` may be held, the first `high` may not
    while high - low > 1:
        middle = (low + high) // 2
        part = wanted[:middle]
        low, high = (middle, high) if leases.may_hold(state, session, part[part > 0]) else (low, middle)
    return low


def _wait(state: State, lease: Lease, rows: list[Rows]) -> None:
    """Have the lease told of what is on its way, or being verified."""
    if not lease.pending:
        return
    state.waiting.append(lease)
    for member, slots in enumerate(lease.slots):
        for position, slot in enumerate(slots):
            if slot == 0:
                row = int(rows[member][position])
                if row in state.verifying:
                    state.verifying[row].waiters.append((lease, member, position))
                else:
                    transfer = state.reading[row]
                    hurry(state, transfer, lease.deadline_at)
                    transfer.waiters.append((lease, member, position))
                    use(state, row)


def _why_short(state: State, rows: list[Rows], length: int, asked: int) -> EndReason:
    if length == asked:
        return EndReason.COMPLETE
    return EndReason.IN_FLIGHT if any(is_in_flight(state, int(mine[length])) for mine in rows if length < len(mine)) else EndReason.MISSING


def hurry(state: State, transfer: Transfer, deadline_at: float) -> None:
    """Somebody waits now for what was begun as a guess, or for one whose time had passed."""
    if transfer.priority is Priority.DEMAND and transfer.deadline_at >= state.now:
        return
    transfer.priority, transfer.deadline_at = Priority.DEMAND, deadline_at
    _decide_read(state, transfer)


def start_read(state: State, row: int, target: int, priority: Priority, deadline_at: float) -> Transfer:
    """Begin to bring a block from nvme into a FILLING dram slot."""
    nvme = state.tables[Tier.NVME]
    source = state.index.slot_at[Tier.NVME][row]
    transfer = state.new_transfer(TransferKind.READ, row, source, target)
    transfer.priority, transfer.deadline_at = priority, deadline_at
    state.reading[row] = transfer
    nvme.busy(source, 1)
    state.dram.busy(target, 1)
    _decide_read(state, transfer)
    return transfer


def _decide_read(state: State, transfer: Transfer) -> None:
    index, row = state.index, transfer.row
    low, high = index.checksum[row].tolist()
    state.decide(
        StartRead(
            transfer.id,
            transfer.priority,
            index.namespace_at[row],
            index.hash_bytes(row),
            state.tables[Tier.NVME].units_at[transfer.source],
            state.dram.units_at[transfer.target],
            (low, high),
            transfer.deadline_at,
        )
    )


def settle_leases(state: State) -> None:
    """Before decisions are taken: plan whole leases again that a failed load has shortened, then grant what is ready."""
    for lease in state.advanced:
        if lease.whole and not lease.closed and not lease.ended and not lease.pending and lease.cut_at < len(lease):
            _plan_again(state, lease)
    for lease in state.advanced:
        leases.grant(state, lease)
    state.advanced.clear()
    state.waiting = [lease for lease in state.waiting if lease.pending and not lease.closed]


def _plan_again(state: State, lease: Lease, may_wait: bool = True) -> None:
    hashes, session = lease.hashes, leases.holder(state, lease)
    verified = np.concatenate([np.array(member, np.int32) for member in lease.slots])
    at, lease.cut_at = lease.cut_at, 1 << 30
    leases.cut(state, lease, 0, EndReason.FAILED)
    if hashes is not None and session is not None:
        plan(state, session, lease, hashes[:at], len(hashes[:at]), Again(verified[verified > 0], may_wait))
        lease.reason = EndReason.FAILED


def expire(state: State) -> None:
    """Leases past their deadline get what is there; late loads still fill the cache, but not the lease."""
    for lease in state.waiting:
        if not lease.pending or lease.closed or lease.deadline_at > state.now:
            continue
        first = min(member.index(0) for member in lease.slots if 0 in member)
        if lease.whole:
            for member in lease.slots:
                while 0 in member:
                    member[member.index(0)] = HOLE
                    lease.pending -= 1
            lease.cut_at = first
            _plan_again(state, lease, may_wait=False)
        else:
            leases.cut(state, lease, first, EndReason.DEADLINE)
        lease.reason = EndReason.DEADLINE
        state.counters["acquire_deadlines"] += 1
