"""Bytes that change by themselves, in memory and on disk, against a real daemon: who notices under which setting."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.clients.client import KVClient
from kvstore.clients.handles import Namespace
from kvstore.proto import kvstore_pb2 as pb
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import GEOMETRY, IDENTITY, chain, each_hash, pattern
from tests.cases.disks import flip
from tests.cases.figures import all_on_disk, eventually, read, store, tier
from tests.cases.raw import Raw

BLOCKS = 12  # blocks
SLOT_BYTES = GEOMETRY.slot_bytes
HASHES = chain(1, BLOCKS)
SLOWLY = f"{4 * SLOT_BYTES}B"  # a second: time enough to change what the check has not come by yet


@contextmanager
def running(directory: Path, *flags: str, nvme: bool = True) -> Iterator[tuple[DaemonProcess, KVClient, Namespace]]:
    """A daemon with a chain of blocks, a client, and its namespace."""
    with DaemonProcess(directory, flags, nvme=nvme) as daemon, KVClient(daemon.address) as client:
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        assert store(client, namespace, HASHES).stored == BLOCKS
        yield daemon, client, namespace


def arena_of(daemon: DaemonProcess) -> Path:
    (arena,) = daemon.shared.glob("*/arena")
    return arena


def spoil(file: Path, block: int) -> None:
    """Flip a bit in the middle of a block's bytes, wherever in the file they are."""
    wanted = pattern(each_hash(HASHES)[block]).tobytes()
    flip(file, file.read_bytes().index(wanted) + GEOMETRY.block_bytes // 2, 3)


def counter(client: KVClient, name: str) -> int:
    return client.stats().counters[name]


def known_checksums(client: KVClient) -> bool:
    """Wait until every block of the chain has its first checksum."""
    return eventually(lambda: counter(client, "verified") >= BLOCKS)


# ---- hits in dram


@pytest.mark.parametrize("nvme", [True, False], ids=["disk", "no disk"])
def test_a_bit_that_flips_in_memory_is_a_miss(tmp_path: Path, nvme: bool) -> None:
    with running(tmp_path, "--verify", "read", "--scrub-bytes-per-s", "0", nvme=nvme) as (daemon, client, namespace):
        assert known_checksums(client)
        assert not nvme or all_on_disk(client, BLOCKS)
        assert read(client, namespace, HASHES) == BLOCKS
        spoil(arena_of(daemon), 7)
        assert read(client, namespace, HASHES) == 7
        assert client.lookup(namespace, HASHES).blocks == 7
        assert (counter(client, "corrupt_blocks"), counter(client, "corrupt_found_by_read")) == (1, 1)
        assert tier(client, "dram").class_bytes["quarantined"] == SLOT_BYTES
        assert "found by read: removed everywhere; its slot is in quarantine" in daemon.log()
        assert store(client, namespace, each_hash(HASHES)[7], each_hash(HASHES)[6]).stored == 1
        assert read(client, namespace, HASHES) == BLOCKS
        assert tier(client, "dram").class_bytes["quarantined"] == SLOT_BYTES


def test_with_transfers_alone_verified_memory_is_trusted(tmp_path: Path) -> None:
    """What the default does not promise: the bytes of a hit in dram are those that lie there."""
    with running(tmp_path, "--scrub-bytes-per-s", "0") as (daemon, client, namespace):
        assert all_on_disk(client, BLOCKS)
        spoil(arena_of(daemon), 7)
        with client.get(namespace, HASHES) as lease:
            assert lease.blocks == BLOCKS
            assert bytes(lease.views[7]) != pattern(each_hash(HASHES)[7]).tobytes()
        assert counter(client, "corrupt_blocks") == 0


def test_a_client_that_cannot_map_memory_gets_verified_bytes_too(tmp_path: Path) -> None:
    with running(tmp_path, "--verify", "read", nvme=False) as (daemon, client, _):
        assert known_checksums(client)
        spoil(arena_of(daemon), 5)
        with Raw(daemon.address) as raw:
            request = pb.ReadRequest(namespace_id=raw.open(), hashes=HASHES, timeout_s=5, epoch=raw.attached.session.epoch)
            blocks = b"".join(piece.data for piece in raw.stub.Read(request, timeout=10) if piece.last)
        assert blocks == b"".join(pattern(key).tobytes() for key in each_hash(HASHES)[:5])


def test_a_slot_that_somebody_reads_is_not_taken_from_under_them(tmp_path: Path) -> None:
    with running(tmp_path, "--verify", "read", nvme=False) as (daemon, client, namespace):
        assert known_checksums(client)
        with client.get(namespace, HASHES) as lease:
            spoil(arena_of(daemon), 7)
            assert read(client, namespace, HASHES) == 7
            assert (lease.blocks, tier(client, "dram").class_bytes["doomed"]) == (BLOCKS, SLOT_BYTES)
        assert eventually(lambda: tier(client, "dram").class_bytes["quarantined"] == SLOT_BYTES)


def test_who_reads_right_after_the_commit_waits_for_the_checksum(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, ["--verify", "read"], nvme=False) as daemon, KVClient(daemon.address) as client:
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        for seed in range(20):
            assert store(client, namespace, chain(seed, 40)).stored == 40
            assert read(client, namespace, chain(seed, 40)) == 40
        assert counter(client, "corrupt_blocks") == 0


# ---- the background check


def test_a_bit_that_flips_on_disk_is_found_though_nobody_reads_it(tmp_path: Path) -> None:
    with running(tmp_path) as (daemon, client, namespace):
        assert all_on_disk(client, BLOCKS)
        daemon.stop()
        spoil(daemon.data / "data", 3)
        daemon.start()
        assert eventually(lambda: counter(client, "corrupt_found_by_scrub") == 1)
        assert "found by scrub: removed everywhere; its slot is in quarantine; check the disk" in daemon.log()
        assert eventually(lambda: client.stats().scrub_passes == 1)
        assert eventually(lambda: tier(client, "nvme").class_bytes["quarantined"] == SLOT_BYTES)
        assert client.lookup(namespace, HASHES).blocks == 3


def test_a_bit_that_flips_in_memory_is_found_too(tmp_path: Path) -> None:
    with running(tmp_path, "--scrub-bytes-per-s", SLOWLY) as (daemon, client, namespace):
        assert all_on_disk(client, BLOCKS)
        spoil(arena_of(daemon), 3)
        assert eventually(lambda: counter(client, "corrupt_found_by_scrub") == 1)
        assert tier(client, "dram").class_bytes["quarantined"] == SLOT_BYTES
        assert client.lookup(namespace, HASHES).blocks == 3


def test_a_pass_shows_in_stats_and_metrics(tmp_path: Path) -> None:
    with running(tmp_path, "--scrub-bytes-per-s", f"{10 * SLOT_BYTES}B") as (daemon, client, _):
        assert all_on_disk(client, BLOCKS)
        assert eventually(lambda: client.stats().scrub_passes == 1)
        stats = client.stats()
        assert stats.counters["scrubbed_bytes"] == 2 * BLOCKS * SLOT_BYTES
        assert 1.0 < stats.scrub_pass_s < 20.0
        with urllib.request.urlopen(f"http://{daemon.metrics_address}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        assert "kvstore_scrub_passes_total 1.0" in lines
        assert f'kvstore_transferred_bytes_total{{kind="scrub"}} {2.0 * BLOCKS * SLOT_BYTES}' in lines
        assert f"kvstore_scrub_pass_seconds {stats.scrub_pass_s}" in lines


def test_the_background_check_can_be_turned_off(tmp_path: Path) -> None:
    with running(tmp_path, "--scrub-bytes-per-s", "0") as (_, client, _):
        assert all_on_disk(client, BLOCKS)
        assert not eventually(lambda: counter(client, "scrubbed_bytes") > 0, within_s=1.0)
