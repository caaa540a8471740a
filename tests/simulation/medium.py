"""What lies on the simulated disk, by sectors: what a read answers now, and what a power failure would leave."""

from __future__ import annotations

from random import Random

SECTOR_BYTES = 512  # what a disk writes whole or not at all


class Medium:
    """One file. A sector that was written and not synced may, after a power failure, hold any of its contents since the last sync."""

    def __init__(self) -> None:
        self.bytes = bytearray()
        self._synced = bytearray()
        self._versions: dict[int, list[bytes]] = {}  # of sectors that were written since the last sync, oldest first

    def resize(self, size_bytes: int) -> None:
        """Longer, with zeros, or shorter."""
        for content in (self.bytes, self._synced):
            content[size_bytes:] = bytes(max(0, size_bytes - len(content)))
        self._versions = {sector: versions for sector, versions in self._versions.items() if sector * SECTOR_BYTES < size_bytes}

    def put(self, offset: int, data: bytes) -> None:
        """Write; reads answer it from now on."""
        if not data:
            return
        self.bytes[offset : offset + len(data)] = data
        for sector in range(offset // SECTOR_BYTES, -(-(offset + len(data)) // SECTOR_BYTES)):
            versions = self._versions.setdefault(sector, [])
            versions.append(bytes(self.bytes[sector * SECTOR_BYTES : (sector + 1) * SECTOR_BYTES]))

    def flip(self, offset: int, bit: int) -> None:
        """A bit rots, on the medium itself."""
        for content in (self.bytes, self._synced):
            content[offset] ^= 1 << bit

    def sync(self) -> None:
        """Everything written outlives a power failure from now on."""
        for sector, versions in self._versions.items():
            self._synced[sector * SECTOR_BYTES : (sector + 1) * SECTOR_BYTES] = versions[-1]
        self._versions.clear()

    def fail_sync(self) -> None:
        """The system could not write, says so once, and takes what it had for written: a later sync does not try it again."""
        self._versions.clear()

    def lose_power(self, chance: Random) -> None:
        """Each unsynced sector has one of its contents since the last sync, whatever the others have."""
        for sector in sorted(self._versions):
            start, versions = sector * SECTOR_BYTES, self._versions[sector]
            kept = chance.randrange(len(versions) + 1)
            if kept:
                self._synced[start : start + SECTOR_BYTES] = versions[kept - 1]
        self._versions.clear()
        self.bytes[:] = self._synced
