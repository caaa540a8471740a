"""The file of records beside the data: which block lies in which slot, written after the block's bytes and read at start.

Each extent has a region of its own: a head record that says how large its slots are, then room for one record per 4 KiB unit,
of which the first `extent_units // slot_units` are used. The file is sparse; what an extent uses is written when it is
assigned, so that no record of an earlier use can come back.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InternalFault
from kvstore.geometry import UNIT_BYTES
from kvstore.native.records import WordSet, take_fields
from kvstore.tiers import record_codec as codec
from kvstore.tiers.direct_io import SharedFd, os_fault
from kvstore.tiers.record_codec import RECORD_BYTES, Records, RecordState

Units = NDArray[np.uint32]

FIELDS = ("namespace", "hash", "parent", "units", "generation", "block_bytes", "checksum")  # of a record, as LoadedRecords has them
LOAD_BATCH_RECORDS = 1 << 16  # 8 MiB: within reach of a processor's cache, and large enough for numpy's cost per call to vanish


@dataclass(frozen=True)
class LoadedRecords:
    """Every block found, oldest first, as parallel arrays of n; and what was found to be of no use, by its slot's first unit."""

    namespaces: NDArray[np.uint32]  # this directory's numbers
    hashes: NDArray[np.uint64]  # [n, 4]
    parents: NDArray[np.uint64]  # [n, 4]
    units: Units
    generations: Units
    block_bytes: NDArray[np.uint64]
    checksums: NDArray[np.uint64]  # [n, 2], low word first
    quarantined_units: Units
    torn_units: Units  # neither empty nor whole
    misplaced_units: Units  # whole, but of another slot, a namespace that is not known, or beyond the end of the data
    superseded_units: Units  # an older copy of a block that is also elsewhere

    def __len__(self) -> int:
        return len(self.units)


@dataclass(frozen=True)
class _Span:
    """Records `first` to `first + count` of one extent."""

    extent: int
    first: int
    count: int


class RecordFile:
    """`slot_units` [extents] int32 is the extent table. Threads may write disjoint records at once."""

    def __init__(self, path: Path, extents: int, extent_units: int) -> None:
        """Opens the file or makes it, cuts what lies beyond `extents`, and reads the extent table."""
        self.extent_units = extent_units
        self.slot_units = np.zeros(extents, dtype=np.int32)
        self._region_bytes = (1 + extent_units) * RECORD_BYTES
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(fd, extents * self._region_bytes)
        self._fd = SharedFd(fd, path)
        self._sequence = itertools.count(1)
        self._read_table()

    def assign(self, extent: int, slot_units: int) -> None:
        """The extent holds slots of this size from now on, all of them empty; 0: none."""
        head = codec.empty(1 + (self.extent_units // slot_units if slot_units else 0))
        head["state"][0] = RecordState.EXTENT
        head["units"][0] = extent * self.extent_units
        head["slot_units"][0] = slot_units
        codec.seal(head[:1])
        self._put(extent * self._region_bytes, head)
        self.slot_units[extent] = slot_units

    def write(self, records: Records) -> None:
        """Write each record to its slot's place; magic, slot size, sequence and check are set here. Neighbours go in one write."""
        records = records[np.argsort(records["units"], kind="stable")]
        if not self._assigned(records["units"]).all():
            raise InternalFault(f"{self._fd.path}: a record for an extent that has no slots")
        records["slot_units"] = self.slot_units[records["units"] // self.extent_units]
        records["sequence"] = [next(self._sequence) for _ in range(len(records))]
        self._put_each(self._offsets(records["units"]), codec.seal(records))

    def erase(self, units: Units) -> None:
        """Nothing is in these slots from now on. Slots of extents that are not assigned have no records, and are passed over."""
        units = np.sort(units[self._assigned(units)])
        self._put_each(self._offsets(units), codec.empty(len(units)))

    def quarantine(self, units: Units) -> None:
        """These slots are not to be used; remembered through a restart."""
        records = codec.empty(len(units))
        records["state"], records["units"] = RecordState.QUARANTINED, units
        self.write(records[self._assigned(units)])

    def load(self, readable_units: int, namespaces: NDArray[np.uint32]) -> LoadedRecords:
        """All records of assigned extents. Changes nothing. Blocks beyond `readable_units` or of other namespaces are misplaced."""
        known = _Known(readable_units, namespaces)
        records = codec.empty(sum(self.extent_units // int(units) for units in self.slot_units[self.slot_units > 0]))
        parts: list[_Found] = []
        first = 0
        for spans in self._batches():
            count = sum(span.count for span in spans)
            parts.append(self._load_batch(spans, known, records[first : first + count], first))
            first += count
        live = np.concatenate([np.zeros(0, np.int64), *(part.live for part in parts)])
        sequence = records["sequence"][live]
        if not (sequence[1:] > sequence[:-1]).all():
            by_age = np.argsort(sequence, kind="stable")
            live, sequence = live[by_age], sequence[by_age]
        if len(live):
            self._sequence = itertools.count(int(sequence[-1]) + 1)
        fields = take_fields(records, live, FIELDS)
        older = _older_copies(fields[0], fields[1])
        superseded = fields[3][older]
        namespaces, hashes, parents, units, generations, block_bytes, checksums = (
            [each[~older] for each in fields] if len(superseded) else fields
        )
        return LoadedRecords(
            namespaces,
            hashes,
            parents,
            units,
            generations,
            block_bytes,
            checksums,
            quarantined_units=_joined([part.quarantined for part in parts]),
            torn_units=_joined([part.torn for part in parts]),
            misplaced_units=_joined([part.misplaced for part in parts]),
            superseded_units=superseded,
        )

    def sync(self) -> None:
        """See `SharedFd.sync`."""
        self._fd.sync()

    @property
    def failed_syncs(self) -> int:
        """See `SharedFd`."""
        return self._fd.failed_syncs

    def deleted(self) -> bool:
        """See `SharedFd.deleted`."""
        return self._fd.deleted()

    def close(self) -> None:
        """Refuse further calls; those in progress end by themselves."""
        self._fd.close()

    def _assigned(self, units: Units) -> NDArray[np.bool_]:
        held: NDArray[np.bool_] = self.slot_units[units // self.extent_units] > 0
        return held

    def _read_table(self) -> None:
        heads = codec.empty(len(self.slot_units))
        for extent in range(len(heads)):
            self._get(extent * self._region_bytes, heads[extent : extent + 1])
        own = heads["units"] == np.arange(len(heads), dtype=np.uint64) * self.extent_units
        good = codec.intact(heads) & (heads["state"] == RecordState.EXTENT) & own & (heads["slot_units"] <= self.extent_units)
        self.slot_units[good] = heads["slot_units"][good]

    def _batches(self) -> Iterator[list[_Span]]:
        """The used records of every assigned extent, in pieces of at most LOAD_BATCH_RECORDS."""
        batch: list[_Span] = []
        room = LOAD_BATCH_RECORDS
        for extent in np.flatnonzero(self.slot_units).tolist():
            first, last = 0, self.extent_units // int(self.slot_units[extent])
            while first < last:
                count = min(room, last - first)
                batch.append(_Span(extent, first, count))
                first, room = first + count, room - count
                if not room:
                    yield batch
                    batch, room = [], LOAD_BATCH_RECORDS
        if batch:
            yield batch

    def _load_batch(self, spans: Sequence[_Span], known: _Known, records: Records, first: int) -> _Found:
        """Fill zeroed `records`, of which the first is number `first` of all, and say what they are."""
        units, slot_units = np.empty(len(records), np.uint32), np.empty(len(records), np.uint32)
        at = 0
        for span in spans:
            rows = slice(at, at + span.count)
            self._get(span.extent * self._region_bytes + (1 + span.first) * RECORD_BYTES, records[rows])
            slot_units[rows] = self.slot_units[span.extent]
            units[rows] = np.arange(span.first, span.first + span.count) * slot_units[at] + span.extent * self.extent_units
            at += span.count
        return _sorted_out(records, _Place(first, units, slot_units), known)

    def _offsets(self, units: Units) -> NDArray[np.int64]:
        """Where the records of these slots lie in the file. The extents of all of them must be assigned."""
        extents, inside = np.divmod(units.astype(np.int64), self.extent_units)
        places = 1 + inside // self.slot_units[extents]
        return np.asarray(extents * self._region_bytes + places * RECORD_BYTES, dtype=np.int64)

    def _put_each(self, offsets: NDArray[np.int64], records: Records) -> None:
        """Write records at rising offsets, one write for each run of neighbours."""
        for run in np.split(np.arange(len(offsets)), np.flatnonzero(np.diff(offsets) != RECORD_BYTES) + 1):
            if len(run):
                self._put(int(offsets[run[0]]), records[run[0] : run[-1] + 1])

    def _get(self, offset: int, records: Records) -> None:
        """Fill zeroed records; where the file has a hole or ends they stay empty."""
        with self._fd.use() as fd:
            try:
                os.preadv(fd, [codec.as_bytes(records)], offset)
            except OSError as error:
                raise os_fault(self._fd.path, "read", offset, error) from error

    def _put(self, offset: int, records: Records) -> None:
        rest = codec.as_bytes(np.ascontiguousarray(records))
        with self._fd.use() as fd:
            while rest:
                try:
                    put = os.pwrite(fd, rest, offset)
                except OSError as error:
                    raise os_fault(self._fd.path, "write", offset, error) from error
                offset, rest = offset + put, rest[put:]


@dataclass(frozen=True)
class _Known:
    """What a block must agree with to be of use."""

    readable_units: int
    namespaces: NDArray[np.uint32]

    def has(self, namespaces: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Which are known. [n]; mostly one namespace has them all."""
        if len(namespaces) and (namespaces == namespaces[0]).all():
            return np.full(len(namespaces), namespaces[0] in self.namespaces)
        return np.isin(namespaces, self.namespaces)


@dataclass(frozen=True)
class _Place:
    """Where each record of a batch was found; `first` is the number of the batch's first among all."""

    first: int
    units: Units
    slot_units: Units


@dataclass(frozen=True)
class _Found:
    """The records of one batch, by what they are."""

    live: NDArray[np.int64]  # their numbers among all
    quarantined: Units
    torn: Units
    misplaced: Units


def _sorted_out(records: Records, place: _Place, known: _Known) -> _Found:
    whole = codec.intact(records)
    here = whole & (records["units"] == place.units) & (records["slot_units"] == place.slot_units)
    quarantined = here & (records["state"] == RecordState.QUARANTINED)
    ends = place.units.astype(np.int64) + place.slot_units
    fits = records["block_bytes"] <= place.slot_units.astype(np.uint64) * np.uint64(UNIT_BYTES)
    live = here & fits & (records["state"] == RecordState.LIVE) & (ends <= known.readable_units)
    live &= known.has(records["namespace"])
    torn = ~whole
    torn[torn] = ~codec.blank(records[torn])
    return _Found(
        live=np.flatnonzero(live) + place.first,
        quarantined=place.units[quarantined],
        torn=place.units[torn],
        misplaced=place.units[whole & ~live & ~quarantined],
    )


def _older_copies(namespaces: NDArray[np.uint32], hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Among blocks in order of age, those whose (namespace, hash) comes again later."""
    older = np.zeros(len(namespaces), dtype=np.bool_)
    keys = hashes[:, 0] ^ (namespaces.astype(np.uint64) << np.uint64(32))
    if WordSet(len(keys)).note(keys).all():
        return older
    order = np.argsort(keys, kind="stable")
    sorted_keys = keys[order]
    first = np.flatnonzero(sorted_keys[1:] == sorted_keys[:-1])  # candidates: 64 bits that agree, compared in full below
    one, next_one = order[first], order[first + 1]
    older[one] = (namespaces[one] == namespaces[next_one]) & (hashes[one] == hashes[next_one]).all(axis=1)
    return older


def _joined(parts: Sequence[Units]) -> Units:
    return np.concatenate([np.zeros(0, np.uint32), *parts])
