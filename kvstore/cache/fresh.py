"""The common commit, for many blocks at once: one chain, all of it new, into anonymous slots. Everything else goes block by block.

It does in some dozen array operations what `writing` does for each block; the property test drives both.
"""

from __future__ import annotations

import numpy as np

from kvstore.cache.holders import Lease, Session
from kvstore.cache.index import HAS_CHECKSUM, Rows
from kvstore.cache.messages import Commit, Tier, pack_hashes
from kvstore.cache.moving import ghost
from kvstore.cache.slots import SlotIds, SlotState
from kvstore.cache.state import State


def commit_fresh_chain(state: State, session: Session, lease: Lease, request: Commit) -> bool:
    """Commit all of it, or touch nothing and answer False where it is not the common case."""
    slots = state.dram.locate_all(request.units)
    if not _is_common(state, session, request, slots):
        return False
    index, dram = state.index, state.dram
    above = ghost(state, request.namespace, request.parents[0].tobytes())
    rows = index.add(request.namespace, request.hashes)
    _link_chain(state, rows, above)
    index.slot[Tier.DRAM][rows] = slots
    index.children[Tier.DRAM][rows[:-1]] += 1
    index.children_at[Tier.DRAM][above] += 1
    if request.checksums is not None:
        index.checksum[rows] = request.checksums
        index.flags[rows] |= HAS_CHECKSUM
    dram.row[slots] = rows
    dram.holds[slots] += 1  # held before, as reserved, and held now
    dram.move_many(slots, SlotState.RESERVED, SlotState.LIVE)
    for slot in slots.tolist():
        del session.reserved[slot]  # its count in the session now stands for the lease
    lease.slots[0].extend(slots.tolist())
    lease.generations[0].extend(request.generations.tolist())
    lease.granted = len(lease)
    _tell(state, request, slots)
    return True


def _is_common(state: State, session: Session, request: Commit, slots: SlotIds) -> bool:
    """One chain of distinct new blocks, into distinct anonymous slots of this session, with rows to spare."""
    count = len(slots)
    return (
        count > 0
        and len(request.parents) == 1
        and state.index.room > count
        and all(slot in session.reserved for slot in slots.tolist())
        and not state.dram.row[slots].any()
        and bool((state.dram.generation[slots] == request.generations).all())
        and len(np.unique(slots)) == count
        and len(np.unique(request.hashes, axis=0)) == count
        and not (request.hashes == request.parents[0]).all(axis=1).any()
        and not state.index.find(request.namespace, request.hashes).any()
    )


def _link_chain(state: State, rows: Rows, above: int) -> None:
    index = state.index
    index.next_sibling[rows] = 0
    index.previous_sibling[rows] = 0
    index.parent[rows[1:]] = rows[:-1]
    index.first_child[rows[:-1]] = rows[1:]
    index.link(int(rows[0]), above)


def _tell(state: State, request: Commit, slots: SlotIds) -> None:
    state.policies[Tier.DRAM].inserted_many(slots)
    packed = pack_hashes(request.hashes)
    state.notice_stored(request.namespace, Tier.DRAM, packed, request.parents[0].tobytes() + packed[:-32])
    state.story.tell(int(request.hashes[0, 0]), "commit", int(slots[0]), len(slots))
    state.counters["committed"] += len(slots)
    if state.nvme is not None and state.sizes.nvme_write == "through":
        state.to_write.add_many(slots)
