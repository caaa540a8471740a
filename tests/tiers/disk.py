"""Blocks on a disk tier for tests: written as the daemon writes them, read back and compared."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import numpy as np

from kvstore.checksum import block_checksum
from kvstore.geometry import UNIT_BYTES
from kvstore.testing.tier_contract import aligned, filled
from kvstore.tiers.base import BlockRecord
from kvstore.tiers.nvme import Durable, NvmeOptions, NvmeTier
from kvstore.tiers.record_codec import RECORD_BYTES

NAMESPACE = sha256(b"a namespace").digest()
EXTENT_UNITS = 16
SLOT_UNITS = 3  # five to an extent, with one unit over
BLOCK_BYTES = 2 * UNIT_BYTES + 100
REGION_BYTES = (1 + EXTENT_UNITS) * RECORD_BYTES  # of one extent in the file of records


@dataclass(frozen=True)
class Disk:
    """A directory and how it is opened."""

    directory: Path
    capacity_bytes: int = 8 * EXTENT_UNITS * UNIT_BYTES
    extent_units: int = EXTENT_UNITS
    durable: Durable = Durable.PROCESS
    opened: list[NvmeTier] = field(default_factory=list)

    def open(self) -> NvmeTier:
        options = NvmeOptions(self.directory, self.capacity_bytes, self.extent_units, self.durable)
        self.opened.append(asyncio.run(NvmeTier.open(options)))
        return self.opened[-1]

    def close(self) -> None:
        """Close whatever is still open, as a crash would."""
        for tier in self.opened:
            tier.close()

    def filled(self, blocks: int) -> NvmeTier:
        """Open, with blocks 0 to n-1 in the first extents' slots."""
        tier = self.open()
        asyncio.run(tier.add_namespace(NAMESPACE, {"tenant": "t"}))
        for extent in range(-(-blocks // (EXTENT_UNITS // SLOT_UNITS))):
            tier.assign_extent(extent, SLOT_UNITS)
        for number in range(blocks):
            store(tier, number)
        return tier


def block_hash(number: int) -> bytes:
    return sha256(b"block %d" % number).digest()


def units_of(number: int) -> int:
    """Where block `number` lies."""
    extent, inside = divmod(number, EXTENT_UNITS // SLOT_UNITS)
    return extent * EXTENT_UNITS + inside * SLOT_UNITS


def record_of(number: int, data: memoryview, units: int | None = None) -> BlockRecord:
    checksum = block_checksum(NAMESPACE, block_hash(number), data[:BLOCK_BYTES])
    where = units_of(number) if units is None else units
    return BlockRecord(where, 1 + number, NAMESPACE, block_hash(number), block_hash(number - 1), BLOCK_BYTES, checksum)


def store(tier: NvmeTier, number: int, units: int | None = None) -> None:
    """Block `number`: its bytes, then its record."""
    data = filled(number, SLOT_UNITS * UNIT_BYTES)
    record = record_of(number, data, units)
    tier.write(record.units * UNIT_BYTES, [data])
    tier.write_records([record])


def found(tier: NvmeTier) -> dict[int, int]:
    """Which blocks are on the disk by their records, number to units, each verified against its bytes."""
    loaded = tier.load()
    numbers = {block_hash(number): number for number in range(200)}
    blocks: dict[int, int] = {}
    for row, units in enumerate(loaded.units.tolist()):
        number = numbers[loaded.hashes[row].tobytes()]
        data = aligned(SLOT_UNITS * UNIT_BYTES)
        tier.read(units * UNIT_BYTES, [data])
        assert tuple(loaded.checksums[row].tolist()) == block_checksum(NAMESPACE, block_hash(number), data[:BLOCK_BYTES])
        assert loaded.parents[row].tobytes() == block_hash(number - 1)
        assert (loaded.generations[row], loaded.block_bytes[row]) == (1 + number, BLOCK_BYTES)
        blocks[number] = units
    return blocks


def slots(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """The slots of these blocks."""
    return np.array([units_of(number) for number in numbers], dtype=np.uint32)


def place_of_record(number: int) -> int:
    """Where the record of block `number` lies in its file."""
    extent, inside = divmod(units_of(number), EXTENT_UNITS)
    return extent * REGION_BYTES + (1 + inside // SLOT_UNITS) * RECORD_BYTES


def damage(path: Path, offset: int, bits: int = 0x10) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ bits]))
