"""The common case of acquire: every block of one chain is in dram already. One pass in C; `reading.plan` takes everything else."""

from __future__ import annotations

from kvstore.cache.holders import Lease, Session
from kvstore.cache.leases import affords
from kvstore.cache.messages import MAX_SLOT_HOLDS, UNIT_BYTES, EndReason, Hashes, KeepKind
from kvstore.cache.recency import use_many
from kvstore.cache.state import State


def lease_ready(state: State, session: Session, lease: Lease, hashes: Hashes) -> bool:
    """Fill an empty lease with all of it, or touch nothing and answer False where it is not the common case."""
    native, publishing = state.index.native, state.publishing
    if native is None or publishing is None or lease.group or state.verifies_hits or not len(hashes):
        return False
    spec = state.spec(lease.namespaces[0])
    if spec.keep.kind is not KeepKind.ALL:
        return False
    found = publishing.look_ready(native, lease.namespaces[0], hashes, session.counts, MAX_SLOT_HOLDS)
    if found is None:
        return False
    slots, rows, new, unheld = found
    slot_bytes = spec.slot_units * UNIT_BYTES
    if not affords(state, session, new * slot_bytes, unheld * slot_bytes):
        return False
    generations, turned = publishing.hold(slots, session.counts)
    state.dram.held_bytes += unheld * slot_bytes
    state.begin_holds(session, turned, new * slot_bytes)
    lease.slots[0].frombytes(slots.tobytes())
    lease.generations[0].frombytes(generations.tobytes())
    lease.reason = EndReason.COMPLETE
    use_many(state, rows)
    state.advanced.append(lease)
    return True
