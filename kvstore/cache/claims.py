"""Claim and release: a member's share of its group's lease, and the end of any lease."""

from __future__ import annotations

from array import array

import numpy as np

from kvstore.cache import leases
from kvstore.cache.holders import Lease
from kvstore.cache.messages import Claim, Claimed, Done, EndReason, Refused, Release
from kvstore.cache.sessions import group_of, open_session
from kvstore.cache.state import State


def claim(state: State, request: Claim) -> Claimed | Refused:
    """One member's slots of a lease that the group holds; this session now holds them too."""
    session = open_session(state, request.session)
    if isinstance(session, Refused):
        return session
    group = group_of(state, session, request.group)
    lease = group.leases.get(request.lease) if group else None
    if group is None or lease is None:
        return Refused("NOT_FOUND", f"no lease {request.lease} in group {request.group!r}; it was released, or JoinGroup is missing")
    if request.namespace not in lease.namespaces:
        return Refused("INVALID_ARGUMENT", f"namespace {request.namespace} is no member of group {request.group!r}")
    if not lease.ended:
        return Refused("FAILED_PRECONDITION", f"lease {request.lease} is still being granted; claim it after its last grant")
    own = lease
    if lease.session != session.id:
        if request.lease in session.leases:
            return Refused("ALREADY_EXISTS", f"lease {request.lease} is already claimed")
        if full := leases.may_begin(session):
            return full
        member = lease.namespaces.index(request.namespace)
        if not leases.may_hold(state, session, [slot for slot in lease.slots[member] if slot > 0]):
            return Refused("RESOURCE_EXHAUSTED", f"lease {request.lease} is more than this session may hold; raise its limit")
        own = Lease(lease.id, session.id, "", (request.namespace,), [array("i", lease.slots[member])], [lease.generations[member][:]])
        own.granted = len(own)
        session.leases[own.id] = own
        for slot in own.slots[0]:
            if slot > 0:
                state.hold_for(session, slot)
    slots = np.array(own.slots[own.namespaces.index(request.namespace)], np.int32)
    generations = np.array(own.generations[own.namespaces.index(request.namespace)], np.uint32)
    return Claimed(lease.id, np.where(slots > 0, state.dram.units[np.maximum(slots, 0)], 0).astype(np.uint32), generations)


def release(state: State, request: Release) -> Done | Refused:
    """End a lease of this session, or one that an ended member has left to its group, whole or from its tail. Never another's."""
    session = open_session(state, request.session)
    if isinstance(session, Refused):
        return session
    lease = session.leases.get(request.lease)
    for group in state.groups.values() if lease is None else ():
        left = group.leases.get(request.lease) if session.id in group.sessions else None
        if left is not None and left.session == 0:
            lease = left
    if lease is None:
        return Done(0)
    before = len(lease)
    if request.keep_blocks:
        leases.cut(state, lease, request.keep_blocks, EndReason.RELEASED)
        return Done(before - len(lease))
    leases.drop(state, lease)
    return Done(before)
