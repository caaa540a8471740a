"""How much memory the daemon takes beyond its arenas: a fixed part, and a few bytes for each block that its index can hold."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from kvstore.clients import requests
from kvstore.hashing import HASH_BYTES
from kvstore.proto import kvstore_pb2 as pb
from kvstore.testing.daemon import DaemonProcess
from tests.cases.figures import eventually, opaque, private_bytes
from tests.cases.raw import Raw

pytestmark = pytest.mark.usefixtures("daemons_by_command")
FIXED_BYTES = 120_000_000  # the interpreter, grpc, numpy, and what a daemon needs however small it is
BYTES_PER_BLOCK = 176  # of the index's capacity
BATCH_BLOCKS = 8192  # the most that one batch may name
EXTENT_BYTES = 2 << 20  # the smallest
SPARE_ROWS = 16  # rows of the index past its blocks: one is their first parent's
ON_DISK_S = 90.0  # seconds until all blocks are written: far beyond what it takes on a loaded machine
SLOT_BYTES = 4096  # the smallest slot, so that memory holds as many blocks as the index


def stats_of(raw: Raw) -> pb.StatsReply:
    """The daemon's figures."""
    reply: pb.StatsReply = raw.stub.Stats(pb.StatsRequest(), timeout=10)
    return reply


def fill(raw: Raw, namespace: int, blocks: int) -> None:
    """Store so many blocks, one chain, without writing their bytes."""
    parent = bytes(HASH_BYTES)
    for start in range(0, blocks, BATCH_BLOCKS):
        hashes = os.urandom(HASH_BYTES * min(BATCH_BLOCKS, blocks - start))
        slots = raw.slots(requests.reserve(start + 1, namespace, hashes=hashes))
        committed = raw.slots(requests.commit(start + 1, namespace, (slots.units, slots.generations), hashes, parent))
        assert np.all(committed.outcomes == committed.outcomes[0])
        raw.ask(requests.release(start + 1))
        parent = hashes[-HASH_BYTES:]


@pytest.mark.parametrize(("blocks", "nvme"), [(100_000, True), (1_000_000, False)], ids=["100 thousand, with a disk", "1 million"])
def test_memory_beyond_the_arenas_is_bounded(tmp_path: Path, blocks: int, nvme: bool) -> None:
    """At most 120 MB, and 176 bytes for each block of the index's capacity, when every one of them is used, in every tier."""
    size = str(-(-blocks * SLOT_BYTES // EXTENT_BYTES) * EXTENT_BYTES)
    flags = ["--index-blocks", str(blocks + SPARE_ROWS), "--dram-extent-bytes", str(EXTENT_BYTES), "--no-dram-prefault"]
    with DaemonProcess(tmp_path, flags, dram=size, nvme=nvme, nvme_bytes="512MiB") as daemon, Raw(daemon.address) as raw:
        fill(raw, raw.open(opaque(SLOT_BYTES)), blocks)
        assert eventually(lambda: all(tier.blocks == blocks for tier in stats_of(raw).tiers), ON_DISK_S)
        assert stats_of(raw).index_used_blocks == blocks + 1  # and the parent of the first
        assert private_bytes(daemon.pid) <= FIXED_BYTES + BYTES_PER_BLOCK * (blocks + SPARE_ROWS)
