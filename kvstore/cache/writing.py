"""Reserve, commit, abandon: how a block comes to be found."""

from __future__ import annotations

from array import array

import numpy as np

from kvstore.cache import leases
from kvstore.cache.finding import members_of
from kvstore.cache.fresh import commit_fresh_chain, reserve_new_keys
from kvstore.cache.holders import HOLE, Lease, Session
from kvstore.cache.index import CHECKSUM_FLAGS, IN_FLIGHT
from kvstore.cache.messages import (
    MAX_LEASE_BLOCKS,
    Abandon,
    BlockOutcome,
    Commit,
    Committed,
    Done,
    Hashes,
    NoticeKind,
    Refused,
    Reserve,
    Reserved,
    Tier,
)
from kvstore.cache.moving import ghost, make_room, needs_row
from kvstore.cache.recency import use
from kvstore.cache.sessions import free_key, give_back, give_back_many, open_session
from kvstore.cache.slots import SlotState
from kvstore.cache.state import State
from kvstore.cache.tails import keep_fresh_tokens, keep_one, keep_tokens, refuse_tokens


def reserve(state: State, request: Reserve) -> Reserved | Refused:
    """Slots to fill: `count` anonymous ones, or one for each hash that nobody has or is writing. Stops at the first failure."""
    session = open_session(state, request.session)
    if isinstance(session, Refused):
        return session
    members = members_of(state, session.tenant, request.namespace, "")
    if isinstance(members, Refused):
        return members
    if request.hashes is None:
        return _reserve_anonymous(state, session, request)
    at_once = reserve_new_keys(state, session, request, request.hashes)
    return at_once or _reserve_named(state, session, request, request.hashes)


def _reserve_anonymous(state: State, session: Session, request: Reserve) -> Reserved:
    slots = _take_slots(state, session, request) if request.count > 1 else []
    outcome = BlockOutcome.SLOT
    while len(slots) < request.count and outcome is BlockOutcome.SLOT:
        outcome, slot = _take_slot(state, session, request)
        if slot:
            slots.append(slot)
    outcomes = [BlockOutcome.SLOT] * len(slots) + ([] if outcome is BlockOutcome.SLOT else [outcome])
    return Reserved(request.reservation, np.array(outcomes, np.uint8), state.dram.units[slots], state.dram.generation[slots])


def _take_slots(state: State, session: Session, request: Reserve) -> list[int]:
    """All at once where the session may hold so much; else none."""
    slot_units = state.spec(request.namespace).slot_units
    if not leases.may_hold(state, session, [], slot_units * request.count):
        return []
    slots = make_room(state, Tier.DRAM, slot_units, request.count, SlotState.RESERVED)
    session.reserved.update(dict.fromkeys(slots, request.reservation))
    state.count_many(session, np.array(slots, np.int32), 1)
    return slots


def _take_slot(state: State, session: Session, request: Reserve) -> tuple[BlockOutcome, int]:
    slot_units = state.spec(request.namespace).slot_units
    if not leases.may_hold(state, session, [], slot_units):
        return BlockOutcome.LIMIT, 0
    got = make_room(state, Tier.DRAM, slot_units, 1, SlotState.RESERVED)
    if not got:
        state.counters["no_room"] += 1
        return BlockOutcome.NO_ROOM, 0
    session.reserved[got[0]] = request.reservation
    state.count_for(session, got[0], 1)
    return BlockOutcome.SLOT, got[0]


def _reserve_named(state: State, session: Session, request: Reserve, hashes: Hashes) -> Reserved:
    outcomes = np.zeros(len(hashes), np.uint8)
    slots = np.zeros(len(hashes), np.int32)
    standing: list[int] = []  # held until the end, so that the beginning of a chain is not pushed out for its rest
    for i in range(len(hashes)):
        outcome, slot = _reserve_key(state, session, request, hashes[i].tobytes(), standing)
        outcomes[i], slots[i] = outcome, slot
        if outcome in (BlockOutcome.NO_ROOM, BlockOutcome.LIMIT):
            break
    for slot in standing:
        state.unhold_for(None, slot)
    generations = np.where(slots > 0, state.dram.generation[slots], 0).astype(np.uint32)
    return Reserved(request.reservation, outcomes, np.where(slots > 0, state.dram.units[slots], 0).astype(np.uint32), generations)


def _reserve_key(state: State, session: Session, request: Reserve, key: bytes, standing: list[int]) -> tuple[BlockOutcome, int]:
    row = state.index.find_one(request.namespace, key)
    if row and state.index.flags_at[row] & IN_FLIGHT:
        return BlockOutcome.IN_FLIGHT, 0
    if row and state.index.stored(row):
        use(state, row)
        if twin := state.index.slot_at[Tier.DRAM][row]:
            state.hold_for(None, twin)
            standing.append(twin)
        return BlockOutcome.EXISTS, 0
    outcome, slot = _take_slot(state, session, request)
    if slot:
        if not needs_row(state):
            give_back(state, session, slot)
            return BlockOutcome.NO_ROOM, 0
        row = state.index.find_one(request.namespace, key) or state.index.add_one(request.namespace, key)
        state.index.flags_at[row] |= IN_FLIGHT
        state.writer_at[row] = slot
        state.dram.row_at[slot] = row
    return outcome, slot


# ---- commit


def commit(state: State, request: Commit) -> Committed | Refused:
    """Make filled slots visible, in order, each with its own outcome, and hold them under the lease."""
    session = open_session(state, request.session)
    if isinstance(session, Refused):
        return session
    members = members_of(state, session.tenant, request.namespace, "")
    if isinstance(members, Refused):
        return members
    if refused := refuse_tokens(state, request):
        return refused
    lease = _lease_for(session, request)
    if isinstance(lease, Refused):
        return lease
    count = len(request.hashes)
    if count == 1:
        done = _commit_single(state, session, lease, request)
        keep_one(state, request, BlockOutcome(done.outcomes[0]))
        return done
    if commit_fresh_chain(state, session, lease, request):
        none = np.zeros(count, np.uint32)
        keep_fresh_tokens(state, request)
        return Committed(request.lease, np.full(count, BlockOutcome.STORED, np.uint8), none, none)
    done = _commit_each(state, session, lease, request)
    keep_tokens(state, request, done.outcomes)
    return done


def _commit_single(state: State, session: Session, lease: Lease, request: Commit) -> Committed:
    """`_commit_each` for one block, without arrays on the way: a decoding sequence fills one at a time."""
    dram, shared = state.dram, 0
    slot = dram.locate(int(request.units[0]))
    mine = slot in session.reserved and dram.generation_at[slot] == int(request.generations[0])
    if not mine or dram.slot_units_of(slot) != state.spec(request.namespace).slot_units:
        outcome = BlockOutcome.BAD_SLOT
    else:
        outcome, shared = _commit_one(state, session, lease, slot, request.hashes.tobytes(), request.parents.tobytes())
        if outcome is BlockOutcome.STORED and request.checksums is not None:
            row = dram.row_at[slot]
            state.index.checksum[row] = request.checksums[0]
            state.index.flags_at[row] |= CHECKSUM_FLAGS
    unit, generation = (dram.units[shared], dram.generation[shared]) if shared > 0 else (0, 0)
    return Committed(request.lease, np.array([outcome], np.uint8), np.array([unit], np.uint32), np.array([generation], np.uint32))


def _commit_each(state: State, session: Session, lease: Lease, request: Commit) -> Committed:
    count = len(request.hashes)
    outcomes, shared = np.zeros(count, np.uint8), np.zeros(count, np.int32)
    slots = state.dram.locate_all(request.units).tolist()
    generations, slot_units = request.generations.tolist(), state.spec(request.namespace).slot_units
    keys = [key.tobytes() for key in request.hashes]
    parents = [parent.tobytes() for parent in request.parents] if len(request.parents) == count else [request.parents[0].tobytes(), *keys]
    for i, slot in enumerate(slots):
        mine = slot in session.reserved and state.dram.generation_at[slot] == generations[i]
        if not mine or state.dram.slot_units_of(slot) != slot_units:
            outcomes[i] = BlockOutcome.BAD_SLOT
            continue
        outcomes[i], shared[i] = _commit_one(state, session, lease, slot, keys[i], parents[i])
        if outcomes[i] == BlockOutcome.STORED and request.checksums is not None:
            row = state.dram.row_at[slot]
            state.index.checksum[row] = request.checksums[i]
            state.index.flags_at[row] |= CHECKSUM_FLAGS
    units = np.where(shared > 0, state.dram.units[shared], 0).astype(np.uint32)
    return Committed(request.lease, outcomes, units, np.where(shared > 0, state.dram.generation[shared], 0).astype(np.uint32))


def _lease_for(session: Session, request: Commit) -> Lease | Refused:
    lease = session.leases.get(request.lease)
    if lease is None:
        if full := leases.may_begin(session):
            return full
        lease = Lease(request.lease, session.id, "", (request.namespace,), [array("i")], [array("I")])
        session.leases[lease.id] = lease
    if lease.namespaces != (request.namespace,):
        return Refused("INVALID_ARGUMENT", f"lease {lease.id} is about other namespaces; commit under a lease of this namespace alone")
    if not lease.ended:
        return Refused("FAILED_PRECONDITION", f"lease {lease.id} is still being granted; commit after its last grant")
    if len(lease) + len(request.hashes) > MAX_LEASE_BLOCKS:
        return Refused("OUT_OF_RANGE", f"lease {lease.id} would have more than {MAX_LEASE_BLOCKS} blocks; begin another")
    return lease


def _commit_one(state: State, session: Session, lease: Lease, slot: int, key: bytes, parent: bytes) -> tuple[BlockOutcome, int]:
    index = state.index
    row = index.find_one(lease.namespaces[0], key)
    named = state.dram.row_at[slot]
    if named and named != row:
        return BlockOutcome.BAD_KEY, 0
    if row and index.stored(row):
        if named:
            free_key(state, slot)
        use(state, row)
        twin = 0 if state.verifies_hits else index.slot_at[Tier.DRAM][row]
        if twin and leases.may_hold_one(state, session, twin):
            leases.append(state, lease, twin)
            state.hold_for(session, twin)
            return BlockOutcome.EXISTS, twin
        leases.append(state, lease, HOLE)
        return BlockOutcome.EXISTS, 0
    if parent == key or (row and _is_above(state, row, lease.namespaces[0], parent)):
        return BlockOutcome.BAD_KEY, 0
    if not needs_row(state):
        return BlockOutcome.NO_ROOM, 0
    row = index.find_one(lease.namespaces[0], key) or index.add_one(lease.namespaces[0], key)
    _store(state, session, lease, slot, row, parent)
    return BlockOutcome.STORED, 0


def _is_above(state: State, row: int, namespace: int, parent: bytes) -> bool:
    """Whether the block in `row` is an ancestor of what it names as its parent: such a ring could never be evicted."""
    index = state.index
    at = index.find_one(namespace, parent) if index.first_child_at[row] else 0
    while at and at != row:
        at = index.parent_at[at]
    return at == row and at != 0


def _store(state: State, session: Session, lease: Lease, slot: int, row: int, parent: bytes) -> None:
    """The step in which a block becomes visible; its reservation becomes a lease."""
    index, dram = state.index, state.dram
    namespace = index.namespace_at[row]
    if writer := state.writer_at[row]:
        state.writer_at[row] = 0
        dram.row_at[writer] = 0  # perhaps another session's: the first commit wins
    index.flags_at[row] &= ~(IN_FLIGHT | CHECKSUM_FLAGS)
    if not index.parent_at[row]:
        index.link(row, ghost(state, namespace, parent))
    index.place(Tier.DRAM, row, slot)
    dram.row_at[slot] = row
    dram.hold(slot, 1)
    dram.become(slot, SlotState.LIVE)
    del session.reserved[slot]  # its count in the session now stands for the lease
    leases.append(state, lease, slot)
    state.policies[Tier.DRAM].inserted(slot)
    state.notice(NoticeKind.STORED, Tier.DRAM, row)
    state.story.tell(namespace, index.word(row), "commit", slot, session.id)
    state.counters["committed"] += 1
    if state.nvme is not None and state.sizes.nvme_write == "through":
        state.to_write.add(slot)
    if state.verifies_hits:
        state.to_sum.add(slot)


def abandon(state: State, request: Abandon) -> Done | Refused:
    """Give reserved slots back: those named, or all that is left of the reservation. Others' slots are never touched."""
    session = open_session(state, request.session)
    if isinstance(session, Refused):
        return session
    if request.units is None:
        mine = [slot for slot, reservation in session.reserved.items() if reservation == request.reservation]
    else:
        slots = state.dram.locate_all(request.units).tolist()
        wanted = request.generations.tolist() if request.generations is not None else [0] * len(slots)
        held = [s for s, g in zip(slots, wanted, strict=True) if s in session.reserved and state.dram.generation_at[s] == g]
        mine = list(dict.fromkeys(held))  # a slot named twice is given back once
    give_back_many(state, session, mine)
    return Done(len(mine))
