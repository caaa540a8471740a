"""What the mover reports back, and what follows from it: blocks become readable, stored, or gone."""

from __future__ import annotations

import numpy as np

from kvstore.cache import checking, leases
from kvstore.cache.holders import Transfer, TransferKind
from kvstore.cache.leaving import remove
from kvstore.cache.messages import ClearFinished, EndReason, FoundBy, NoticeKind, StartDelete, Tier, TransferDone, TransferResult
from kvstore.cache.slots import SlotState
from kvstore.cache.state import State

WRITE_PAUSE_S = 1.0  # after a failed write nvme is left alone for so long, then tried again


def transfer_done(state: State, report: TransferDone) -> None:
    """One transfer ended. Unknown ids are ignored: a report may come twice."""
    transfer = state.transfers.pop(report.transfer, None)
    if transfer is None:
        return
    match transfer.kind:
        case TransferKind.DELETE:
            _deleted(state, transfer, report)
        case TransferKind.WRITE:
            _written(state, transfer, report)
        case TransferKind.READ:
            _read(state, transfer, report)
        case TransferKind.VERIFY:
            checking.verified(state, transfer, report)
        case TransferKind.SCRUB:
            checking.scrubbed(state, transfer, report)
    for clear, waits in list(state.clears.items()):
        if transfer.id not in waits or transfer.id in state.transfers:
            continue
        waits.discard(transfer.id)
        waits |= state.flush_deletes()  # a block that was on its way down when it was cleared has to be deleted now
        if not waits:
            del state.clears[clear]
            state.decide(ClearFinished(clear))


def _read(state: State, transfer: Transfer, report: TransferDone) -> None:
    row, slot, nvme = transfer.row, transfer.target, state.tables[Tier.NVME]
    state.dram.busy(slot, -1)
    nvme.busy(transfer.source, -1)
    if row:
        del state.reading[row]
    if row and report.result is TransferResult.OK:
        state.index.place(Tier.DRAM, row, slot)
        state.dram.row_at[slot] = row
        state.dram.become(slot, SlotState.LIVE)
        state.policies[Tier.DRAM].inserted(slot)
        state.counters["promoted"] += 1
        state.notice(NoticeKind.STORED, Tier.DRAM, row)
        leases.hand_out(state, transfer, slot)
        state.expose(Tier.DRAM, slot)
        state.settle(nvme, transfer.source)
        return
    state.dram.become(slot, SlotState.FREE)
    leases.fail_waiters(state, transfer, EndReason.FAILED)
    if row and report.result is TransferResult.CORRUPT:
        checking.drop_wrong(state, row, nvme, transfer.source, FoundBy.PROMOTION)
    elif row:
        state.counters["unreadable_blocks"] += 1
        remove(state, row)
    else:
        state.settle(nvme, transfer.source)


def _written(state: State, transfer: Transfer, report: TransferDone) -> None:
    row, nvme, result = transfer.row, state.tables[Tier.NVME], report.result
    state.dram.busy(transfer.source, -1)
    nvme.busy(transfer.target, -1)
    if row:
        del state.writing[row]
        result = checking.outcome(state, row, report)
    if row and result is TransferResult.OK:
        state.index.place(Tier.NVME, row, transfer.target)
        nvme.row_at[transfer.target] = row
        nvme.become(transfer.target, SlotState.LIVE)
        state.policies[Tier.NVME].inserted(transfer.target)
        state.counters["demoted"] += 1
        state.notice(NoticeKind.STORED, Tier.NVME, row)
        state.expose(Tier.NVME, transfer.target)
    else:  # its record may or may not be there: it is deleted before the slot is used again
        nvme.become(transfer.target, SlotState.DOOMED)
        state.settle(nvme, transfer.target)
    if result is TransferResult.CORRUPT:
        if row:
            checking.drop_wrong(state, row, state.dram, transfer.source, FoundBy.DEMOTION)
    elif result is not TransferResult.OK:
        state.counters["failed_writes"] += 1
        state.writes_paused_until = state.now + WRITE_PAUSE_S
        if row:
            state.to_write.add(transfer.source)
    state.settle(state.dram, transfer.source)


def _deleted(state: State, transfer: Transfer, report: TransferDone) -> None:
    nvme = state.tables[Tier.NVME]
    if report.result is not TransferResult.OK:
        state.counters["failed_deletes"] += 1
        state.transfers[transfer.id] = transfer
        state.retry_deletes.append(transfer)
        state.writes_paused_until = state.now + WRITE_PAUSE_S
        return
    slots = np.array(transfer.deleting, np.int32)
    nvme.transfers[slots] -= 1  # what is doomed or in quarantine is not counted as held for its transfers
    doomed = slots[nvme.state[slots] == SlotState.DOOMED]
    nvme.held_bytes -= int(nvme.bytes_of(doomed).sum())
    for _, mine in state.by_size(Tier.NVME, doomed):
        nvme.free_many(mine, SlotState.DOOMED)


def retry_deletes(state: State) -> None:
    """Try again what could not be deleted; the slots stay out of use until then."""
    if state.now < state.writes_paused_until:
        return
    again, state.retry_deletes = state.retry_deletes, []
    for transfer in again:
        state.decide(StartDelete(transfer.id, state.tables[Tier.NVME].units[list(transfer.deleting)], transfer.quarantine))
