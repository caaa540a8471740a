"""What happens to a lease after it was planned: loads that arrive or fail, grants in chain order, cuts, release."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.cache.holders import HOLE, Group, Lease, Session, Transfer
from kvstore.cache.messages import MAX_SESSION_LEASES, MAX_SLOT_HOLDS, UNIT_BYTES, EndReason, Granted, Refused
from kvstore.cache.slots import SlotIds, SlotState
from kvstore.cache.state import State


def holder(state: State, lease: Lease) -> Session | None:
    """The session whose process may touch the slots; None where only the group holds them."""
    return state.sessions.get(lease.session)


def may_hold(state: State, session: Session, slots: Sequence[int] | SlotIds, more_units: int = 0, held_bytes: int = 0) -> bool:
    """Whether the session's limit and the others' guarantees allow it to hold these slots and `more_units` of new ones.

    `held_bytes`: and so much that is held already, but not by this session.
    """
    dram = state.dram
    newly = more_units * UNIT_BYTES
    own = newly + held_bytes
    if len(slots):
        ids = np.asarray(slots, np.int32)
        if session.counts[ids].max() >= MAX_SLOT_HOLDS:
            return False
        sizes = dram.bytes_of(ids)
        own += int(sizes[session.counts[ids] == 0].sum())
        newly += int(sizes[~dram.held_many(ids)].sum())
    return affords(state, session, own, newly)


def may_hold_one(state: State, session: Session, slot: int) -> bool:
    """`may_hold` for one slot."""
    size_bytes, times = state.dram.slot_units_of(slot) * UNIT_BYTES, int(session.counts[slot])
    new_bytes = 0 if state.dram.is_held(slot) else size_bytes
    return times < MAX_SLOT_HOLDS and affords(state, session, 0 if times else size_bytes, new_bytes)


def affords(state: State, session: Session, own: int, newly: int) -> bool:
    """Whether the session may hold `own` bytes more, of which nobody holds `newly` yet."""
    dram = state.dram
    if session.limit_bytes and session.held_bytes + own > session.limit_bytes:
        return False
    if session.held_bytes + own <= session.guarantee_bytes:
        return True
    unmet = sum(
        max(0, other.guarantee_bytes - other.held_bytes) for other in state.sessions.values() if other is not session and not other.ended
    )
    unheld = dram.capacity_bytes - dram.held_bytes - dram.bytes_in[SlotState.QUARANTINED]
    return not unmet or unheld - newly >= unmet


def may_begin(session: Session, group: Group | None = None) -> Refused | None:
    """Why the session, or its group, may not have another lease; None where it may."""
    if max(len(session.leases), len(group.leases) if group else 0) < MAX_SESSION_LEASES:
        return None
    return Refused("RESOURCE_EXHAUSTED", f"the session or its group has {MAX_SESSION_LEASES} leases, which is the most; release some")


def put(state: State, lease: Lease, member: int, position: int, slot: int) -> None:
    """Hold a readable dram slot at a position that is still empty."""
    lease.slots[member][position] = slot
    lease.generations[member][position] = state.dram.generation_at[slot]
    state.hold_for(holder(state, lease), slot)


def put_many(state: State, lease: Lease, member: int, positions: NDArray[np.intp], slots: SlotIds) -> None:
    """`put` for many distinct slots."""
    for values, into in ((slots, lease.slots[member]), (state.dram.generation[slots], lease.generations[member])):
        np.frombuffer(into, values.dtype)[positions] = values
    state.hold_many(holder(state, lease), slots)


def append(state: State, lease: Lease, slot: int) -> None:
    """Hold one more block at the end of a lease of one member; HOLE where it is not in dram."""
    lease.slots[0].append(slot)
    lease.generations[0].append(state.dram.generation_at[slot] if slot > 0 else 0)
    lease.granted = len(lease)


def waits_for(lease: Lease, member: int, position: int) -> bool:
    return not lease.closed and position < len(lease) and lease.slots[member][position] == 0


def load_ready(state: State, lease: Lease, member: int, position: int, slot: int) -> None:
    """A block that the lease waits for is in dram and verified. What the session holds may have grown since it asked."""
    if not waits_for(lease, member, position):
        return
    session = holder(state, lease)
    if session is not None and not may_hold_one(state, session, slot):
        _fail(state, lease, member, position, EndReason.LIMIT)
    else:
        put(state, lease, member, position, slot)
        lease.pending -= 1
        state.advanced.append(lease)


def hand_out(state: State, transfer: Transfer, slot: int) -> None:
    """A block is in dram and right: every lease that waits for it gets it."""
    waiters, transfer.waiters = transfer.waiters, []
    for lease, member, position in waiters:
        load_ready(state, lease, member, position, slot)


def fail_waiters(state: State, transfer: Transfer, reason: EndReason) -> None:
    """A load will not arrive: the prefix of every lease that waits for it ends there."""
    waiters, transfer.waiters = transfer.waiters, []
    for lease, member, position in waiters:
        if waits_for(lease, member, position):
            _fail(state, lease, member, position, reason)


def _fail(state: State, lease: Lease, member: int, position: int, reason: EndReason) -> None:
    if not lease.whole:
        cut(state, lease, position, reason)
        return
    lease.slots[member][position] = HOLE
    lease.pending -= 1
    lease.cut_at = min(lease.cut_at, position)
    state.advanced.append(lease)


def cut(state: State, lease: Lease, keep: int, reason: EndReason) -> None:
    """The lease has only its first `keep` positions from now on; what it held beyond is let go, from the tail."""
    if keep >= len(lease):
        return
    session = holder(state, lease)
    for member, generations in zip(lease.slots, lease.generations, strict=True):
        if len(member) == keep + 1:  # a decoding sequence's blocks are let go one by one: no arrays for that
            slot = member.pop()
            generations.pop()
            lease.pending -= slot == 0
            if slot > 0:
                state.unhold_for(session, slot)
            continue
        tail = np.array(member[keep:], np.int32)
        del member[keep:], generations[keep:]
        lease.pending -= int(np.count_nonzero(tail == 0))
        slots, times = each_once(tail[tail > 0])
        if slots.size:
            state.unhold_many(session, slots, times)
    lease.granted = min(lease.granted, keep)
    lease.reason = reason
    state.advanced.append(lease)


def each_once(slots: SlotIds) -> tuple[SlotIds, int | SlotIds]:
    """Distinct slots, and how often each was there: a lease under which one block was committed twice holds its slot twice."""
    ordered = np.sort(slots)
    if not (ordered[1:] == ordered[:-1]).any():
        return slots, 1
    distinct, times = np.unique(slots, return_counts=True)
    return distinct, times.astype(np.int32)


def close(state: State, lease: Lease) -> None:
    """Release all of it."""
    cut(state, lease, 0, EndReason.RELEASED)
    lease.closed = True


def grant(state: State, lease: Lease) -> None:
    """Tell the client what has become ready since the last grant, in chain order."""
    if lease.closed or lease.ended:
        return
    first = ready = lease.granted
    if not lease.whole or not lease.pending:
        ready = min(_filled(member, first) for member in lease.slots)
    lease.granted = ready
    lease.ended = ready == len(lease) and not lease.pending
    if ready == first and not lease.ended:
        return
    slots = np.array([member[first:ready] for member in lease.slots], np.int32).reshape(len(lease.slots), ready - first)
    generations = np.array([member[first:ready] for member in lease.generations], np.uint32).reshape(slots.shape)
    units = np.where(slots > 0, state.dram.units[np.maximum(slots, 0)], 0).astype(np.uint32)
    if lease.ended:
        lease.hashes = None
    state.decide(Granted(lease.session, lease.id, first, units, generations, lease.reason if lease.ended else None))


def _filled(slots: array[int], first: int) -> int:
    """The first position from `first` on that still has to be filled; the length where none has."""
    empty = np.array(slots[first:], np.int32) == 0
    return first + (int(np.argmax(empty)) if empty.any() else len(empty))


def drop(state: State, lease: Lease) -> None:
    """Release a lease and forget it, wherever it is listed."""
    close(state, lease)
    if (session := state.sessions.get(lease.session)) and session.leases.get(lease.id) is lease:
        del session.leases[lease.id]
    for group in state.groups.values():
        if group.leases.get(lease.id) is lease:
            del group.leases[lease.id]
