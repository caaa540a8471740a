"""Blocks looked at where they lie: on a hit in dram, to take a first checksum, and in the background. What wrong bytes lead to.

A VERIFY keeps its slot in dram like any transfer, and leases wait for it as for a load. A SCRUB holds nothing, so that it is never in the
way of making room: what it found counts only if the same block is still in the same tenure of the slot.
"""

from __future__ import annotations

from kvstore.cache import leases
from kvstore.cache.holders import Transfer, TransferKind
from kvstore.cache.index import GIVEN, HAS_CHECKSUM
from kvstore.cache.leaving import remove
from kvstore.cache.messages import UNIT_BYTES, Corrupted, EndReason, FoundBy, StartVerify, Tier, TransferDone, TransferResult
from kvstore.cache.slots import SUSPECT, WRONG, SlotState, SlotTable
from kvstore.cache.state import State

SUMS_LOOKED_AT = 1024  # slots: most of a long queue may have got their checksum on the way down


def start_verify(state: State, row: int) -> StartVerify:
    """Begin to look at a block in dram, which nobody does yet."""
    slot = state.index.slot_at[Tier.DRAM][row]
    transfer = state.new_transfer(TransferKind.VERIFY, row, slot)
    state.verifying[row] = transfer
    state.dram.busy(slot, 1)
    return _start(state, transfer, state.dram)


def _start(state: State, transfer: Transfer, table: SlotTable) -> StartVerify:
    index, row = state.index, transfer.row
    low, high = index.checksum[row].tolist()
    checksum = (low, high) if index.flags_at[row] & HAS_CHECKSUM else None
    where = table.units_at[transfer.source]
    return StartVerify(transfer.id, index.namespace_at[row], index.hash_bytes(row), table.tier, where, checksum)


def next_sums(state: State, limit_bytes: int) -> list[StartVerify]:
    """Blocks whose first checksum is to be taken now, in the order of their commits: one at least, if any waits."""
    started: list[StartVerify] = []
    for _ in range(SUMS_LOOKED_AT):
        slot = state.to_sum.peek() if limit_bytes > 0 else 0
        if not slot:
            break
        state.to_sum.pop()
        row = state.dram.row_at[slot]
        if not state.index.flags_at[row] & HAS_CHECKSUM and row not in state.verifying:
            started.append(start_verify(state, row))
            limit_bytes -= state.dram.slot_units_of(slot) * UNIT_BYTES
    return started


def verified(state: State, transfer: Transfer, report: TransferDone) -> None:
    """A look at a block in dram has ended: whoever waits for it gets it, or the end of the prefix."""
    row, slot = transfer.row, transfer.source
    state.dram.busy(slot, -1)
    if row:
        del state.verifying[row]
        result = outcome(state, row, report)
        if result is TransferResult.OK:
            state.counters["verified"] += 1
            leases.hand_out(state, transfer, slot)
        else:
            leases.fail_waiters(state, transfer, EndReason.FAILED)
        if result is TransferResult.CORRUPT:
            drop_wrong(state, row, state.dram, slot, FoundBy.READ)
        elif result is not TransferResult.OK:
            state.counters["failed_verifies"] += 1
    state.settle(state.dram, slot)


def next_scrubs(state: State, limit_bytes: int) -> list[StartVerify]:
    """Blocks to look at in an idle moment: one at least, if the background check is due and one is near."""
    table, slots = state.scrub.take(state.now, limit_bytes)
    started = []
    for slot in slots.tolist():
        transfer = state.new_transfer(TransferKind.SCRUB, table.row_at[slot], slot)
        transfer.tier, transfer.generation = table.tier, table.generation_at[slot]
        started.append(_start(state, transfer, table))
    return started


def scrubbed(state: State, transfer: Transfer, report: TransferDone) -> None:
    """A look in the background has ended."""
    table, slot, row = state.tables[transfer.tier], transfer.source, transfer.row
    state.counters["scrubbed_bytes"] += table.slot_units_of(slot) * UNIT_BYTES
    same = table.state_at[slot] == SlotState.LIVE and table.row_at[slot] == row and table.generation_at[slot] == transfer.generation
    if not same:
        return
    result = outcome(state, row, report)
    if result is TransferResult.CORRUPT:
        drop_wrong(state, row, table, slot, FoundBy.SCRUB)
    elif result is not TransferResult.OK:
        state.counters["failed_scrubs"] += 1


def outcome(state: State, row: int, report: TransferDone) -> TransferResult:
    """What a report says of a block, now that its checksum may be known from elsewhere; a first checksum is kept."""
    if report.result is not TransferResult.OK:
        return report.result
    if report.checksum is None:
        return TransferResult.FAILED
    if state.index.flags_at[row] & HAS_CHECKSUM:
        low, high = state.index.checksum[row].tolist()
        if report.checksum != (low, high):
            return TransferResult.CORRUPT
        state.index.flags_at[row] &= ~GIVEN
        return TransferResult.OK
    state.index.checksum[row] = report.checksum
    state.index.flags_at[row] |= HAS_CHECKSUM
    return TransferResult.OK


def drop_wrong(state: State, row: int, table: SlotTable, slot: int, found_by: FoundBy) -> None:
    """A block's bytes are not what its checksum says: it goes from every tier, the slot into quarantine once nobody holds it.

    Not so where the medium need not be to blame: a write to nvme may have been torn by a crash, a client's checksum may be wrong.
    """
    index, word = state.index, state.index.word(row)
    blamed = not table.flags_at[slot] & SUSPECT and not index.flags_at[row] & GIVEN
    state.counters["corrupt_blocks"] += 1
    state.counters[f"corrupt_found_by_{found_by}"] += 1
    story = state.story.of(word)
    where = table.units_at[slot]
    state.decide(Corrupted(index.namespace_at[row], index.hash_bytes(row), table.tier, where, found_by, blamed, story))
    if blamed:
        table.flags_at[slot] |= WRONG
    remove(state, row)
