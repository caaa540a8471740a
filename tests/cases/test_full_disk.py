"""Case 33: the disk's share is fixed, and a disk that has no more room than that is a degraded tier, not an end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.clients.channel import target
from kvstore.clients.client import KVClient
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import GEOMETRY, IDENTITY, chain, each_hash
from tests.cases.disks import limit_files, tiny_disk
from tests.cases.figures import all_on_disk, eventually, opaque, present, read, settled, store, store_each, tier

SLOT_BYTES = GEOMETRY.slot_bytes
MIB = 1 << 20  # bytes


def serving(daemon: DaemonProcess, service: str) -> bool:
    """What grpc's health service says."""
    with grpc.insecure_channel(target(daemon.address)) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def taken_bytes(directory: Path) -> int:
    """What the files of a directory have of their disk."""
    return sum(file.stat().st_blocks * 512 for file in directory.iterdir())


def test_the_disk_is_never_used_past_its_share(tmp_path: Path) -> None:
    """Case 33: ten times the disk's size in blocks of several sizes takes not a byte more of it than was asked, records aside."""
    with DaemonProcess(tmp_path, dram="8MiB", nvme_bytes="16MiB") as daemon, KVClient(daemon.address) as client:
        namespaces = [client.open_namespace(IDENTITY, opaque(size)) for size in (4096, 100_000, 1_000_000)]
        at_start_bytes = taken_bytes(daemon.data)
        assert 16 * MIB <= at_start_bytes < 16.5 * MIB
        for seed in range(32):
            for namespace in namespaces:
                blocks = (2 * MIB) // namespace.geometry.slot_bytes
                assert store(client, namespace, chain(seed, blocks)).stored == blocks
            assert settled(client)
        assert (daemon.data / "data").stat().st_size == 16 * MIB
        assert taken_bytes(daemon.data) < at_start_bytes + MIB  # records: 128 bytes a slot
        assert tier(client, "nvme").blocks > 0


def test_more_than_the_disk_has_is_refused_in_words(tmp_path: Path) -> None:
    """Case 33: room is taken at the start, or the start is refused: what was asked, what is there, what to do."""
    daemon = DaemonProcess(tmp_path, nvme_bytes="15TiB")
    with pytest.raises(RuntimeError, match=r"nvme data: 15\.0 TiB asked, .* has .*iB free; set a smaller --nvme-bytes or free some room"):
        daemon.start()
    assert taken_bytes(daemon.data) < MIB
    daemon.close()


@pytest.mark.parametrize("cut", [0, 4096], ids=["nothing more fits", "half of a block fits"])
def test_a_full_disk_degrades_and_recovers(daemon: DaemonProcess, client: KVClient, cut: int) -> None:
    """Case 33: no room, or a short write: not admitted, degraded in statistics and health, serving from memory; whole again later."""
    namespace = client.open_namespace(IDENTITY, GEOMETRY)
    assert eventually(lambda: serving(daemon, "kvstore.tier.nvme") == (tier(client, "nvme").health == "ok"))
    limit_files(daemon.pid, 40 * SLOT_BYTES + cut)
    assert store(client, namespace, chain(1, 100)).stored == 100
    assert eventually(lambda: tier(client, "nvme").health == "degraded")
    assert "free some room" in tier(client, "nvme").health_reason
    assert eventually(lambda: not serving(daemon, "kvstore.tier.nvme"))
    assert serving(daemon, "")
    assert eventually(lambda: tier(client, "nvme").blocks == 40), "what fits is there, and no more"
    assert read(client, namespace, chain(1, 100)) == 100
    assert store(client, namespace, chain(2, 100)).stored == 100
    limit_files(daemon.pid, None)
    assert all_on_disk(client, 200)
    assert eventually(lambda: "free some room" not in tier(client, "nvme").health_reason)
    daemon.restart()
    assert read(client, namespace, chain(1, 100)) == read(client, namespace, chain(2, 100)) == 100


@pytest.fixture
def crowded(tmp_path: Path) -> Iterator[tuple[DaemonProcess, Path, bool]]:
    """A daemon on a disk that others have filled to the last byte; the file that fills it; whether it is a disk of its own."""
    disk = tmp_path / "disk"
    with tiny_disk(disk, 20 * MIB) as mounted, DaemonProcess(disk, nvme_bytes="16MiB") as daemon:
        ballast = disk / "ballast"
        if mounted:
            with ballast.open("wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(4096))
        else:
            limit_files(daemon.pid, 64 << 10)  # what a session's file and the log need
        yield daemon, ballast, mounted


def test_a_disk_filled_by_others_is_no_end(crowded: tuple[DaemonProcess, Path, bool]) -> None:
    """Case 33: with not a byte left even for records and names, blocks stay in memory, and go down once there is room."""
    daemon, ballast, mounted = crowded
    with KVClient(daemon.address) as client:
        sizes = [client.open_namespace(IDENTITY, opaque(size)) for size in (4_096, 16_384, 65_536)]
        for seed, namespace in enumerate(sizes):
            assert store(client, namespace, chain(seed, 60)).stored == 60
            assert read(client, namespace, chain(seed, 60)) == 60
        assert eventually(lambda: "free some room" in tier(client, "nvme").health_reason)
        assert tier(client, "nvme").health == "degraded"
        assert serving(daemon, "")
        if mounted:
            ballast.unlink()
        else:
            limit_files(daemon.pid, None)
        assert all_on_disk(client, 180)
        daemon.restart()
        assert [read(client, namespace, chain(seed, 60)) for seed, namespace in enumerate(sizes)] == [60] * 3


def test_what_was_not_admitted_is_a_miss(tmp_path: Path) -> None:
    """Case 33: blocks that no disk took are gone once memory needs their room; nobody is told otherwise."""
    with DaemonProcess(tmp_path, dram="8MiB", nvme_bytes="16MiB") as daemon, KVClient(daemon.address) as client:
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        limit_files(daemon.pid, 10 * SLOT_BYTES)
        store_each(client, namespace, chain(1, 100))
        store_each(client, namespace, chain(2, 512))
        assert client.stats().counters["dropped_before_written"] > 0
        here = present(client, namespace, chain(1, 100))
        assert sum(here) < 100
        left = [read(client, namespace, key) for key in each_hash(chain(1, 100))]  # what comes up from the disk may push others out
        assert 0 < sum(left) <= sum(here)
        assert not any(found and not was for found, was in zip(left, here, strict=True))
