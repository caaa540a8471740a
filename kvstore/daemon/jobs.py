"""What the mover hands to the lanes: a few pieces of byte work of one kind, done by one thread without a pause between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.cache.messages import AssignExtent, StartDelete, StartRead, StartVerify, StartWrite, TransferResult


@dataclass(frozen=True)
class NamespaceFacts:
    """What moving a block needs to know of its namespace."""

    digest: bytes
    slot_units: int
    block_bytes: int


Namespaces = Mapping[int, NamespaceFacts]  # by the cache core's id; the daemon keeps it up to date


@dataclass(frozen=True, eq=False)
class ReadJob:
    """Blocks to copy up and verify."""

    items: tuple[StartRead, ...]


@dataclass(frozen=True, eq=False)
class WriteJob:
    """Blocks to copy down: all their bytes, then all their records."""

    items: tuple[StartWrite, ...]


@dataclass(frozen=True, eq=False)
class VerifyJob:
    """Blocks to look at in dram, since somebody waits for them or their first checksum is due."""

    items: tuple[StartVerify, ...]


@dataclass(frozen=True, eq=False)
class ScrubJob:
    """Blocks to look at where they lie, in an idle moment. They may leave their slots meanwhile: what is found is for the core to judge."""

    items: tuple[StartVerify, ...]


@dataclass(frozen=True, eq=False)
class DeleteJob:
    """Records to overwrite."""

    items: tuple[StartDelete, ...]


@dataclass(frozen=True, eq=False)
class AssignJob:
    """Extents whose slot size changes."""

    items: tuple[AssignExtent, ...]


Job = ReadJob | WriteJob | VerifyJob | ScrubJob | DeleteJob | AssignJob


@dataclass(frozen=True)
class Moved:
    """What became of one item. `checksum` (low, high) of the bytes, for blocks copied or looked at."""

    result: TransferResult
    checksum: tuple[int, int] | None = None
