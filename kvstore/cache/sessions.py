"""Sessions and groups: who may hold what, and what the end of a process means.

A session that ends keeps all its holds as orphans: its keys are free at once, its slots only when its process is known to be gone. Until
then a new session of the same client may take the holds over (`resume`).
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from kvstore.cache import leases
from kvstore.cache.holders import Group, Session
from kvstore.cache.index import IN_FLIGHT
from kvstore.cache.messages import (
    MAX_SESSION_GROUPS,
    UNIT_BYTES,
    Attach,
    Done,
    EndReason,
    KeepKind,
    NamespaceSpec,
    Refused,
    SessionEnded,
    Tier,
)
from kvstore.cache.slots import FEW_SLOTS, SlotIds, SlotState
from kvstore.cache.state import State

LOOP_LAG_S = 0.25  # of the time between two ticks no more than this is silence: beyond it the daemon itself stood still, not its clients


def open_namespace(state: State, spec: NamespaceSpec) -> int | Refused:
    """The id of a namespace of this run; the same digest always answers the same id."""
    if spec.tails and (spec.keep.kind is not KeepKind.ALL or not spec.block_tokens):
        return Refused("INVALID_ARGUMENT", "tails need a namespace that keeps all blocks, and says how many tokens a block has")
    key = spec.tenant.encode() + b"\0" + spec.digest
    known = state.namespace_ids.get(key)
    if known is not None:
        if replace(state.spec(known), tails=spec.tails) != spec:
            return Refused("FAILED_PRECONDITION", "this namespace is open with another window; close it or use another kv_group")
        if spec.tails:
            state.namespaces[known] = spec
            state.index.keep_tokens()
        return known
    for table in state.tables.values():
        if spec.slot_units > table.extent_units:
            size, limit, tier = spec.slot_units * UNIT_BYTES, table.extent_units * UNIT_BYTES, table.tier.name.lower()
            text = f"a block of {size} bytes exceeds an extent of {tier}, {limit}: use fewer tokens a block, or a larger {tier} tier"
            return Refused("OUT_OF_RANGE", text)
    state.namespaces.append(spec)
    if spec.tails:
        state.index.keep_tokens()
    state.namespace_ids[key] = len(state.namespaces) - 1
    return len(state.namespaces) - 1


def refuses(state: State, request: Attach) -> Refused | None:
    """Why `attach` would refuse, if it would."""
    if request.session in state.sessions:
        return Refused("ALREADY_EXISTS", f"session {request.session} exists")
    if len(state.sessions) >= state.sizes.max_sessions:
        return Refused(
            "RESOURCE_EXHAUSTED", f"{state.sizes.max_sessions} sessions are attached, which is the limit; raise session.max_sessions"
        )
    old = state.sessions.get(request.resume) if request.resume else None
    if request.resume and (old is None or not old.ended or old.tenant != request.tenant):
        return Refused("NOT_FOUND", f"session {request.resume} has no holds to regain; attach without resume")
    if old is not None and 0 < request.limit_bytes < old.held_bytes:
        held = f"session {old.id} holds {old.held_bytes} bytes, {request.limit_bytes} are asked as limit"
        return Refused("RESOURCE_EXHAUSTED", f"{held}; ask for more, or attach without resume")
    promised = sum(session.guarantee_bytes for session in state.sessions.values() if not session.ended)
    if promised + request.guarantee_bytes > state.dram.capacity_bytes:
        left = state.dram.capacity_bytes - promised
        return Refused(
            "RESOURCE_EXHAUSTED", f"{request.guarantee_bytes} bytes asked as guarantee, {left} are not promised yet; ask for less"
        )
    return None


def attach(state: State, request: Attach) -> Done | Refused:
    """Begin a session, perhaps with the holds of an ended one."""
    if refused := refuses(state, request):
        return refused
    old = state.sessions.get(request.resume) if request.resume else None
    counts = np.zeros(state.dram.max_slots + 1, np.uint16)
    heard_at = math.inf if request.own else state.now
    session = Session(request.session, request.tenant, request.guarantee_bytes, request.limit_bytes, counts, heard_at)
    state.sessions[session.id] = session
    if old is not None:
        _take_over(state, old, session)
    return Done()


def _take_over(state: State, old: Session, new: Session) -> None:
    new.counts, new.held_bytes, new.leases, new.reserved = old.counts, old.held_bytes, old.leases, old.reserved
    for lease in new.leases.values():
        lease.session = new.id
    for slot in new.reserved:
        state.dram.become(slot, SlotState.RESERVED)
    for group in state.groups.values():
        if old.id in group.sessions:
            group.sessions.add(new.id)
            group.sessions.discard(old.id)
    del state.sessions[old.id]
    state.mark_all(new)


def refuses_group(state: State, session_id: int, name: str, namespaces: tuple[int, ...]) -> Refused | None:
    """Why the session cannot become a member of a group; None where it can."""
    session = open_session(state, session_id)
    if isinstance(session, Refused):
        return session
    for namespace in namespaces:
        if not 0 < namespace < len(state.namespaces) or state.spec(namespace).tenant != session.tenant:
            return Refused("NOT_FOUND", f"namespace {namespace} is not open; call OpenNamespace first")
    if not name or not namespaces or len(set(namespaces)) != len(namespaces):
        return Refused("INVALID_ARGUMENT", "a group needs a name and at least one namespace, each once")
    mine = sum(session_id in group.sessions for group in state.groups.values())
    if mine >= MAX_SESSION_GROUPS and group_of(state, session, name) is None:
        return Refused("RESOURCE_EXHAUSTED", f"the session is a member of {mine} groups, which is the most; use another session")
    group = state.groups.get((session.tenant, name))
    if group is not None and group.namespaces != namespaces:
        if all(state.sessions[other].ended for other in group.sessions if other in state.sessions):
            return Refused("UNAVAILABLE", f"group {name!r} of a process that has ended is being given back; try again in a second")
        return Refused("FAILED_PRECONDITION", f"group {name!r} has the members {group.namespaces}, in this order; use them or another name")
    return None


def join_group(state: State, session_id: int, name: str, namespaces: tuple[int, ...]) -> Done | Refused:
    """Become a member of a group; the first to come makes it."""
    if refused := refuses_group(state, session_id, name, namespaces):
        return refused
    session = state.sessions[session_id]
    group = state.groups.setdefault((session.tenant, name), Group(name, session.tenant, namespaces))
    group.sessions.add(session_id)
    return Done(len(group.sessions))


def open_session(state: State, session_id: int) -> Session | Refused:
    """The session if it may still act."""
    session = state.sessions.get(session_id)
    if session is None or session.ended:
        return Refused("FAILED_PRECONDITION", f"session {session_id} has ended; its leases are void: attach again, and drop what it held")
    return session


def group_of(state: State, session: Session, name: str) -> Group | None:
    """The group if the session has joined it."""
    group = state.groups.get((session.tenant, name)) if name else None
    return group if group and session.id in group.sessions else None


# ---- the end


def session_lost(state: State, session_id: int, reason: str) -> None:
    """The stream is gone, or silent too long: holds become orphans, reserved keys are free."""
    session = state.sessions.get(session_id)
    if session is None or session.ended:
        return
    session.ended = True
    for lease in session.leases.values():
        if not lease.ended:  # what was not granted will not be
            leases.cut(state, lease, lease.granted, EndReason.RELEASED)
            lease.ended = True
    slots = np.array(list(session.reserved), np.int32)
    free_keys(state, slots)
    state.dram.move_many(slots, SlotState.RESERVED, SlotState.ORPHANED)
    state.counters["sessions_lost"] += 1
    state.decide(SessionEnded(session_id, reason, orphans=bool(session.held_bytes)))


def free_key(state: State, slot: int) -> None:
    """A reserved slot no longer stands for a key."""
    row = state.dram.row_at[slot]
    if row:
        state.dram.row_at[slot] = 0
        state.writer_at[row] = 0
        state.index.flags_at[row] &= ~IN_FLIGHT
        state.index.drop_if_empty(row)


def free_keys(state: State, slots: SlotIds) -> None:
    """`free_key` for distinct slots."""
    rows = state.dram.row[slots]
    rows = rows[rows > 0]
    state.dram.row[slots] = 0
    state.writer[rows] = 0
    state.index.flags[rows] &= ~np.uint8(IN_FLIGHT)
    state.index.drop_empty(rows)


def process_gone(state: State, session_id: int) -> None:
    """The process of an ended session no longer exists: nothing of it can touch a slot any more."""
    session = state.sessions.get(session_id)
    if session is None or not session.ended:
        return
    for lease in list(session.leases.values()):
        group = state.groups.get((session.tenant, lease.group)) if lease.group else None
        if group and any(other != session_id and not state.sessions[other].ended for other in group.sessions if other in state.sessions):
            _leave_to_group(state, session, lease.id)
        else:
            leases.drop(state, lease)
    give_back_many(state, session, list(session.reserved))
    del state.sessions[session_id]
    _leave_groups(state, session_id)


def _leave_to_group(state: State, session: Session, lease_id: int) -> None:
    lease = session.leases.pop(lease_id)
    for member in lease.slots:
        for slot in member:
            if slot > 0:
                state.count_for(session, slot, -1)
    lease.session = 0


def _leave_groups(state: State, session_id: int) -> None:
    for key, group in list(state.groups.items()):
        group.sessions.discard(session_id)
        if not group.sessions:
            for lease in list(group.leases.values()):
                leases.drop(state, lease)
            del state.groups[key]


def detach(state: State, session_id: int) -> Done | Refused:
    """The client has unmapped the arena: all its holds end now."""
    session = open_session(state, session_id)
    if isinstance(session, Refused):
        return session
    held = len(session.leases) + len(session.reserved)
    session.ended = True
    state.decide(SessionEnded(session_id, "detached", orphans=False))
    process_gone(state, session_id)
    return Done(held)


def give_back(state: State, session: Session, slot: int) -> None:
    """A reserved (or orphaned) slot of a session is free again."""
    del session.reserved[slot]
    free_key(state, slot)
    state.count_for(session, slot, -1)
    state.dram.become(slot, SlotState.FREE)


def give_back_many(state: State, session: Session, slots: list[int]) -> None:
    """`give_back` for distinct slots that are all reserved, or all orphaned."""
    if len(slots) <= FEW_SLOTS:
        for slot in slots:
            give_back(state, session, slot)
        return
    for slot in slots:
        del session.reserved[slot]
    those = np.array(slots, np.int32)
    free_keys(state, those)
    state.count_many(session, those, -1)
    state.dram.held_bytes -= int(state.dram.bytes_of(those).sum())
    before = SlotState(state.dram.state_at[slots[0]])
    for _, mine in state.by_size(Tier.DRAM, those):
        state.dram.free_many(mine, before)


def hush(state: State, previous_tick_at: float) -> None:
    """End sessions that have been silent too long. Time during which the daemon's own loop stood still does not count."""
    stood_still_s = max(0.0, state.now - previous_tick_at - LOOP_LAG_S)
    for session in list(state.sessions.values()):
        session.heard_at += stood_still_s
        if not session.ended and state.now - session.heard_at > state.sizes.silence_s:
            session_lost(state, session.id, f"silent for {state.sizes.silence_s:g} s")
