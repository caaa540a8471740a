"""Carries out one job in the calling thread: bytes between the arena and the disk, checksums, records. Never raises."""

from __future__ import annotations

import logging
import mmap
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from kvstore.cache.messages import StartDelete, StartRead, StartVerify, StartWrite, Tier, TransferResult
from kvstore.checksum import block_checksum
from kvstore.daemon.jobs import AssignJob, DeleteJob, Job, Moved, NamespaceFacts, Namespaces, ReadJob, ScrubJob, VerifyJob, WriteJob
from kvstore.errors import InternalFault, KVStoreError, ResourceExhausted
from kvstore.geometry import UNIT_BYTES
from kvstore.tiers.base import BlockRecord, BlockTier

logger = logging.getLogger(__name__)

_FAILED = Moved(TransferResult.FAILED)
_OK = Moved(TransferResult.OK)

_Item = TypeVar("_Item")


class Copier:
    """Several threads call `run` at once, on jobs none of which writes into another's slot.

    `faults` counts what went wrong, by kind and error class.
    """

    def __init__(self, memory: memoryview, disk: BlockTier | None, namespaces: Namespaces) -> None:
        """`memory`: the dram arena. Without a disk only what lies in memory can be looked at."""
        self.faults: Counter[str] = Counter()
        self._memory = memory
        self._nvme = disk
        self._namespaces = namespaces
        self._lock = threading.Lock()
        self._scratch = memoryview(b"")
        self._scratch_lock = threading.Lock()  # one scrub at a time: there is no hurry

    def run(self, job: Job) -> list[Moved]:
        """One result an item, in order."""
        try:
            match job:
                case ReadJob():
                    return self._read(job.items)
                case WriteJob():
                    return self._write(job.items)
                case VerifyJob() | ScrubJob():
                    return [self._looked_at(each) for each in job.items]
                case DeleteJob():
                    return self._delete(job.items)
                case AssignJob():
                    return [self._tried("assign", partial(self._disk.assign_extent, each.extent, each.slot_units)) for each in job.items]
        except Exception as error:  # noqa: BLE001  a thread's edge: a lane that died would take its share of the disk with it
            self._note(type(job).__name__, error)
            return [_FAILED] * len(job.items)

    # ---- up

    def _read(self, reads: Sequence[StartRead]) -> list[Moved]:
        results: dict[int, Moved] = {}
        for run in _runs(reads, lambda read: read.source_units, self._slot_units):
            for read, arrived in zip(run, self._arrived(run), strict=True):
                results[read.transfer] = self._verified(read) if arrived.result is TransferResult.OK else arrived
        return [results[read.transfer] for read in reads]

    def _arrived(self, run: Sequence[StartRead]) -> list[Moved]:
        """One read for neighbours on the disk; where it fails, one for each, so that a bad block costs only itself."""
        targets = [self._slot(read.namespace, read.target_units) for read in run]
        whole = self._tried("read", partial(self._disk.read, run[0].source_units * UNIT_BYTES, targets))
        if whole.result is TransferResult.OK or len(run) == 1:
            return [whole] * len(run)
        return [
            self._tried("read", partial(self._disk.read, read.source_units * UNIT_BYTES, [target]))
            for read, target in zip(run, targets, strict=True)
        ]

    def _verified(self, read: StartRead) -> Moved:
        found = self._checksum(read.namespace, read.hash, read.target_units)
        if found == read.checksum:
            return Moved(TransferResult.OK, found)
        return Moved(TransferResult.CORRUPT)

    # ---- down

    def _write(self, writes: Sequence[StartWrite]) -> list[Moved]:
        """A block that has a checksum is compared with it on its way down too: a client may have given a wrong one."""
        results: dict[int, Moved] = {}
        sums: dict[int, tuple[int, int]] = {}
        for write in writes:
            sums[write.transfer] = self._checksum(write.namespace, write.hash, write.source_units)
            if write.checksum not in (None, sums[write.transfer]):
                results[write.transfer] = Moved(TransferResult.CORRUPT)
        sound = [write for write in writes if write.transfer not in results]
        for run in _runs(sound, lambda write: write.target_units, self._slot_units):
            results |= {write.transfer: left for write, left in zip(run, self._left(run), strict=True)}
        written = [write for write in writes if results[write.transfer].result is TransferResult.OK]
        for namespace in dict.fromkeys(write.namespace for write in written):  # each for itself: the disk may not know one of them yet
            mine = [write for write in written if write.namespace == namespace]
            moved = self._recorded([self._record(write, sums[write.transfer]) for write in mine])
            for write in mine:
                results[write.transfer] = Moved(moved.result, sums[write.transfer]) if moved.result is TransferResult.OK else moved
        return [results[write.transfer] for write in writes]

    def _left(self, run: Sequence[StartWrite]) -> list[Moved]:
        """As `_arrived`, downwards."""
        sources = [self._slot(write.namespace, write.source_units) for write in run]
        whole = self._tried("write", partial(self._disk.write, run[0].target_units * UNIT_BYTES, sources))
        if whole.result is TransferResult.OK or len(run) == 1:
            return [whole] * len(run)
        return [
            self._tried("write", partial(self._disk.write, write.target_units * UNIT_BYTES, [source]))
            for write, source in zip(run, sources, strict=True)
        ]

    def _record(self, write: StartWrite, checksum: tuple[int, int]) -> BlockRecord:
        facts = self._facts(write.namespace)
        return BlockRecord(write.target_units, write.generation, facts.digest, write.hash, write.parent, facts.block_bytes, checksum)

    def _recorded(self, records: list[BlockRecord]) -> Moved:
        """All in one call, so that they share one sync. Not tried again: what a failed sync left may be lost though the next works."""
        return self._tried("record", partial(self._disk.write_records, records))

    # ---- where they lie

    def _looked_at(self, look: StartVerify) -> Moved:
        if look.tier is not Tier.DRAM:
            return self._looked_at_below(look)
        return _compared(look, self._checksum(look.namespace, look.hash, look.units))

    def _looked_at_below(self, look: StartVerify) -> Moved:
        """From the disk a block comes into memory that is kept for this, as large as the largest slot so far."""
        facts = self._facts(look.namespace)
        size_bytes = facts.slot_units * UNIT_BYTES
        with self._scratch_lock:
            if len(self._scratch) < size_bytes:
                self._scratch = memoryview(mmap.mmap(-1, size_bytes))  # aligned, as O_DIRECT wants it
            arrived = self._tried("scrub", partial(self._disk.read, look.units * UNIT_BYTES, [self._scratch[:size_bytes]]))
            if arrived.result is not TransferResult.OK:
                return arrived
            return _compared(look, block_checksum(facts.digest, look.hash, self._scratch[: facts.block_bytes]))

    # ---- records alone

    def _delete(self, deletes: Sequence[StartDelete]) -> list[Moved]:
        """All of a kind in one call, so that they share one sync."""
        results: dict[int, Moved] = {}
        for quarantine in (False, True):
            units = [delete.units for delete in deletes if delete.quarantine is quarantine]
            if units:
                erase = partial(self._disk.delete_records, np.concatenate(units), quarantine)
                moved = self._tried("delete", erase)
                results |= {delete.transfer: moved for delete in deletes if delete.quarantine is quarantine}
        return [results[delete.transfer] for delete in deletes]

    # ---- shared

    @property
    def _disk(self) -> BlockTier:
        if self._nvme is None:
            raise InternalFault("a transfer to or from a disk, and there is none")
        return self._nvme

    def _tried(self, kind: str, act: Callable[[], None]) -> Moved:
        try:
            act()
        except ResourceExhausted as error:
            self._note(kind, error)
            return Moved(TransferResult.NO_SPACE)
        except KVStoreError as error:
            self._note(kind, error)
            return _FAILED
        return _OK

    def _note(self, kind: str, error: Exception) -> None:
        """Count, and log the first of each kind: a disk that fails fails thousands of times."""
        name = f"{kind}:{type(error).__name__}"
        with self._lock:
            self.faults[name] += 1
            first = self.faults[name] == 1
        if first:
            logger.error("nvme %s failed (further ones are only counted): %s", kind, error, exc_info=isinstance(error, InternalFault))

    def _facts(self, namespace: int) -> NamespaceFacts:
        facts = self._namespaces.get(namespace)
        if facts is None:
            raise InternalFault(f"a transfer of namespace {namespace}, which is not open")
        return facts

    def _slot_units(self, item: StartRead | StartWrite) -> int:
        return self._facts(item.namespace).slot_units

    def _slot(self, namespace: int, units: int) -> memoryview:
        start = units * UNIT_BYTES
        return self._memory[start : start + self._facts(namespace).slot_units * UNIT_BYTES]

    def _checksum(self, namespace: int, block_hash: bytes, units: int) -> tuple[int, int]:
        facts = self._facts(namespace)
        start = units * UNIT_BYTES
        return block_checksum(facts.digest, block_hash, self._memory[start : start + facts.block_bytes])


def _compared(look: StartVerify, found: tuple[int, int]) -> Moved:
    return Moved(TransferResult.OK if look.checksum in (None, found) else TransferResult.CORRUPT, found)


def _runs(items: Sequence[_Item], units: Callable[[_Item], int], slot_units: Callable[[_Item], int]) -> list[list[_Item]]:
    """The items by place on the disk, those that lie next to each other together."""
    runs: list[list[_Item]] = []
    end = -1
    for item in sorted(items, key=units):
        if units(item) != end:
            runs.append([])
        runs[-1].append(item)
        end = units(item) + slot_units(item)
    return runs
