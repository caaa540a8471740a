"""The 128 bytes that say on disk what lies in one slot, and how they are checked.

A record is fixed in size and place, so a million of them load as one array. Its last word checks the other fifteen.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from kvstore.native.records import record_checks

Records = NDArray[np.void]  # of dtype RECORD
Words = NDArray[np.uint64]

RECORD_BYTES = 128  # four to a 512-byte sector, so that no record lies across two
MAGIC = 0x3152564B  # "KVR1" in little-endian bytes: a record of layout 1


class RecordState(IntEnum):
    EMPTY = 0  # all zero: nothing is in the slot
    LIVE = 1
    QUARANTINED = 2  # the medium returned wrong bytes here: not to be used
    EXTENT = 3  # the head of an extent's records: `slot_units` is the size of its slots


RECORD = np.dtype(
    [
        ("magic", "<u4"),
        ("state", "<u4"),
        ("namespace", "<u4"),  # this directory's number for it
        ("slot_units", "<u4"),
        ("hash", "<u8", 4),
        ("parent", "<u8", 4),
        ("units", "<u4"),  # the slot's offset in 4 KiB units
        ("generation", "<u4"),
        ("block_bytes", "<u8"),
        ("checksum", "<u8", 2),  # xxh3-128 of the block, low word first
        ("sequence", "<u8"),  # rises with every record written to this directory: which of two is newer
        ("check", "<u8"),
    ]
)

_WORDS = RECORD_BYTES // 8  # words of 8 bytes, the last of which is the check
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: its multiples make the keys of the words
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # SplitMix64's multipliers (Stafford's Mix13)
_KEYS = np.arange(1, _WORDS, dtype=np.uint64) * np.uint64(_GOLDEN)


def empty(count: int) -> Records:
    """`count` records that say nothing."""
    return np.zeros(count, dtype=RECORD)


def seal(records: Records) -> Records:
    """Set magic and check, in place; returns the same array."""
    records["magic"] = MAGIC
    records["check"] = _checks(records)
    return records


def intact(records: Records) -> NDArray[np.bool_]:
    """Which records are whole. An empty record is not; ask `blank` for these."""
    return np.asarray((records["magic"] == MAGIC) & (records["check"] == _checks(records)))


def blank(records: Records) -> NDArray[np.bool_]:
    """Which records are all zero."""
    return np.asarray(~_words(records).any(axis=1))


def as_bytes(records: Records) -> memoryview:
    """The records' own memory; they must be contiguous."""
    return records.view(np.uint8).data


def _words(records: Records) -> Words:
    return np.ascontiguousarray(records).view("<u8").reshape(-1, _WORDS)


def _checks(records: Records) -> Words:
    """One 64-bit word over the first fifteen: each is keyed by its place and mixed by SplitMix64's finaliser, and they are summed.

    The mix is one-to-one, so damage within one word always shows; anything wider passes once in 2**64. Not against forgery.
    """
    words = _words(records)
    compiled = record_checks(words)
    if compiled is not None:
        return compiled
    mixed = _mix(words[:, :-1] + _KEYS)
    return _mix(mixed.sum(axis=1, dtype=np.uint64))


def _mix(words: Words) -> Words:
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words ^= words >> np.uint64(27)
    words *= _MIX_2
    words ^= words >> np.uint64(31)
    return words
