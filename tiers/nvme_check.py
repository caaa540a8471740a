"""Reads every block of an nvme directory that no daemon has, compares it with its checksum, and forgets the bad ones if told to."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvstore.checksum import block_checksum
from kvstore.errors import ConfigError, KVStoreError
from kvstore.geometry import UNIT_BYTES
from kvstore.tiers.direct_io import DirectFile
from kvstore.tiers.nvme_directory import NvmeDirectory
from kvstore.tiers.nvme_records import LoadedRecords, RecordFile

THREADS = 4  # reads in flight: enough for a disk to reach its speed with blocks of some hundred KiB
BLOCKS_PER_PIECE = 64  # blocks between two calls of `progress`


@dataclass(frozen=True)
class BadBlock:
    """A block that does not read back as it was written."""

    hash: bytes
    units: int
    reason: str


@dataclass(frozen=True)
class Report:
    """What was found. Everything but blocks, bytes, quarantined slots and a stop that was not clean is a problem."""

    blocks: int
    block_bytes: int
    clean: bool
    quarantined_slots: int
    torn_records: int
    misplaced_records: int
    superseded_records: int
    bad: tuple[BadBlock, ...] = field(default=())
    repaired: bool = False

    @property
    def problems(self) -> int:
        """How many records or blocks are not as they should be."""
        return len(self.bad) + self.torn_records + self.misplaced_records + self.superseded_records


async def check(path: Path, *, repair: bool, progress: Callable[[int, int], None]) -> Report:
    """Check the whole directory. `progress(done, total)` in blocks. Raises ConfigError (a daemon has it, no blocks), FormatError."""
    directory = await NvmeDirectory.take(path, None)
    try:
        return _check(directory, repair, progress)
    finally:
        directory.close()


def _check(directory: NvmeDirectory, repair: bool, progress: Callable[[int, int], None]) -> Report:
    layout = directory.layout
    data_path, records_path = directory.path / "data", directory.path / "records"
    for path in (data_path, records_path):
        if not path.exists():
            raise ConfigError(f"{path} is missing, and with it every block; run: kvstore fsck --clear {directory.path}")
    data = DirectFile(data_path)
    records = RecordFile(records_path, layout.capacity_bytes // (layout.extent_units * UNIT_BYTES), layout.extent_units)
    try:
        numbers = np.array([each.number for each in directory.namespaces.values()], dtype=np.uint32)
        loaded = records.load(data_path.stat().st_size // UNIT_BYTES, numbers)
        bad = _verified(_Reader(data, directory, loaded), progress)
        if repair:
            units = np.array([each.units for each in bad], dtype=np.uint32)
            records.erase(np.concatenate([units, loaded.torn_units, loaded.misplaced_units, loaded.superseded_units]))
            records.sync()
        return Report(
            blocks=len(loaded),
            block_bytes=int(loaded.block_bytes.sum()),
            clean=directory.stopped_clean,
            quarantined_slots=len(loaded.quarantined_units),
            torn_records=len(loaded.torn_units),
            misplaced_records=len(loaded.misplaced_units),
            superseded_records=len(loaded.superseded_units),
            bad=tuple(bad),
            repaired=repair,
        )
    finally:
        data.close()
        records.close()


class _Reader:
    """Reads and compares blocks by their row among the loaded records."""

    def __init__(self, data: DirectFile, directory: NvmeDirectory, loaded: LoadedRecords) -> None:
        self.loaded = loaded
        self._data = data
        self._digests = {each.number: digest for digest, each in directory.namespaces.items()}

    def pieces(self) -> Iterator[list[int]]:
        """All rows, in the order in which they lie on the disk."""
        order = np.argsort(self.loaded.units, kind="stable").tolist()
        for start in range(0, len(order), BLOCKS_PER_PIECE):
            yield order[start : start + BLOCKS_PER_PIECE]

    def bad_of(self, rows: list[int]) -> list[BadBlock]:
        """Those of the rows that are not as they were written."""
        lengths = [-(-int(self.loaded.block_bytes[row]) // UNIT_BYTES) * UNIT_BYTES for row in rows]
        memory = memoryview(mmap.mmap(-1, max(UNIT_BYTES, *lengths)))
        found = [(row, self._reason(row, memory[:length])) for row, length in zip(rows, lengths, strict=True)]
        return [BadBlock(self.loaded.hashes[row].tobytes(), int(self.loaded.units[row]), reason) for row, reason in found if reason]

    def _reason(self, row: int, memory: memoryview) -> str:
        """Empty where the block is as it was written."""
        try:
            self._data.read(int(self.loaded.units[row]) * UNIT_BYTES, [memory])
        except KVStoreError as error:
            return str(error)
        digest = self._digests[int(self.loaded.namespaces[row])]
        block = memory[: int(self.loaded.block_bytes[row])]
        low, high = self.loaded.checksums[row].tolist()
        same = block_checksum(digest, self.loaded.hashes[row].tobytes(), block) == (low, high)
        return "" if same else "wrong bytes"


def _verified(reader: _Reader, progress: Callable[[int, int], None]) -> list[BadBlock]:
    bad: list[BadBlock] = []
    done = 0
    with ThreadPoolExecutor(THREADS) as pool:
        for found in pool.map(reader.bad_of, reader.pieces()):
            bad += found
            done = min(done + BLOCKS_PER_PIECE, len(reader.loaded))
            progress(done, len(reader.loaded))
    return bad
