"""The common cases of reserve and commit, for many blocks at once: keys that are new, and one chain of new blocks.

They do in some dozen array operations what `writing` does block by block, which takes everything else. The property test drives both.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from kvstore.cache.holders import Lease, Session
from kvstore.cache.index import CHECKSUM_FLAGS, IN_FLIGHT, Rows
from kvstore.cache.leases import may_hold
from kvstore.cache.messages import UNIT_BYTES, BlockOutcome, Commit, Hashes, NoticeKind, Reserve, Reserved, Tier
from kvstore.cache.moving import free_rows, ghost, make_room
from kvstore.cache.recency import use_many
from kvstore.cache.slots import SlotIds, SlotState
from kvstore.cache.state import State


def commit_fresh_chain(state: State, session: Session, lease: Lease, request: Commit) -> bool:
    """Commit all of it, or touch nothing and answer False where it is not the common case."""
    compiled = _look_compiled(state, session, request)
    found = compiled or _look(state, session, request)
    if found is None:
        return False
    slots, rows = found
    rows = _publish(state, request, slots, rows, compiled=compiled is not None)
    if request.checksums is not None:
        state.index.checksum[rows] = request.checksums
        state.index.flags[rows] |= CHECKSUM_FLAGS
    state.dram.published(len(slots), state.spec(request.namespace).slot_units)
    _delete_all(session.reserved, slots)  # their counts in the session now stand for the lease
    lease.slots[0].frombytes(slots.tobytes())
    lease.generations[0].frombytes(np.ascontiguousarray(request.generations, np.uint32).tobytes())
    lease.granted = len(lease)
    _tell(state, request, slots)
    return True


def _look_compiled(state: State, session: Session, request: Commit) -> tuple[SlotIds, Rows] | None:
    """`_look` where the blocks were reserved by name and the library is there; None else."""
    index, publishing = state.index, state.publishing
    if index.native is None or publishing is None or not index.room or not _is_chain(request):
        return None
    where, facts = (request.units, request.generations), (request.namespace, state.spec(request.namespace).slot_units)
    return publishing.look_chain(index.native, facts, request.hashes, request.parents[:1], where, session.counts)


def _look(state: State, session: Session, request: Commit) -> tuple[SlotIds, Rows] | None:
    """The distinct slots of one chain of distinct new blocks, all anonymous or all reserved for just these, and their rows or zeros.

    Where it is such a chain, and rows are short, room is made for it.
    """
    index, dram, hashes = state.index, state.dram, request.hashes
    slots = dram.locate_all(request.units)
    right = (
        _is_chain(request)
        and len(set(slots.tolist())) == len(slots) > 0
        and session.reserved.keys() >= set(slots.tolist())
        and bool((dram.state[slots] == SlotState.RESERVED).all())
        and bool((dram.generation[slots] == request.generations).all())
        and bool((dram.bytes_of(slots) == state.spec(request.namespace).slot_units * UNIT_BYTES).all())
        and distinct(hashes)
        and not (hashes == request.parents[0]).all(axis=1).any()
    )
    rows = index.find(request.namespace, hashes)
    if not right or not _are_new(state, rows, dram.row[slots]):
        return None
    new = int(np.count_nonzero(rows == 0))
    if index.room <= new and new and free_rows(state, new + 1):
        rows = index.find(request.namespace, hashes)
    return (slots, rows) if index.room > new and _are_new(state, rows, dram.row[slots]) else None


def _is_chain(request: Commit) -> bool:
    return len(request.parents) == 1 or bool((request.parents[1:] == request.hashes[:-1]).all())


def _publish(state: State, request: Commit, slots: SlotIds, rows: Rows, *, compiled: bool) -> Rows:
    """The step in which the blocks become visible. Their rows."""
    index, dram = state.index, state.dram
    named = rows.any()
    above = ghost(state, request.namespace, request.parents[0].tobytes())
    if named:
        state.writer[rows] = 0
    if compiled and index.native is not None and state.publishing is not None:
        state.publishing.publish_chain(index.native, rows, slots, above, IN_FLIGHT | CHECKSUM_FLAGS)
        return rows
    if named:
        index.flags[rows] &= ~np.uint8(IN_FLIGHT | CHECKSUM_FLAGS)
    else:
        rows = index.add(request.namespace, request.hashes)
    _link_chain(state, rows, above)
    index.slot[Tier.DRAM][rows] = slots
    index.children[Tier.DRAM][rows[:-1]] += 1
    index.children_at[Tier.DRAM][above] += 1
    dram.row[slots] = rows
    dram.holds[slots] += 1  # held before, as reserved, and held now
    dram.state[slots] = SlotState.LIVE
    return rows


def _delete_all(table: dict[int, int], keys: SlotIds) -> None:
    """Delete distinct keys that are all there."""
    if len(keys) == len(table):
        table.clear()
    else:
        deque(map(table.__delitem__, keys.tolist()), maxlen=0)


def _are_new(state: State, rows: Rows, reserved_for: Rows) -> bool:
    if not rows.any():
        return not reserved_for.any()
    untouched = (state.index.parent[rows] == 0) & (state.index.first_child[rows] == 0) & ((state.index.flags[rows] & IN_FLIGHT) > 0)
    return bool((rows == reserved_for).all() and untouched.all())


def distinct(hashes: Hashes) -> bool:
    """Whether no hash is named twice."""
    words = np.sort(hashes[:, 0])
    if not (words[1:] == words[:-1]).any():
        return True
    packed = np.ascontiguousarray(hashes).view(np.dtype((np.void, 32))).ravel()
    return len(np.unique(packed)) == len(packed)


def reserve_new_keys(state: State, session: Session, request: Reserve, hashes: Hashes) -> Reserved | None:
    """Slots for keys the first of which are stored and the rest altogether new; None, with nothing done, where it is not that simple."""
    index, slot_units = state.index, state.spec(request.namespace).slot_units
    rows = index.find(request.namespace, hashes)
    stored = np.zeros(len(rows), bool)
    for tier in index.tiers:
        stored |= index.slot[tier][rows] > 0
    new = np.flatnonzero(rows == 0)
    simple = bool(stored[: len(rows) - len(new)].all()) and not stored[len(rows) - len(new) :].any()
    if not simple or not distinct(hashes) or not may_hold(state, session, [], slot_units * len(new)):
        return None
    use_many(state, rows[stored])
    standing = index.slot[Tier.DRAM][rows[stored]]
    standing = standing[standing > 0]
    state.hold_many(None, standing)  # so that the beginning of a chain is not pushed out for its rest
    short = len(new) > 0 and index.room <= len(new)
    if short and not (free_rows(state, len(new) + 1) and (index.find(request.namespace, hashes) == rows).all()):
        state.unhold_many(None, standing)
        return None
    slots = np.array(make_room(state, Tier.DRAM, slot_units, len(new), SlotState.RESERVED), np.int32)
    state.unhold_many(None, standing)
    outcomes = np.where(stored, BlockOutcome.EXISTS, BlockOutcome.NO_ROOM).astype(np.uint8)
    got = new[: len(slots)]
    outcomes[got] = BlockOutcome.SLOT
    if len(got) < len(new):  # the batch ends at the first failure
        outcomes[new[len(got)] + 1 :] = BlockOutcome.NONE
        state.counters["no_room"] += 1
    _reserve_rows(state, session, request, index.add(request.namespace, hashes[got]), slots)
    units, generations = np.zeros(len(rows), np.uint32), np.zeros(len(rows), np.uint32)
    units[got], generations[got] = state.dram.units[slots], state.dram.generation[slots]
    return Reserved(request.reservation, outcomes, units, generations)


def _reserve_rows(state: State, session: Session, request: Reserve, rows: Rows, slots: SlotIds) -> None:
    state.index.flags[rows] |= IN_FLIGHT
    state.dram.row[slots] = rows
    state.writer[rows] = slots
    session.reserved.update(dict.fromkeys(slots.tolist(), request.reservation))
    state.count_many(session, slots, 1)


def _link_chain(state: State, rows: Rows, above: int) -> None:
    index = state.index
    index.next_sibling[rows] = 0
    index.previous_sibling[rows] = 0
    index.parent[rows[1:]] = rows[:-1]
    index.first_child[rows[:-1]] = rows[1:]
    index.link(int(rows[0]), above)


def _tell(state: State, request: Commit, slots: SlotIds) -> None:
    state.policies[Tier.DRAM].inserted_many(slots)
    state.notice_many(NoticeKind.STORED, request.namespace, Tier.DRAM, request.hashes, (request.parents[:1], request.hashes[:-1]))
    state.story.tell(request.namespace, int(request.hashes[0, 0]), "commit", int(slots[0]), len(slots))
    state.counters["committed"] += len(slots)
    if state.nvme is not None and state.sizes.nvme_write == "through":
        state.to_write.add_many(slots)
    if state.verifies_hits:
        state.to_sum.add_many(slots)
