"""The daemon's resident memory beyond its arena: a fixed part, and so many bytes for each block that its index can hold."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import numpy as np
import pytest

from kvstore.cache.state import extent_bytes_for
from kvstore.clients.client import KVClient
from kvstore.geometry import UNIT_BYTES, Geometry, namespace_fields
from kvstore.hashing import Identity, namespace_digest
from kvstore.testing.daemon import DaemonProcess
from kvstore.tiers import record_codec as codec
from kvstore.tiers.nvme import NvmeOptions, NvmeTier
from kvstore.tiers.record_codec import RecordState

pytestmark = pytest.mark.usefixtures("daemons_by_command")
FIXED_BYTES = 120_000_000  # bytes: the interpreter, grpc, numpy, and what a session needs
BLOCK_BYTES = 176  # bytes for each block of the index's capacity

IDENTITY = Identity(model="tests/tiny")
GEOMETRY = Geometry("mha", 1, 1, 64, 64, "bfloat16", 16)  # 4 KiB a block, the least there is


async def _filled(directory: Path, blocks: int, capacity_bytes: int) -> bytes:
    """A disk tier with so many records, in one chain. Returns its hashes."""
    tier = await NvmeTier.open(NvmeOptions(directory, capacity_bytes, extent_bytes_for(capacity_bytes) // UNIT_BYTES))
    fields = namespace_fields("default", IDENTITY, GEOMETRY)
    facts = {"tenant": "default", "fields": fields, "keep": {"kind": "all", "window_blocks": 0}}
    await tier.add_namespace(namespace_digest(fields), facts)
    for extent in range(-(-blocks // tier.extent_units)):
        tier.assign_extent(extent, GEOMETRY.slot_units)
    hashes = np.random.default_rng(7).integers(1, 2**63, (blocks, 4), dtype=np.uint64)
    records = codec.empty(blocks)
    records["namespace"], records["generation"], records["checksum"] = 1, 1, 1
    records["hash"], records["parent"] = hashes, np.roll(hashes, 1, axis=0)
    records["parent"][0] = 0
    records["units"], records["block_bytes"], records["state"] = np.arange(blocks), GEOMETRY.block_bytes, RecordState.LIVE
    tier._records.write(records)
    await tier.stop_clean()
    return hashes.tobytes()


def resident_bytes(pid: int) -> tuple[int, int]:
    """(beyond shared memory, shared memory)."""
    found = dict(re.findall(r"(RssAnon|RssFile|RssShmem):\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text()))
    return (int(found["RssAnon"]) + int(found["RssFile"])) * 1024, int(found["RssShmem"]) * 1024


@pytest.mark.parametrize("blocks", [100_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_memory_is_bounded_by_the_indexs_capacity(tmp_path: Path, blocks: int) -> None:
    capacity_bytes = blocks * GEOMETRY.slot_bytes + (64 << 20)
    hashes = asyncio.run(_filled(tmp_path / "nvme", blocks, capacity_bytes))
    flags = ["--index-blocks", str(blocks + 1000), "--dram-extent-bytes", "2MiB"]
    flags += ["--scrub-bytes-per-s", "0"]  # which would find that the records tell of no blocks
    with DaemonProcess(tmp_path, flags, nvme_bytes=str(capacity_bytes)) as daemon, KVClient(daemon.address) as client:
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        assert client.lookup(namespace, hashes[: 32 * 8192]).blocks == 8192, "usage is right before the first request"
        assert next(tier.blocks for tier in client.stats().tiers if tier.tier == "nvme") == blocks
        used, arena = resident_bytes(daemon.pid)
        assert arena >= 64 << 20
        assert used <= FIXED_BYTES + BLOCK_BYTES * (blocks + 1000), f"{used / 1e6:.0f} MB for {blocks} blocks"
