"""Blocks on a local disk, which outlive the daemon: one preallocated file of slots, and records that say what lies in them.

Bytes move by O_DIRECT between the disk and the memory given. A block's record is written after its bytes, and where a write
is to outlive a power failure both are synced in that order, so a record never speaks of bytes that are not there.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.config import format_bytes
from kvstore.errors import ConfigError, EnvironmentFault, KVStoreError, Unavailable
from kvstore.geometry import UNIT_BYTES
from kvstore.tiers import record_codec as codec
from kvstore.tiers.base import BlockRecord, Health, HealthState
from kvstore.tiers.direct_io import DirectFile, check_range, write_and_read_back
from kvstore.tiers.health import HealthRecord
from kvstore.tiers.nvme_directory import Layout, NvmeDirectory, StoredNamespace
from kvstore.tiers.nvme_records import LoadedRecords, RecordFile
from kvstore.tiers.record_codec import RecordState
from kvstore.tiers.room import Request, allocate
from kvstore.tiers.small_files import sync_directory

PROBE_QUIET_S = 3.0  # seconds without a new fault until a probe is worth it: failed writes and deletes are tried again every second
MAX_CAPACITY_BYTES = UNIT_BYTES << 32  # bytes: a slot's place is a count of units in 32 bits


class Durable(StrEnum):
    """When a write counts as stored."""

    PROCESS = "process"  # once the system has it: it outlives the daemon
    POWER = "power"  # once the medium has it: it outlives a power failure


@dataclass(frozen=True)
class NvmeOptions:
    directory: Path
    capacity_bytes: int  # rounded down to whole extents
    extent_units: int  # of a new directory; an old one keeps its own
    durable: Durable = Durable.PROCESS


class NvmeTier:
    """A `BlockTier`. Made by `open`; read and record calls come from several threads, everything else from the event loop."""

    name = "nvme"

    def __init__(self, directory: NvmeDirectory, data: DirectFile, records: RecordFile, durable: Durable, readable_units: int) -> None:
        """Use `open`. `readable_units`: how much of the data was there before this run."""
        self.directory = directory
        self.suspect = not directory.stopped_clean
        self.notes: tuple[str, ...] = (data.refusal,) if data.refusal else ()
        self._data = data
        self._records = records
        self._durable = durable
        self._readable_units = readable_units
        self._failed_syncs: dict[int, int] = {}  # by offset of a slot: how many syncs of the data had failed when it was last written
        self._health = HealthRecord(data.refusal)

    @classmethod
    async def open(cls, options: NvmeOptions) -> NvmeTier:
        """Take the directory, and all of its disk space. A smaller capacity than last time drops the blocks beyond it.

        Raises ConfigError (in use, not enough room, not writable) and FormatError, each with what to do.
        """
        fresh = Layout(uuid.uuid4().hex, 0, options.extent_units)
        directory = await NvmeDirectory.take(options.directory, fresh)
        try:
            return await cls._open(directory, options)
        except BaseException as error:
            directory.close()
            if isinstance(error, OSError):
                raise ConfigError(f"nvme directory {options.directory}: {error.strerror}; check the disk") from error
            raise

    @classmethod
    async def _open(cls, directory: NvmeDirectory, options: NvmeOptions) -> NvmeTier:
        data_path, records_path = directory.path / "data", directory.path / "records"
        there_bytes = data_path.stat().st_size if data_path.exists() else 0
        layout = directory.layout if there_bytes else replace(directory.layout, extent_units=options.extent_units)
        extents = _whole_extents(options, layout)
        capacity_bytes = extents * layout.extent_units * UNIT_BYTES
        if not there_bytes:  # says what it is before it holds anything: a stop at any moment, or too little room, leaves no riddle
            directory.layout = layout
            await directory.begin(capacity_bytes)
        await asyncio.to_thread(_prepare_data, data_path, capacity_bytes)
        await directory.begin(capacity_bytes)
        if not there_bytes:
            records_path.unlink(missing_ok=True)
        records = RecordFile(records_path, extents, layout.extent_units)
        await asyncio.to_thread(sync_directory, directory.path)
        readable_units = min(there_bytes, capacity_bytes) // UNIT_BYTES
        return cls(directory, DirectFile(data_path), records, options.durable, readable_units)

    @property
    def capacity_bytes(self) -> int:
        """Size of the data file."""
        return self.directory.layout.capacity_bytes

    @property
    def extent_units(self) -> int:
        """Size of an extent; that of an old directory, whatever was asked for."""
        return self.directory.layout.extent_units

    @property
    def extent_slot_units(self) -> NDArray[np.int32]:
        """[extents] how large the slots of each extent are on disk; 0: not assigned."""
        return self._records.slot_units.copy()

    @property
    def namespaces(self) -> Mapping[bytes, StoredNamespace]:
        """By digest, with the facts given to `add_namespace`, of this run and earlier ones."""
        return self.directory.namespaces

    async def add_namespace(self, digest: bytes, facts: Mapping[str, Any]) -> StoredNamespace:
        """Durable on return; a block's record can be written only after its namespace was added. `facts` is JSON.

        Raises ResourceExhausted where the disk is full, Unavailable on other faults.
        """
        with self._watched("namespaces"):
            self._require_files()
            return await self.directory.add_namespace(digest, facts)

    async def forget_unused(self, loaded: LoadedRecords) -> int:
        """Forget the namespaces of which `load` has found no block; how many. Raises as `add_namespace` does."""
        used = set(np.unique(loaded.namespaces).tolist())
        unused = [digest for digest, each in self.namespaces.items() if each.number not in used]
        if unused:
            with self._watched("namespaces"):
                await self.directory.forget_namespaces(unused)
        return len(unused)

    def load(self) -> LoadedRecords:
        """Every block that was here when the tier was opened, oldest first; records of no use are erased.

        Call once, before the first write. Takes about a second for a million records: call it in a thread.
        """
        if self._durable is Durable.POWER:
            self.sync()  # what the last run wrote and could not sync any more counts from now on
        numbers = np.array([each.number for each in self.namespaces.values()], dtype=np.uint32)
        loaded = self._records.load(self._readable_units, numbers)
        useless = np.concatenate([loaded.torn_units, loaded.misplaced_units, loaded.superseded_units])
        if len(useless):
            self._records.erase(useless)
        return loaded

    def read(self, offset_bytes: int, targets: Sequence[memoryview]) -> None:
        """See `ByteTier.read`."""
        check_range(self.name, self.capacity_bytes, offset_bytes, targets)
        with self._watched("read"):
            self._data.read(offset_bytes, targets)

    def write(self, offset_bytes: int, sources: Sequence[memoryview]) -> None:
        """See `ByteTier.write`."""
        check_range(self.name, self.capacity_bytes, offset_bytes, sources)
        for start in itertools.accumulate((source.nbytes for source in sources[:-1]), initial=offset_bytes):
            self._failed_syncs[start] = self._data.failed_syncs
        with self._watched("write"):
            self._require_files()
            self._data.write(offset_bytes, sources)

    def assign_extent(self, extent: int, slot_units: int) -> None:
        """See `BlockTier.assign_extent`."""
        with self._watched("assign"), self._on_medium():
            self._records.assign(extent, slot_units)

    def write_records(self, records: Sequence[BlockRecord]) -> None:
        """See `BlockTier.write_records`. Syncs the data first where writes are to outlive a power failure."""
        encoded = self._encoded(records)
        with self._watched("record"):
            if self._durable is Durable.POWER:
                self._sync_data([record.units * UNIT_BYTES for record in records])
            with self._on_medium():
                self._records.write(encoded)
            self._require_files()  # last: what is deleted from here on was stored

    def delete_records(self, units: NDArray[np.uint32], quarantine: bool) -> None:
        """See `BlockTier.delete_records`."""
        with self._watched("delete"), self._on_medium():
            if quarantine:
                self._records.quarantine(units)
            else:
                self._records.erase(units)

    def sync(self) -> None:
        """Return when everything written is on the medium."""
        with self._watched("sync"):
            self._data.sync()
            self._records.sync()

    def health(self) -> Health:
        """See `ByteTier.health`."""
        health = self._health.health()
        if health.state is not HealthState.FAILED and (why := self._deleted()):
            return Health(HealthState.DEGRADED, why)
        return health

    def probe(self) -> None:
        """Where faults stand and none is new, write a page and read it back: if that works, they stand no more. Call it in a thread.

        Not in the file of slots, all of which belongs to the cache. Where there is nothing left to write or delete, nothing else would
        find out that the disk is well again.
        """
        if not self._health.quiet_for(PROBE_QUIET_S):
            return
        began_at = time.monotonic()
        try:
            write_and_read_back(self.directory.path / "probe")
        except (KVStoreError, OSError) as error:
            self._health.failed("probe", f"nvme: {error}")
        else:
            self._health.well(began_at)

    async def stop_clean(self) -> None:
        """Sync, say on disk that this was an orderly stop, and close. Nothing may be written any more. Raises as `write` does."""
        self.sync()
        self._require_files()  # the directory may be another daemon's by now
        await self.directory.mark_clean()
        self.close()

    def close(self) -> None:
        """See `ByteTier.close`. Without `stop_clean` the next run takes this for a crash."""
        self._health.close()
        self._data.close()
        self._records.close()
        self.directory.close()

    def _deleted(self) -> str:
        """What to say where a file has been deleted under the daemon; empty where both are in place."""
        gone = [name for name, file in (("data", self._data), ("records", self._records)) if file.deleted()]
        if not gone:
            return ""
        what = f"{self.directory.path}: {' and '.join(gone)} deleted under the daemon"
        return f"{what}; what is there is served until it stops, nothing more is stored; restart it, and it begins with an empty disk"

    def _require_files(self) -> None:
        """Raises Unavailable where what is written now would be gone with the daemon."""
        if why := self._deleted():
            raise Unavailable(why)

    def _encoded(self, blocks: Sequence[BlockRecord]) -> codec.Records:
        records = codec.empty(len(blocks))
        for record, block in zip(records, blocks, strict=True):
            namespace = self.namespaces.get(block.namespace_digest)
            if namespace is None:
                raise Unavailable(f"nvme: namespace {block.namespace_digest.hex()[:12]} is not on disk yet, so its blocks cannot be")
            record["namespace"] = namespace.number
            record["hash"] = np.frombuffer(block.hash, "<u8")
            record["parent"] = np.frombuffer(block.parent, "<u8")
            record["units"], record["generation"] = block.units, block.generation
            record["block_bytes"], record["checksum"] = block.block_bytes, block.checksum
        records["state"] = RecordState.LIVE
        return records

    def _sync_data(self, offsets: Sequence[int]) -> None:
        """What was written from these offsets on is on the medium. Raises Unavailable too where another thread's sync has failed since."""
        self._data.sync()
        if any(self._failed_syncs.get(offset) != self._data.failed_syncs for offset in offsets):
            raise Unavailable("nvme: a sync failed after these blocks were written, so they may be lost; they are written anew")

    @contextmanager
    def _on_medium(self) -> Iterator[None]:
        """Records written inside are on the medium afterwards, where writes are to outlive a power failure. Raises as `_sync_data` does."""
        before = self._records.failed_syncs
        yield
        if self._durable is Durable.POWER:
            self._records.sync()
            if self._records.failed_syncs != before:
                raise Unavailable("nvme: another thread's sync failed meanwhile, so these records may be lost; they are written anew")

    @contextmanager
    def _watched(self, kind: str) -> Iterator[None]:
        """Health follows what became of the call."""
        try:
            yield
        except EnvironmentFault as error:
            self._health.failed(kind, str(error))
            raise
        self._health.worked(kind)


def _whole_extents(options: NvmeOptions, layout: Layout) -> int:
    """How many extents fit. Raises ConfigError where that is none, or more than can be addressed."""
    extent_bytes, asked = layout.extent_units * UNIT_BYTES, format_bytes(options.capacity_bytes)
    if options.capacity_bytes < extent_bytes:
        raise ConfigError(f"nvme: {asked} asked, one extent is {format_bytes(extent_bytes)}; set a larger --nvme-bytes")
    if options.capacity_bytes > MAX_CAPACITY_BYTES:
        raise ConfigError(f"nvme: {asked} asked, at most {format_bytes(MAX_CAPACITY_BYTES)} can be used; set a smaller --nvme-bytes")
    return options.capacity_bytes // extent_bytes


def _prepare_data(path: Path, capacity_bytes: int) -> None:
    """The file of slots has its size, and all of it is taken. Raises ConfigError where there is less room than that."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(fd).st_size > capacity_bytes:
            os.ftruncate(fd, capacity_bytes)
        allocate(fd, path.parent, Request("nvme data", capacity_bytes, "set a smaller --nvme-bytes or free some room"))
    finally:
        os.close(fd)
