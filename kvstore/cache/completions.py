"""What the mover reports back, and what follows from it: blocks become readable, stored, or gone."""

from __future__ import annotations

from kvstore.cache import leases
from kvstore.cache.holders import Transfer, TransferKind
from kvstore.cache.index import HAS_CHECKSUM
from kvstore.cache.messages import ClearFinished, Corrupted, EndReason, NoticeKind, StartDelete, Tier, TransferDone, TransferResult
from kvstore.cache.moving import remove
from kvstore.cache.slots import SUSPECT, SlotState
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
        waiters, transfer.waiters = transfer.waiters, []
        for lease, member, position in waiters:
            leases.load_ready(state, lease, member, position, slot)
        state.expose(Tier.DRAM, slot)
        state.settle(nvme, transfer.source)
        return
    state.dram.become(slot, SlotState.FREE)
    leases.fail_waiters(state, transfer, EndReason.FAILED)
    if row:
        _drop_unreadable(state, transfer, row, report.result)
    else:
        state.settle(nvme, transfer.source)


def _drop_unreadable(state: State, transfer: Transfer, row: int, result: TransferResult) -> None:
    """A block that nvme cannot give back is gone from every tier. Wrong bytes quarantine the slot, unless a write may have been torn."""
    nvme = state.tables[Tier.NVME]
    corrupt = result is TransferResult.CORRUPT
    if corrupt:
        _tell_corruption(state, row, Tier.NVME, transfer.source)
    else:
        state.counters["unreadable_blocks"] += 1
    suspect = nvme.flags_at[transfer.source] & SUSPECT
    nvme.busy(transfer.source, 1)  # keeps the slot until it is known what becomes of it
    remove(state, row)
    nvme.busy(transfer.source, -1)
    if corrupt and not suspect:
        nvme.become(transfer.source, SlotState.QUARANTINED)
        _quarantine(state, transfer.source)
    else:
        state.settle(nvme, transfer.source)


def _tell_corruption(state: State, row: int, tier: Tier, slot: int) -> None:
    state.counters["corrupt_blocks"] += 1
    where, story = state.tables[tier].units_at[slot], state.story.of(state.index.word(row))
    state.decide(Corrupted(state.index.namespace_at[row], state.index.hash_bytes(row), tier, where, story))


def _quarantine(state: State, slot: int) -> None:
    nvme = state.tables[Tier.NVME]
    nvme.busy(slot, 1)
    transfer = state.new_transfer(TransferKind.DELETE, 0)
    transfer.deleting, transfer.quarantine = (slot,), True
    state.decide(StartDelete(transfer.id, nvme.units[[slot]], quarantine=True))


def _written(state: State, transfer: Transfer, report: TransferDone) -> None:
    row, nvme = transfer.row, state.tables[Tier.NVME]
    state.dram.busy(transfer.source, -1)
    nvme.busy(transfer.target, -1)
    if row:
        del state.writing[row]
    if row and report.result is TransferResult.OK and report.checksum is not None:
        state.index.checksum[row] = report.checksum
        state.index.flags_at[row] |= HAS_CHECKSUM
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
    if report.result is TransferResult.CORRUPT:  # not the disk's fault: in dram lie other bytes than the checksum says
        if row:
            _tell_corruption(state, row, Tier.DRAM, transfer.source)
            remove(state, row)
    elif report.result is not TransferResult.OK:
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
    for slot in transfer.deleting:
        nvme.busy(slot, -1)
        if nvme.state_at[slot] == SlotState.DOOMED:
            nvme.become(slot, SlotState.FREE)


def retry_deletes(state: State) -> None:
    """Try again what could not be deleted; the slots stay out of use until then."""
    if state.now < state.writes_paused_until:
        return
    again, state.retry_deletes = state.retry_deletes, []
    for transfer in again:
        state.decide(StartDelete(transfer.id, state.tables[Tier.NVME].units[list(transfer.deleting)], transfer.quarantine))
